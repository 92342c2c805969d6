"""Requests to a store, sent once more beside one that is slow to answer."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from paceline._waiting import wait_until

T = TypeVar("T")

_FIRST_DELAY_S = 5.0
# A request is slow if it takes so many times as long as the slowest one that was answered.
_FACTOR = 3.0
_MOST_CALLS = 3

# How long a call took, what it returned, and what it raised instead.
_Ended: TypeAlias = "queue.SimpleQueue[tuple[float, Any, BaseException | None]]"


class HedgedCalls:
    """Call functions that may hang; the first answer of several equal calls counts.

    A call that takes three times as long as the slowest answer so far, and 5 seconds at least, is
    repeated beside it, twice at most. A call that hangs keeps a thread until its own time limit;
    the thread does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._slowest_s = 0.0

    def call(self, function: Callable[[], T]) -> T:
        """Return the first answer.

        Raises:
            Exception: What the last of the calls has raised, if none had an answer.
        """
        ended: _Ended = queue.SimpleQueue()
        delay_s = max(_FIRST_DELAY_S, _FACTOR * self._slowest_s)
        num_running = 0
        for number in range(1, _MOST_CALLS + 1):
            if _start(function, ended):
                num_running += 1
            elif not num_running:
                return function()
            is_last = number == _MOST_CALLS
            while num_running and (first := _first(ended, None if is_last else delay_s)):
                [(seconds, answer, error)] = first
                num_running -= 1
                if error is None:
                    self._slowest_s = max(self._slowest_s, seconds)
                    return answer  # type: ignore[no-any-return]
                if not num_running:
                    raise error
            delay_s *= 2
        raise AssertionError("the last wait has no end")


def _start(function: Callable[[], Any], ended: _Ended) -> bool:
    """Call a function in a thread of its own; return False at the limit of threads."""

    def run() -> None:
        begun = time.monotonic()
        answer, error = None, None
        try:
            answer = function()
        except BaseException as raised:  # raised in the thread that waits
            error = raised
        ended.put((time.monotonic() - begun, answer, error))

    try:
        threading.Thread(target=run, name="paceline-store-read", daemon=True).start()
    except RuntimeError:
        return False
    return True


def _first(ended: _Ended, timeout_s: float | None) -> list[tuple[float, Any, BaseException | None]]:
    """Return the call that ends next, in a list; an empty one if none does in time."""

    def wait(slice_s: float | None) -> list[tuple[float, Any, BaseException | None]]:
        try:
            return [ended.get(timeout=slice_s)]
        except queue.Empty:
            return []

    return wait_until(wait, timeout_s)
