"""Workers that carry out one call after the other, as their driver sees them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.processes._worker_spec import WorkerProcess


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
