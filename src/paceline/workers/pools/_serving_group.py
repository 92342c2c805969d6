"""What a generation asks of the group of its workers' processes."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from paceline.workers.processes._worker_spec import WorkerProcess


class ServingGroup(Protocol):
    """The workers of a generation as processes, wherever they are; see `LocalGroup`."""

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order."""

    def start(self) -> None:
        """Start all workers, or raise `WorkerStartError`."""

    def signal(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to workers that still run, to all by default."""

    def is_stopped(self, rank: int) -> bool:
        """Tell whether a worker's process is stopped, as by SIGSTOP."""

    def drain(self, timeout_s: float) -> None:
        """Wait until what the workers have printed so far was delivered, but not for longer."""

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Begin what `stop` does, and return at once; `is_asked` if they were asked to leave."""

    def stop(self, grace_s: float) -> Any:
        """End all workers in bounded time, and deliver their output."""
