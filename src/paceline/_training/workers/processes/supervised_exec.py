"""Become a worker's command, tied to the life of the supervisor.

Run as ``python -I -S _exec.py SUPERVISOR_PID COMMAND...``; it imports nothing of Paceline. A small
program instead of `subprocess`'s `preexec_fn`: that would run Python between fork and exec of a
process with threads, which can deadlock, and would rule out the cheap vfork. It costs about 10 ms.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def _die_with_supervisor(supervisor: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A supervisor that died before the call above can no longer send the signal.
    if os.getppid() != supervisor:
        os._exit(128 + signal.SIGKILL)


def _fail(text: str, code: int) -> None:
    os.write(2, f"paceline: {text}\n".encode(errors="replace"))
    os._exit(code)


def main(arguments: list[str]) -> None:
    """Tie this process to the supervisor, then execute the command in its place."""
    supervisor, *command = arguments
    _die_with_supervisor(int(supervisor))
    # Python ignores these signals for itself, and ignored signals stay ignored across exec.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except FileNotFoundError:
        _fail(f"the command {command[0]!r} was not found.", NOT_FOUND)
    except OSError as error:
        _fail(f"the command {command[0]!r} cannot be run: {error.strerror}.", NOT_EXECUTABLE)


if __name__ == "__main__":
    main(sys.argv[1:])
