"""Weights of losses, so that gradients of several batches, shards and ranks add up to a mean."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.engine.loaders._epoch_order import EpochOrder
from paceline.engine.schedule._train_units import Position


@dataclass(slots=True)
class Accumulation:
    """The present place within an aggregation window; set by the loop before each shard.

    A window is `frequency` global batches. The gradient of an optimizer step is the mean over all
    samples of the window (over all shards and ranks), so that accumulation equals the large
    batch; without `average` it is the sum of the batches' means.

    Attributes:
        frequency: Global batches per optimizer step.
        average: Whether gradients are averaged over the window.
        weight: What the present shard's loss counts.
        is_boundary: Whether this is the worker's last shard before an optimizer step.
        is_even: Whether every rank has a last shard in this window.
        is_idle: Whether this rank has no samples of the present batch.
        num_steps: Optimizer steps since the start of training.
    """

    frequency: int = 1
    average: bool = True
    weight: float = 1.0
    is_boundary: bool = True
    is_even: bool = True
    is_idle: bool = False
    num_steps: int = 0

    def is_window_end(self, batches: int) -> bool:
        """Tell whether the window ends with the batch that follows `batches` trained ones."""
        return (batches + 1) % self.frequency == 0

    def num_window_records(
        self, position: Position, order_of: Callable[[int], EpochOrder | None]
    ) -> int:
        """Return the samples over which the gradient of the present window is a mean.

        Args:
            position: Where the batch lies that is trained next.
            order_of: Returns the order of an epoch; the data have a length.
        """
        epoch, batch = position.epochs, position.batch_in_epoch
        order = _known(order_of(epoch))
        if not self.average:
            return order.num_records(batch)
        # The window may have begun in the epoch before and may end in the next one.
        batch -= position.batches % self.frequency
        while batch < 0:
            epoch -= 1
            batch += _known(order_of(epoch)).num_batches
        total = 0
        for _ in range(self.frequency):
            order = _known(order_of(epoch))
            total += order.num_records(batch)
            batch += 1
            if batch == order.num_batches:
                epoch, batch = epoch + 1, 0
        return total


def _known(order: EpochOrder | None) -> EpochOrder:
    assert order is not None
    return order
