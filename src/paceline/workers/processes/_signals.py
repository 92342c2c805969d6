"""Signals to a driver, noted while it waits for its workers."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


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
