"""Learning-rate schedulers: when they step, and their states."""

from collections.abc import Sequence
from enum import Enum
from itertools import chain, repeat
from typing import Any

import torch

from paceline._base.arguments_and_errors import check_count
from paceline._training.engine.schedules import Position
from paceline.core._distributed_context import DistributedContext


class LRScheduler:
    """Wrapper of a scheduler with its step frequency.

    Args:
        scheduler: A torch scheduler.
        step_mode: The unit to count.
        frequency: Step at every so many units.
    """

    class StepMode(Enum):
        """Event counted for the steps of a scheduler."""

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
        # Step counter of the scheduler, kept to detect steps by the user's code; None if unwatched.
        self._count: int | None = None
        self._is_alone = self._has_stepped = False

    def give_way(self, *, is_alone: bool) -> None:
        """Leave all steps to the user's code if the first step is taken there.

        Args:
            is_alone: Whether there is one process; with several, such a step is refused.
        """
        self._is_alone, self._count = is_alone, self._counted()

    def go_on(self, num_steps: int) -> None:
        """Resume from a checkpoint at the given step count of the scheduler's optimizer."""
        self.num_seen_steps = num_steps
        self._count = None if self._count is None else self._counted()

    def check_steps(self) -> None:
        """Detect scheduler steps taken by the user's code.

        Raises:
            RuntimeError: There are steps beside the trainer's, or on one rank of several.
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
        """Step the scheduler if due after a batch.

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
        """Step the scheduler if due after an epoch, counted from 0."""
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


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without functions: they are rebuilt by the scheduler itself."""
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore the state of `scheduler_state`; dictionaries keep their types, e.g. `Counter`."""
    scheduler.load_state_dict(_typed(state, scheduler))


def share_schedulers(
    schedulers: Sequence[Any], distributed: DistributedContext, *, is_idle: bool
) -> None:
    """Give the chief's schedulers, and the values they set, to ranks that could not step them.

    Args:
        schedulers: The schedulers, which the code of a batch steps.
        distributed: Where the ranks meet; all of them call this.
        is_idle: Whether this rank had no samples of the batch.
    """
    own = [(scheduler_state(each), _settings(each.optimizer)) for each in schedulers]
    of_chief = distributed.broadcast(own)
    if not is_idle:
        return
    for scheduler, (state, settings) in zip(schedulers, of_chief, strict=True):
        load_scheduler(scheduler, state)
        for group, values in zip(scheduler.optimizer.param_groups, settings, strict=True):
            for name, value in values.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of the parameter groups."""
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _typed(value: Any, present: Any) -> Any:
    """Return a stored value, its dictionaries converted to the types of the present value."""
    if isinstance(value, list) and isinstance(present, (list, tuple)):
        return [_typed(*pair) for pair in zip(value, chain(present, repeat(None)), strict=False)]
    if not isinstance(value, dict):
        return value
    if hasattr(present, "load_state_dict"):
        # A scheduler, which may hold others.
        return {name: _typed(item, vars(present).get(name)) for name, item in value.items()}
    return type(present)(value) if isinstance(present, dict) else value


def _without_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_functions(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list):
        return [_without_functions(item) for item in value]
    return value
