"""Memory for the states of a run, which outlives the processes that train."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from paceline._base.files import NotRegularFileError, remove_tree, temporary_directory

MEMORY_DIRECTORY_VARIABLE = "PACELINE_MEMORY_DIR"
_RUN_MEMORY_VARIABLE = "PACELINE_RUN_MEMORY"
TRIAL_MEMORY_VARIABLE = "PACELINE_TRIAL_MEMORY"
MEMORY_VARIABLES = (_RUN_MEMORY_VARIABLE, TRIAL_MEMORY_VARIABLE)
# The file whose lock says that a process uses the memory of its trial, and whose mark says that one
# of this attempt has. It is made anew in each attempt.
CLAIM_NAME = "claim"


def memory_root() -> Path:
    """Return where memory is made that outlives processes: PACELINE_MEMORY_DIR or /dev/shm."""
    return Path(os.environ.get(MEMORY_DIRECTORY_VARIABLE) or "/dev/shm")  # noqa: S108


@contextmanager
def run_memory(*, is_wanted: bool) -> Iterator[dict[str, str]]:
    """Own a directory in memory for the states of workers that may start again.

    It is the one of the trial, if a runner has made one and no other process uses it.

    Args:
        is_wanted: Whether they may start again.

    Yields:
        The variable that names it to the workers; none without such a directory.
    """
    with ExitStack() as stack:
        path = None
        # Workers that need it say so.
        with suppress(OSError):
            path = _claim_trial_memory(stack)
        with suppress(OSError):
            if path is None and is_wanted:
                path = stack.enter_context(temporary_directory(memory_root()))
        yield {} if path is None else {_RUN_MEMORY_VARIABLE: str(path)}


# The claim of this process for a run of its own, until it ends.
_own_claim: tuple[Path, ExitStack] | None = None


def own_run_memory(*, is_alone: bool = False) -> Path | None:
    """Return the directory in memory that this process's parent owns; None without one.

    Args:
        is_alone: Whether this process is the only worker: it may use the memory of its trial.

    Raises:
        NotRegularFileError: It is not a private directory of this user.
        OSError: It cannot be opened.
    """
    global _own_claim
    path = os.environ.get(_RUN_MEMORY_VARIABLE)
    if path:
        os.close(open_private_directory(path))
        return Path(path)
    if is_alone and _own_claim is None:
        with ExitStack() as stack:
            if (claimed := _claim_trial_memory(stack)) is not None:
                _own_claim = claimed, stack.pop_all()
    return _own_claim[0] if is_alone and _own_claim is not None else None


def open_private_directory(path: str) -> int:
    """Return a descriptor of a directory that this user alone may enter.

    Raises:
        NotRegularFileError: It is no such directory.
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        os.close(descriptor)
        text = f"Memory must be a directory of user {os.geteuid()} alone"
        raise NotRegularFileError(errno.EPERM, text, path)
    return descriptor


def _claim_trial_memory(stack: ExitStack) -> Path | None:
    """Return the memory of this process's trial, claimed until the stack ends; None if it cannot.

    Raises:
        OSError: It is not there any more, or another process uses it.
    """
    path = os.environ.get(TRIAL_MEMORY_VARIABLE)
    # A job that names another place for its memory needs its room.
    if not path or Path(path).parent != memory_root():
        return None
    directory = open_private_directory(path)
    stack.callback(os.close, directory)
    # Also without its runner, nobody takes it for a leftover.
    fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    # For reading alone: with a file open for writing, a program looks for what it has to flush.
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    claim = os.open(CLAIM_NAME, flags, 0o600, dir_fd=directory)
    stack.callback(os.close, claim)
    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Its mark; a new file never has this mode.
    if not os.fstat(claim).st_mode & stat.S_IXUSR:
        if (Path(os.environ.get("PACELINE_RUN_DIR", "")) / "journal").exists():
            # A process of this attempt has trained without the states, from an earlier step.
            # The claim is a file, and stays.
            for each in Path(path).iterdir():
                remove_tree(each)
        os.fchmod(claim, stat.S_IRWXU)
    return Path(path)
