"""Interface between the training loop and a front door."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.engine.schedule._train_units import Position

# Trains on (a shard, the epoch, the global batch) and returns its metrics.
TrainsShard = Callable[[Any, int, int], Any]


class LoopHooks(Protocol):
    """Hooks that a front door implements for the loop; each is called on all ranks.

    Attributes:
        has_schedulers: Whether `after_batch` has anything to do.
        to_device: Returns a shard on this rank's device.
    """

    has_schedulers: bool
    to_device: Callable[[Any], Any]

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on one shard and return its metrics."""

    def plain_training(self) -> TrainsShard:
        """Return what trains the next shards; none of them is at the edge of an epoch."""

    def metrics_of(self, returned: Any) -> Mapping[str, Any]:
        """Return the metrics that `plain_training` returned in some form."""

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""

    def after_batch(self, position: Position) -> None:
        """Step schedulers that count batches or optimizer steps."""

    def epoch_started(self, epoch: int) -> None:
        """Tell that an epoch begins."""

    def epoch_ended(self, epoch: int) -> None:
        """Step schedulers that count epochs, and tell that one has ended."""

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report averaged training metrics."""

    def report_timings(self, batches: int, timings: dict[str, float]) -> None:
        """Report throughput, or where the time of a batch went, after so many batches."""

    def validate(self, position: Position) -> bool:
        """Validate and report; tell whether the result asks for a checkpoint."""

    def save(self, position: Position) -> None:
        """Store a checkpoint."""

    def tell_stored(self) -> None:
        """Tell all ranks of the checkpoints that exist by now; all ranks call it at once."""

    def wants_save(self) -> bool:
        """Tell whether this rank wants a checkpoint now, where they follow each other."""

    def look(self, position: Position) -> None:
        """Raise what went wrong in the background, and show progress; called now and then."""
