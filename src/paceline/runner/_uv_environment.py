"""The environment that `uv` makes of a project's lock file, in the attempt's copy of the code."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.runner._start_errors import UnusableConfigError

LOCK_NAME = "uv.lock"

_POLL_S = 0.2
_NUM_LINES_TOLD = 8


def sync_environment(
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Install what the lock file names, and return the variables with which the code finds it.

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
    # What an activated environment of the runner says must not count.
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
    """Return what to say of a directory without a lock file."""
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
