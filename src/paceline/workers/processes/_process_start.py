"""Start, wait and reap of a worker's process."""

import os
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import IO

from paceline.workers.processes import _exec
from paceline.workers.processes._worker_spec import WorkerSpec

# A supervisor that died before the signal was asked for can no longer send it.
_EXECUTE = '[ "$PPID" = "$0" ] || kill -s KILL "$$"; exec "$@"'


class ProcessHandle(ABC):
    """A started process, whose id is not used again until it is reaped.

    Attributes:
        pid: Its id, which is also that of its session and process group.
        stdout: What it prints, or None if that goes where this process's output goes.
        stderr: The same for its error output.
    """

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @abstractmethod
    def await_end(self) -> tuple[int, int | None]:
        """Wait for the end; return the exit code (128 + N for a signal N) and the signal."""

    @abstractmethod
    def reap(self) -> None:
        """Let the system forget a process that has ended."""


Start = Callable[[WorkerSpec, Mapping[str, str], bool], ProcessHandle]


def start_process(spec: WorkerSpec, environment: Mapping[str, str], is_read: bool) -> ProcessHandle:
    """Run a worker's command as a child that dies with the calling thread.

    Args:
        spec: What to run.
        environment: The worker's whole environment.
        is_read: Whether its output comes here; else it goes where this process's output goes.

    Raises:
        OSError: The process cannot be started.
    """
    return _Child(
        subprocess.Popen(
            [*_tie(spec.command[0], environment), *spec.command],
            env=environment,
            cwd=spec.working_directory,
            stdin=subprocess.DEVNULL if is_read else None,
            stdout=subprocess.PIPE if is_read else None,
            stderr=subprocess.PIPE if is_read else None,
            bufsize=0,
            start_new_session=True,
            pass_fds=spec.descriptors,
        )
    )


def _tie(program: str, environment: Mapping[str, str]) -> list[str]:
    """Return what executes a command that ends with this process.

    Where util-linux is installed that is `setpriv`, which takes a tenth of an interpreter's time.
    """
    setpriv, shell = _find_setpriv(), shutil.which("sh", path=os.defpath)
    can_run = shutil.which(program, path=environment.get("PATH", os.defpath)) is not None
    if setpriv and shell and can_run and (os.path.isabs(program) or os.sep not in program):
        return [setpriv, "--pdeathsig", "KILL", shell, "-c", _EXECUTE, str(os.getpid())]
    # It says by itself what is wrong with a command that cannot be run.
    return [sys.executable, "-I", "-S", _exec.__file__, str(os.getpid())]


def prepare_start() -> None:
    """Find out how processes are started; forks of this process need not do so again."""
    _find_setpriv()


@cache
def _find_setpriv() -> str | None:
    setpriv = shutil.which("setpriv", path=os.defpath) if sys.platform == "linux" else None
    if setpriv is None:
        return None
    test = [setpriv, "--pdeathsig", "KILL", "true"]
    return None if subprocess.run(test, capture_output=True).returncode else setpriv


class _Child(ProcessHandle):
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.stdout = popen.stdout
        self.stderr = popen.stderr

    def await_end(self) -> tuple[int, int | None]:
        if hasattr(os, "waitid"):
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert result is not None
            has_exited = result.si_code == os.CLD_EXITED
            return ended(result.si_status if has_exited else -result.si_status)
        # Before Python 3.13 macOS has no call that leaves the zombie, so the process id is free
        # for others a little early there.
        return ended(self._popen.wait())

    def reap(self) -> None:
        self._popen.wait()


def ended(returncode: int) -> tuple[int, int | None]:
    """Return code and signal for a `returncode` as `subprocess` has it."""
    return (returncode, None) if returncode >= 0 else (128 - returncode, -returncode)


KILLED = ended(-signal.SIGKILL)
