"""A call that workers carry out, as their driver sees it."""

import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

from paceline._waiting import wait_until
from paceline.workers.pools._pickling import load


class PendingCall:
    """A call that workers carry out; may be used from any thread.

    Args:
        number: Tells it from other calls of the same pool.
        ranks: The ranks that carry it out.
    """

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = tuple(sorted(ranks))
        self._changed = threading.Condition()
        self._pickled: dict[int, bytes | bytearray] = {}
        self._values: list[Any] | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: list[Callable[[PendingCall], object]] = []

    @property
    def is_done(self) -> bool:
        """Whether all ranks have returned, or the call has failed."""
        return self._is_done

    @property
    def error(self) -> BaseException | None:
        """What the call has failed by; None if it goes on, or its ranks have returned."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> list[Any] | None:
        """Return what the function returned, in rank order; None after `timeout_s`.

        Raises:
            NotSendableError: A value that it returned cannot be pickled.
            WorkerFailedError: A worker died, was stopped, hung or left by `sys.exit()`.
            RuntimeError: The pool was shut down before the call had ended.
            Exception: What the function raised on the rank that failed first, with the traceback
                of that rank as its cause.
        """
        with self._changed:
            if not wait_until(self._wait_done, timeout_s):
                return None
            if self._error is not None:
                raise self._error
            if self._values is None:
                self._values = [load(io.BytesIO(self._pickled[rank])) for rank in self.ranks]
                self._pickled.clear()
            return list(self._values)

    def add_done_callback(self, function: Callable[["PendingCall"], object]) -> None:
        """Call a function with this call once it is done, at once if it is.

        It runs in a thread of the pool, must return soon and must not raise.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(function)
                return
        function(self)

    # For pools alone.

    def finish(self, values: list[Any]) -> None:
        """End the call with what was returned in this process."""
        self._values = values
        self._finish()

    def answer(self, rank: int, pickled: bytes | bytearray) -> None:
        """Take what a rank returned; the last of them ends the call."""
        self._pickled[rank] = pickled
        if len(self._pickled) == len(self.ranks):
            self._finish()

    def has_returned(self, rank: int) -> bool:
        """Tell whether a rank has returned."""
        return rank in (self._pickled if self._values is None else self.ranks)

    def fail(self, error: BaseException) -> None:
        """End the call by an error; does nothing if it has ended."""
        if not self._is_done:
            self._error = error
            self._pickled.clear()
            self._finish()

    def _wait_done(self, timeout_s: float | None) -> bool:
        return self._changed.wait_for(lambda: self._is_done, timeout_s)

    def _finish(self) -> None:
        with self._changed:
            self._is_done = True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
