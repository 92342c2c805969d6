"""Preparation of an attempt: its uv environment, and reasons of a failed start.

This module must stay light, as the client and the CLI load it.
"""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline import faults
from paceline._cluster.messages.states import ErrorKind, ExitReason

LOCK_NAME = "uv.lock"
_POLL_S = 0.2
_NUM_LINES_TOLD = 8


logger = logging.getLogger(__name__)

# No space, no inodes or no quota left on a disk; no file descriptors, processes or memory.
_SHORTAGES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
}
# A disk or a file server that does not answer, or not well.
_DISTURBANCES = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
# The text of Python's error alone says that the system gave it no thread.
_NO_THREAD = "can't start new thread"


class UnusableConfigError(ValueError):
    """Raised when an attempt cannot start as its configuration says."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error or any of its causes is a temporary shortage of resources."""
    return any(
        isinstance(cause, MemoryError) or str(cause) == _NO_THREAD or _has_number(cause, _SHORTAGES)
        for cause in _causes(error)
    )


def judge_start(error: BaseException) -> tuple[ExitReason, ErrorKind]:
    """Return the exit reason and error kind for an error during an attempt's start."""
    if is_shortage(error):
        return ExitReason.SHORTAGE, ErrorKind.TRANSIENT
    kind = ErrorKind.PERMANENT
    if any(_has_number(cause, _DISTURBANCES) for cause in _causes(error)):
        kind = ErrorKind.TRANSIENT
    elif isinstance(error, UnusableConfigError):
        kind = ErrorKind.USER
    return ExitReason.START_FAILED, kind


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def _has_number(error: BaseException, numbers: set[int]) -> bool:
    return isinstance(error, OSError) and error.errno in numbers


def sync_environment(
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Install the packages of the lock file, and return variables pointing to the environment.

    Args:
        directory: The copy of the code, with `pyproject.toml` and `uv.lock`.
        environment: The variables of the attempt.
        on_line: Gets each line that `uv` prints.
        is_unwanted: Tells whether the attempt is to end; the installation then ends early.

    Raises:
        UnusableConfigError: There is no `uv` or no lock file, or `uv` fails.
    """
    program = find_uv(environment)
    if program is None:
        raise UnusableConfigError(
            f"`environment.uv` needs the program `uv` on {os.uname().nodename!r}, but it is not"
            " there. Hint: `pip install uv` for the interpreter of the runner, or put it on PATH."
        )
    if not (directory / LOCK_NAME).is_file():
        raise UnusableConfigError(missing_lock(directory))
    # Variables of an environment activated for the runner must not affect `uv`.
    kept = {k: v for k, v in environment.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    place = directory / ".venv"
    kept["UV_PROJECT_ENVIRONMENT"] = str(place)
    _run_uv([program, "sync", "--frozen", "--no-progress"], directory, kept, on_line, is_unwanted)
    path = os.pathsep.join([str(place / "bin"), kept.get("PATH", os.defpath)])
    return kept | {"VIRTUAL_ENV": str(place), "PATH": path}


def find_uv(environment: Mapping[str, str]) -> str | None:
    """Return the path of `uv`: on PATH, or beside this interpreter."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("uv", path=environment.get("PATH")) or shutil.which("uv", path=beside)


def missing_lock(directory: Path) -> str:
    """Return the error message for a directory without a lock file."""
    return (
        f"`environment.uv` needs the file {LOCK_NAME!r} in the directory of the code, but"
        f" {str(directory)!r} has none. Hint: `uv lock` makes it from `pyproject.toml`."
    )


def _run_uv(
    command: list[str],
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool],
) -> None:
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=_NUM_LINES_TOLD)

    def pass_on() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                last.append(line.rstrip())
                on_line(line.rstrip("\n"))

    reader = threading.Thread(target=pass_on, name="uv-output", daemon=True)
    reader.start()
    while (code := _wait(process)) is None:
        if is_unwanted():
            # The whole group: uv's children hold the pipe as well.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
    reader.join()
    if code:
        text = "\n".join(last)
        raise UnusableConfigError(f"`uv sync --frozen` ended with code {code}:\n{text}")


def _wait(process: "subprocess.Popen[str]") -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


faults.register("runner.end_shipped")
