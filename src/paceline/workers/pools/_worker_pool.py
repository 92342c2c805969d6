"""Workers that carry out one call after the other, as their driver sees them."""

import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline._waiting import wait_until
from paceline.workers.pools._pickling import load
from paceline.workers.processes._worker_spec import WorkerProcess


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


class WorkerPool(ABC):
    """Warm workers that carry out calls, one after the other, until they are shut down.

    A pool can be started again after a failure or a `stop`, also with another number of workers;
    each time is a new generation of workers. When a call fails, its pool stops all workers in
    bounded time. Implementers provide the methods below; each may be called from any thread.

    Attributes:
        needs_reservation: Whether somebody else may take the place of a worker that could run, so
            that more workers must be reserved before they are counted on.
        placement_timeout_s: How long a start may wait for room that others use, in seconds.
    """

    needs_reservation = False
    placement_timeout_s = 60.0

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers, or how many the next start begins with."""

    @property
    @abstractmethod
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order; empty where they are not on this node."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether all workers are there and take calls."""

    @abstractmethod
    def capacity(self) -> int:
        """Return how many workers could run at this moment, the living ones of this pool included.

        Those on nodes that will be taken away do not count. It never waits; `sys.maxsize` says that
        nothing limits their number.
        """

    def leaving_ranks(self) -> Sequence[int]:
        """Return the ranks of the workers on nodes that will be taken away, as was announced.

        By default there are none.
        """
        return []

    def reserve(self, num_workers: int) -> int:
        """Set aside what more workers need, and return how many can be started for certain.

        It hardly waits: what takes longer goes on, so call it again. By default all are certain,
        as where nobody else can take the place of a worker.

        Args:
            num_workers: How many there are to be, the living ones of this pool included.
        """
        return num_workers

    def request(self, num_workers: int) -> None:  # noqa: B027 - most pools have nothing to do here
        """Ask for room for more workers than could run, where something adds machines for them.

        Args:
            num_workers: How many there are to be, the living ones of this pool included.
        """

    def cancel_reservation(self) -> None:  # noqa: B027 - most pools have nothing to do here
        """Give back what `reserve` or `request` has set aside and no worker has used."""

    @abstractmethod
    def start(self, num_workers: int | None = None) -> None:
        """Start a generation of workers and wait until they take calls.

        Args:
            num_workers: How many; as many as last time by default.

        Raises:
            RuntimeError: The workers of the last start are alive.
            ValueError: `num_workers` is below 1.
            WorkerStartError: A worker cannot be started; none is left running.
        """

    @abstractmethod
    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Have workers call a function, after what was submitted before, and return at once.

        Args:
            function: What to call, on each rank alike.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            ranks: Who calls it; all ranks by default.

        Raises:
            NotSendableError: The function or an argument cannot be pickled.
            RuntimeError: The workers were not started, or were stopped; as `WorkerFailedError`
                if one of them has died.
            ValueError: `ranks` is empty or names a worker that does not exist.
        """

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to all workers that still run."""

    @abstractmethod
    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Have the workers ended after a time, and return at once.

        Args:
            grace_s: When to kill those that are left, in seconds from now.
            is_asked: Whether the workers have been asked to leave already.
        """

    @abstractmethod
    def drain(self, timeout_s: float) -> None:
        """Wait until what the workers have printed so far was delivered, but not for longer."""

    @abstractmethod
    def await_end(self) -> None:
        """Wait until all workers have ended, if a call has failed; in bounded time.

        Until then those that are left may go on writing. What they have used is kept for the next
        start.
        """

    @abstractmethod
    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """End the workers: ask, and after `grace_s` kill them; calls that wait fail.

        Returns within `grace_s` and a few seconds.

        Args:
            grace_s: The time to leave in, in seconds.
            is_restart: Whether what they have used is kept for a start that follows.
        """

    @abstractmethod
    def shutdown(self, force: bool = False) -> None:
        """End the workers; `force` kills them at once."""

    def __enter__(self) -> "WorkerPool":
        if not self.is_alive:
            self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.shutdown(force=error is not None)


def checked_ranks(ranks: Sequence[int] | None, num_workers: int) -> Sequence[int]:
    """Return the ranks of a call, in order; all by default.

    Raises:
        ValueError: `ranks` is empty or names a worker that does not exist.
    """
    wanted = range(num_workers) if ranks is None else sorted(set(ranks))
    if not wanted or wanted[0] < 0 or wanted[-1] >= num_workers:
        raise ValueError(
            f"`ranks` must name workers from 0 to {num_workers - 1}, but got {ranks!r}."
        )
    return wanted
