"""Signal handling in loader processes, for signals to a whole job."""

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

_WORKER_LOOP = "_worker_loop"


class LoaderSignals:
    """A `worker_init_fn` whose process lets a first signal pass that asks training to leave.

    Such signals often go to all processes of a job, and the last batches must still be served. A
    second one is meant. So is that by which a program that exits ends its loaders' processes, or a
    loader one that does not leave.

    Args:
        then: The user's `worker_init_fn`.
        start_method: How the loader starts its processes; None for the default.
    """

    def __init__(self, then: Callable[[int], None] | None, start_method: str | None) -> None:
        self._then = then
        self._is_exiting = _exit_event(start_method)
        self._passed: set[int] = set()

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._let_pass)
        if self._then is not None:
            self._then(worker)

    def _let_pass(self, number: int, frame: FrameType | None) -> None:
        if self._is_exiting.is_set() or _has_loader_ended(frame):
            os._exit(0)
        if number in self._passed:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._passed.add(number)


def _has_loader_ended(frame: FrameType | None) -> bool:
    """Tell whether the loader of this process has told it to end, by torch's own event.

    The event is not asked itself, as its lock may be held by the code that the signal interrupts.
    """
    while frame is not None and frame.f_code.co_name != _WORKER_LOOP:
        frame = frame.f_back
    done: Any = None if frame is None else frame.f_locals.get("done_event")
    # Not every system tells the value of a semaphore.
    with suppress(AttributeError, NotImplementedError):
        return bool(done._flag._semlock._get_value())
    return False


@cache
def _exit_event(start_method: str | None) -> Any:
    """Return an event for other processes that is set when this one begins to exit."""
    event = multiprocessing.get_context(start_method).Event()
    atexit.register(event.set)
    return event
