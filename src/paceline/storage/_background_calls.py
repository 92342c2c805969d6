"""Calls in the background, of which a few run at once."""

import threading
from collections.abc import Callable
from types import TracebackType

from paceline._waiting import wait_until


class BackgroundCalls:
    """Run calls in threads that do not keep a process from ending.

    Where there can be no further thread, a call runs in that of the caller. Leaving a `with` block
    waits for all calls.

    Args:
        at_once: How many run at once; 0 for all in the thread of the caller.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._changed = threading.Condition()
        self._num_running = 0
        self._error: BaseException | None = None

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call, as soon as fewer than allowed are running.

        Raises:
            BaseException: What an earlier call has raised.
        """
        if self._at_once < 1:
            call()
            return
        self._wait_for_fewer_than(self._at_once)
        with self._changed:
            self._num_running += 1
        thread = threading.Thread(
            target=self._run, args=(call,), name="paceline-store-background", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # At the limit of threads, or at the end of the interpreter.
            with self._changed:
                self._num_running -= 1
            call()

    def wait(self) -> None:
        """Wait for all calls.

        Raises:
            BaseException: What the first of them to fail has raised.
        """
        self._wait_for_fewer_than(1)

    def _wait_for_fewer_than(self, number: int) -> None:
        with self._changed:
            wait_until(
                lambda slice_s: self._changed.wait_for(lambda: self._num_running < number, slice_s)
            )
            if self._error is not None:
                raise self._error

    def _run(self, call: Callable[[], object]) -> None:
        error = None
        try:
            call()
        except BaseException as raised:  # raised by the next call of a method
            error = raised
        with self._changed:
            self._error = self._error or error
            self._num_running -= 1
            self._changed.notify_all()

    def __enter__(self) -> "BackgroundCalls":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except Exception:
            # That of the block is told.
            if error is None:
                raise
