"""Signals: noted by a driver, sent to a process group, or sent when the parent ends."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

# Has a worker write the stacks of its threads to its error output. A signal that nobody else uses
# where there are such, and one that interrupts also a thread that holds Python's lock.
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

# What a scheduler, a terminal or a shell may send to all processes of a job.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_PR_SET_PDEATHSIG = 1
_IS_LINUX = sys.platform == "linux"


@contextmanager
def noted_signals(names: Sequence[str], note: Callable[[int], object]) -> Iterator[None]:
    """Have a function note signals within the block, if this is the main thread.

    Signals for which someone has set a handler stay as they are.

    Args:
        names: The signals, such as "SIGTERM".
        note: Gets the number of a signal; it is called in the signal handler.
    """

    def handle(signum: int, _: FrameType | None) -> None:
        note(signum)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            number = getattr(signal, name)
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_group(pgid: int, signum: int) -> None:
    """Send a signal to a process group; one that is gone is no error."""
    # macOS says "not permitted" for a group of zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def signal_with_parent(signum: int) -> bool:
    """Have this process get a signal when the one that started it ends.

    Returns:
        False where the operating system has no such thing.
    """
    return control_process(_PR_SET_PDEATHSIG, signum)


def control_process(option: int, value: int) -> bool:
    """Set an option of this process; False where the system has no such thing."""
    if not _IS_LINUX:
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)
