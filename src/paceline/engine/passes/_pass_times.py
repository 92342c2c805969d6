"""The times of a pass and of the parts of its steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from paceline.engine.profiling._step_timer import StepTimer

Measure = Callable[[str], AbstractContextManager[None]]


class StepTimes:
    """The seconds of the parts of each step, for `profile`."""

    def __init__(self, device: torch.device) -> None:
        self._timer = StepTimer(device)

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Add the time of a block to a part."""
        return self._timer.measure(part)

    def means(self, whole: str, num_batches: int) -> dict[str, float]:
        """Return the time of the pass, and the mean of each part over its batches.

        Args:
            whole: The part that the pass as a whole is.
            num_batches: The batches of the pass.
        """
        parts = self._timer.take()
        times = {f"mean_{whole}_s": parts.pop(whole)}
        return times | {f"mean_{name}_s": time / num_batches for name, time in parts.items()}


@contextmanager
def measured_pass(times: StepTimes | None, whole: str) -> Iterator[Measure | None]:
    """Return what measures the parts of a pass, or None if there is nothing to keep."""
    if times is None:
        yield None
        return
    with times.measure(whole):
        yield times.measure
