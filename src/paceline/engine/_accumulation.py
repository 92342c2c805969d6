"""How much each shard's loss counts, and when an optimizer may step."""

from dataclasses import dataclass


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
        signal: What this rank tells the others with the next reduction.
        heard: What all ranks told with the last one, None before the first.
        num_steps: Optimizer steps since the start of training.
    """

    frequency: int = 1
    average: bool = True
    weight: float = 1.0
    is_boundary: bool = True
    signal: float = 0.0
    heard: float | None = None
    num_steps: int = 0

    def is_window_end(self, batches: int) -> bool:
        """Tell whether the window ends with the batch that follows `batches` trained ones."""
        return (batches + 1) % self.frequency == 0
