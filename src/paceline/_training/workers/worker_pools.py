"""Pools of workers and their pending calls: base classes, and this process as its own pool."""

import io
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline._base.process_and_network import wait_until
from paceline._training.workers.pickled_calls import exit_as_error, load
from paceline._training.workers.processes.worker_process import WorkerProcess

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


class PendingCall:
    """Call carried out by workers; may be used from any thread.

    Args:
        number: Its number, unique among the calls of its pool.
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
        """Error of a failed call; None for a call in progress or a successful call."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> list[Any] | None:
        """Return the function's values in rank order, or None after `timeout_s`.

        Raises:
            NotSendableError: A value that it returned cannot be pickled.
            WorkerFailedError: A worker died, was stopped, hung or left by `sys.exit()`.
            RuntimeError: The pool was shut down before the call had ended.
            Exception: The function's error on the rank that failed first, with the traceback
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
        """Register a function to be called with this call once done, at once if done already.

        It runs in a thread of the pool, must return soon and must not raise.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(function)
                return
        function(self)

    # Methods for pools alone.

    def finish(self, values: list[Any]) -> None:
        """End the call with values returned in this process."""
        self._values = values
        self._finish()

    def answer(self, rank: int, pickled: bytes | bytearray) -> None:
        """Record a rank's pickled value; the last value ends the call."""
        self._pickled[rank] = pickled
        if len(self._pickled) == len(self.ranks):
            self._finish()

    def has_returned(self, rank: int) -> bool:
        """Tell whether a rank has returned."""
        return rank in (self._pickled if self._values is None else self.ranks)

    def fail(self, error: BaseException) -> None:
        """End the call with an error; does nothing after its end."""
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
    """Pool of warm workers for calls, carried out in order until the shutdown.

    A pool can be started again after a failure or a `stop`, also with another number of workers;
    each time is a new generation of workers. When a call fails, its pool stops all workers in
    bounded time. Implementers provide the methods below; each may be called from any thread.

    Attributes:
        can_restart: Whether lost workers can be started again; the driver's own process cannot.
        needs_reservation: Whether somebody else may take the place of a worker that could run, so
            that more workers must be reserved before they are counted on.
        placement_timeout_s: How long a start may wait for room that others use, in seconds.
    """

    can_restart = True
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
        """Return the ranks of workers on nodes announced to be taken away.

        By default there are none.
        """
        return []

    def reserve(self, num_workers: int) -> int:
        """Reserve room for more workers, and return the number certain to start.

        Hardly waits: a longer start continues in the background, so call it again. By default all
        are certain, as where nobody else can take the place of a worker.

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
        """Give back reservations of `reserve` or `request` not used by a worker."""

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
        """Submit a function to workers, after earlier calls, and return at once.

        Args:
            function: The function to call, on each rank alike.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            ranks: The ranks that call it; all by default.

        Raises:
            NotSendableError: The function or an argument cannot be pickled.
            RuntimeError: The workers were not started, or were stopped; as `WorkerFailedError`
                if one of them has died.
            ValueError: `ranks` is empty or names a worker that does not exist.
        """

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to all workers still running."""

    @abstractmethod
    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Have the workers ended after a time, and return at once.

        Args:
            grace_s: When to kill those that are left, in seconds from now.
            is_asked: Whether the workers have been asked to leave already.
        """

    @abstractmethod
    def drain(self, timeout_s: float) -> None:
        """Wait until output printed so far was delivered, for at most `timeout_s` seconds."""

    @abstractmethod
    def await_end(self) -> None:
        """Wait until all workers have ended, if a call has failed; in bounded time.

        Until then the remaining workers may still write. Their resources are kept for the next
        start.
        """

    @abstractmethod
    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """End the workers: ask, and kill after `grace_s`; waiting calls fail.

        Returns within `grace_s` and a few seconds.

        Args:
            grace_s: The time to leave in, in seconds.
            is_restart: Whether their resources are kept for a start that follows.
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


class OwnProcessPool(WorkerPool):
    """Pool with this process as a worker: there is no process to signal or to end.

    A call is carried out in the thread that submits it, before `submit` returns. Output goes where
    this process sends its own.
    """

    can_restart = False

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """Nothing, as no process was started."""
        return []

    def signal(self, signum: int) -> None:
        """Do nothing: a signal to this process has reached its worker already."""

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Do nothing: a call has ended before anybody could ask."""

    def drain(self, timeout_s: float) -> None:
        """Do nothing: nobody passes the output on."""

    def await_end(self) -> None:
        """Do nothing: a failed call has ended."""

    def shutdown(self, force: bool = False) -> None:
        """End the use of the pool; no process is ended."""
        self.stop(0.0)


class InlinePool(OwnProcessPool):
    """Pool of a single worker, this process: debuggers can follow, and nothing travels."""

    num_workers = 1

    def __init__(self) -> None:
        self._numbers = count(1)
        self._is_started = False

    @property
    def is_alive(self) -> bool:
        """Whether the pool was started."""
        return self._is_started

    def capacity(self) -> int:
        """Return 1."""
        return 1

    def start(self, num_workers: int | None = None) -> None:
        """Take calls.

        Raises:
            RuntimeError: The pool was started before.
            ValueError: `num_workers` is neither None nor 1.
        """
        if self._is_started:
            raise RuntimeError("A pool must not be started while its workers are alive.")
        if num_workers not in (None, 1):
            raise ValueError(
                f"`num_workers` must be 1, as the worker is this process, but got {num_workers!r}."
            )
        self._is_started = True

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Call a function here; see `WorkerPool.submit`. The call is done when this returns."""
        if not self._is_started:
            raise RuntimeError("A pool must be started before calls are submitted, but is not.")
        call = PendingCall(next(self._numbers), checked_ranks(ranks, 1))
        try:
            with exit_as_error():
                call.finish([function(*args, **(kwargs or {}))])
        except Exception as error:
            call.fail(error)
        return call

    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """Take no calls until the next start."""
        self._is_started = False
