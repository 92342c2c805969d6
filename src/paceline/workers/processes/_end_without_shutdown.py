"""The end of a worker that some other launcher started.

With gloo a process that has done all its work can still abort while the interpreter shuts down (see
`_worker_program`), and other launchers judge by the exit code. So such a process ends as ours do:
its exit handlers run, its streams are flushed, the process group is left, and then it ends at once.
"""

import atexit
import dis
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from paceline.workers.processes._signals import signal_with_parent
from paceline.workers.processes._worker_program import (
    FLUSH_FAILED,
    INTERRUPTED,
    RUNNING_MARK,
    exit_code_of,
    flush,
    leave_process_group,
)


def end_without_shutdown() -> None:
    """Let this process end so that nothing after its last exit handler can change its code.

    Does nothing in workers of our own, and when it was called before. From then on `sys.exit`
    notes what it is given, since Python tells nobody. A code that is not known (`raise
    SystemExit(3)`, which passes by `sys.exit`) is left to Python.

    A worker of torchrun gets SIGTERM when torchrun itself ends, as a second Ctrl-C makes it do.
    """
    if RUNNING_MARK in sys.modules or _Ending.is_installed:
        return
    _Ending.is_installed = True
    _Ending().install()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_with_parent(signal.SIGTERM)


class _Ending:
    """Knows how the main program has ended."""

    is_installed = False

    def __init__(self) -> None:
        self._program = _outermost_frame()
        self._exit = sys.exit
        self._requests: list[object] = []

    def install(self) -> None:
        sys.exit = self._note_exit
        # Threads are waited for before exit handlers run, and the last to be registered is the
        # first to run: it runs all others and does not come back.
        threading._register_atexit(self._register)  # type: ignore[attr-defined] # as futures do

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._requests.append(status)
        self._exit(status)

    def _register(self) -> None:
        atexit.register(self._leave)

    def _leave(self) -> None:
        code = self._exit_code()
        if code is None:
            leave_process_group()
            return
        atexit.unregister(self._leave)
        atexit._run_exitfuncs()
        if not flush() and code == 0:
            code = FLUSH_FAILED
        if code == 0:
            _finalize_mpi()
            leave_process_group()
        os._exit(code)

    def _exit_code(self) -> int | None:
        """Return the code that Python is about to end with, or None if that is not known."""
        if _has_returned(self._program):
            return 0
        error = getattr(sys, "last_value", None)
        if error is not None:
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return exit_code_of(self._requests[-1]) if self._requests else None


def _finalize_mpi() -> None:
    """End the use of MPI, as mpi4py does only when Python shuts down.

    mpiexec takes a process that leaves without it for one that has failed, and kills the others.
    After a failure that is right.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.Is_thread_main():
        mpi.Finalize()


def _outermost_frame() -> FrameType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Tell whether a frame that is no longer run ended by returning, not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
