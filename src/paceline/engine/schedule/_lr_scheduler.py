"""Learning-rate schedulers that the trainer steps."""

from enum import Enum
from typing import Any

from paceline._argument_checks import check_count
from paceline.engine.schedule._train_units import Position


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
        check_count("frequency", frequency)
        self.scheduler = scheduler
        self.step_mode = step_mode
        self.frequency = frequency
        self.num_seen_steps = 0

    def after_batch(self, position: Position, num_steps: int) -> None:
        """Step if one is due after a batch.

        Args:
            position: How far training is.
            num_steps: How often the scheduler's optimizer has stepped.
        """
        has_stepped, self.num_seen_steps = num_steps > self.num_seen_steps, num_steps
        if self.step_mode is LRScheduler.StepMode.STEP_EVERY_BATCH:
            is_due = position.batches % self.frequency == 0
        elif self.step_mode is LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
            is_due = has_stepped and num_steps % self.frequency == 0
        else:
            is_due = False
        if is_due:
            self.scheduler.step()

    def after_epoch(self, epoch: int) -> None:
        """Step if one is due after an epoch, counted from 0."""
        is_by_epoch = self.step_mode is LRScheduler.StepMode.STEP_EVERY_EPOCH
        if is_by_epoch and (epoch + 1) % self.frequency == 0:
            self.scheduler.step()
