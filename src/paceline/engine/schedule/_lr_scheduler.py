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
        # What the scheduler has counted, if steps by the user's code are looked for.
        self._count: int | None = None
        self._is_alone = self._has_stepped = False

    def give_way(self, *, is_alone: bool) -> None:
        """Leave all steps to the user's code if it takes the first one.

        Args:
            is_alone: Whether there is one process; with several, such a step is refused.
        """
        self._is_alone, self._count = is_alone, self._counted()

    def go_on(self, num_steps: int) -> None:
        """Go on from a checkpoint at which the scheduler's optimizer had so many steps."""
        self.num_seen_steps = num_steps
        self._count = None if self._count is None else self._counted()

    def check_steps(self) -> None:
        """Look for steps that the user's code has taken.

        Raises:
            RuntimeError: There are some beside those of the trainer, or of one rank of several.
        """
        if self._count in (None, self._counted()) or self.is_manual():
            return
        if self._has_stepped or not self._is_alone:
            kind = type(self.scheduler).__name__
            raise RuntimeError(
                f"A scheduler must be stepped by the trainer alone, which does so at each"
                f" `scheduler_step`, but {kind} was also stepped by code of yours. Hint: leave"
                " `scheduler.step()` out, or set `scheduler_step`."
            )
        self.step_mode = LRScheduler.StepMode.MANUAL_STEP

    def after_batch(self, position: Position, num_steps: int) -> None:
        """Step if one is due after a batch.

        Args:
            position: How far training is.
            num_steps: How often the scheduler's optimizer has stepped.
        """
        if self._count is not None:
            self.check_steps()
        has_stepped, self.num_seen_steps = num_steps > self.num_seen_steps, num_steps
        if self.step_mode is LRScheduler.StepMode.STEP_EVERY_BATCH:
            is_due = position.batches % self.frequency == 0
        elif self.step_mode is LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
            is_due = has_stepped and num_steps % self.frequency == 0
        else:
            is_due = False
        if is_due:
            self._step()

    def after_epoch(self, epoch: int) -> None:
        """Step if one is due after an epoch, counted from 0."""
        is_by_epoch = self.step_mode is LRScheduler.StepMode.STEP_EVERY_EPOCH
        if is_by_epoch and (epoch + 1) % self.frequency == 0:
            self._step()

    def _step(self) -> None:
        self.scheduler.step()
        if self._count is not None:
            self._has_stepped, self._count = True, self._counted()

    def _counted(self) -> int:
        return int(getattr(self.scheduler, "last_epoch", 0))

    def is_manual(self) -> bool:
        """Tell whether the user's code steps it."""
        return self.step_mode is LRScheduler.StepMode.MANUAL_STEP
