"""Learning-rate schedulers that the trainer steps."""

from enum import Enum
from typing import Any

from paceline.engine import Position


class LRScheduler:
    """A wrapped scheduler and when to step it.

    Args:
        scheduler: A torch scheduler.
        step_mode: What to count.
        frequency: Step at every so many of it.
    """

    class StepMode(Enum):
        """What a scheduler's steps count."""

        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4

    def __init__(self, scheduler: Any, step_mode: "LRScheduler.StepMode", frequency: int = 1):
        if not isinstance(step_mode, LRScheduler.StepMode):
            raise TypeError(f"`step_mode` must be a LRScheduler.StepMode, but got {step_mode!r}.")
        if not isinstance(frequency, int) or frequency < 1:
            raise ValueError(f"`frequency` must be an integer of at least 1, but got {frequency}.")
        self.scheduler = scheduler
        self.step_mode = step_mode
        self.frequency = frequency

    def after_batch(
        self, position: Position, *, has_stepped: bool, num_steps: int, is_epoch_end: bool
    ) -> None:
        """Step if one is due after a batch."""
        mode = LRScheduler.StepMode
        due = {
            mode.STEP_EVERY_BATCH: position.batches % self.frequency == 0,
            mode.STEP_EVERY_OPTIMIZER_STEP: has_stepped and num_steps % self.frequency == 0,
            mode.STEP_EVERY_EPOCH: is_epoch_end and (position.epochs + 1) % self.frequency == 0,
            mode.MANUAL_STEP: False,
        }
        if due[self.step_mode]:
            self.scheduler.step()
