"""The one thing that runners, launchers and drivers know about a set of workers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

from paceline.workers._spec import WorkerExit, WorkerProcess


class WorkerGroup(ABC):
    """Workers that start together, are watched, and end together.

    Implementers provide the six methods below; each may be called from any thread, and none but
    `wait` without a timeout may block for longer than it says. A group is started once.
    """

    @abstractmethod
    def start(self) -> None:
        """Start all workers; on an error none is left running.

        Raises:
            RuntimeError: The group was started before.
            WorkerStartError: A worker cannot be started.
        """

    @property
    @abstractmethod
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order; empty where they are not on this node."""

    @abstractmethod
    def poll(self) -> list[WorkerExit]:
        """Return the exits that are known by now, in the order in which they were noticed."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> list[WorkerExit] | None:
        """Wait until all workers have ended and their output was delivered.

        Returns:
            The exits in rank order, or None after `timeout_s`.

        Raises:
            RuntimeError: The group was not started.
        """

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to all workers that still run."""

    @abstractmethod
    def stop(self, grace_s: float) -> list[WorkerExit]:
        """End all workers: ask, and after `grace_s` kill them.

        Returns:
            The exits in rank order, within `grace_s` and a few seconds.
        """

    def __enter__(self) -> "WorkerGroup":
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(grace_s=0.0)


class WorkerStartError(RuntimeError):
    """Raised when a worker's process cannot be started."""
