"""Memory that outlives the workers of a run: a private directory, owned by their parent."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from paceline._base.files import NotRegularFileError, temporary_directory

MEMORY_DIRECTORY_VARIABLE = "PACELINE_MEMORY_DIR"
_RUN_MEMORY_VARIABLE = "PACELINE_RUN_MEMORY"


def memory_root() -> Path:
    """Return where memory is made that outlives processes: PACELINE_MEMORY_DIR or /dev/shm."""
    return Path(os.environ.get(MEMORY_DIRECTORY_VARIABLE) or "/dev/shm")  # noqa: S108


@contextmanager
def run_memory(*, is_wanted: bool) -> Iterator[dict[str, str]]:
    """Own a directory in memory for the states of workers that may start again.

    Args:
        is_wanted: Whether they may start again.

    Yields:
        The variable that names it to the workers; none without such a directory.
    """
    with ExitStack() as stack:
        variables = {}
        # Workers that need it say so.
        with suppress(OSError):
            if is_wanted:
                path = stack.enter_context(temporary_directory(memory_root()))
                variables = {_RUN_MEMORY_VARIABLE: str(path)}
        yield variables


def own_run_memory() -> Path | None:
    """Return the directory in memory that this process's parent owns; None without one.

    Raises:
        NotRegularFileError: It is not a private directory of this user.
        OSError: It cannot be opened.
    """
    path = os.environ.get(_RUN_MEMORY_VARIABLE)
    if not path:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        text = f"Memory must be a directory of user {os.geteuid()} alone"
        raise NotRegularFileError(errno.EPERM, text, path)
    return Path(path)
