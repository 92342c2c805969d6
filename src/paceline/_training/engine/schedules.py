"""Train units, when a period of them is due, the end of a training, learning-rate schedulers."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch

from paceline._base.arguments_and_errors import check_count
from paceline.core._distributed_context import DistributedContext


class Position(NamedTuple):
    """Position of a training; all counts are from the start of training, over all ranks.

    Attributes:
        batches: Global batches trained.
        epochs: Whole passes over the training data.
        records: Samples trained.
        batch_in_epoch: Global batches trained in the present epoch.
    """

    batches: int = 0
    epochs: int = 0
    records: int = 0
    batch_in_epoch: int = 0


class TrainUnit:
    """A length or a period of training, counted from its start.

    Args:
        value: An integer of at least 1: a length, or a period that is due at every multiple. A
            container of integers is a schedule: due exactly at its members.

    Raises:
        TypeError: The value is neither an integer nor a container.
        ValueError: The integer is below 1.
    """

    __slots__ = ("value",)

    def __init__(self, value: int | Container[int]) -> None:
        given: Any = value
        is_integer = isinstance(given, int) and not isinstance(given, bool)
        if not is_integer and (isinstance(given, str) or not hasattr(given, "__contains__")):
            raise TypeError(
                f"`{type(self).__name__}` must count an integer or a container of integers, but"
                f" got {value!r}."
            )
        if is_integer and given < 1:
            raise ValueError(
                f"`{type(self).__name__}` must count at least 1, but got {value}. Hint: leave the"
                " argument out for never."
            )
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.value == getattr(other, "value", None)

    def __hash__(self) -> int:
        return hash((type(self).__name__, repr(self.value)))

    @property
    def length(self) -> int:
        """The value as a length.

        Raises:
            TypeError: It is a schedule.
        """
        if not isinstance(self.value, int):
            raise TypeError(f"A length must be an integer of units, but got {self!r}.")
        return self.value

    def count(self, position: Position) -> int:
        """Return how many of these units a position has completed."""
        raise NotImplementedError

    def is_due(self, before: Position, after: Position) -> bool:
        """Tell whether a period ended between two neighbouring positions."""
        start, end = self.count(before), self.count(after)
        if isinstance(self.value, int):
            return end // self.value > start // self.value
        return any(count in self.value for count in range(start + 1, end + 1))

    def is_reached(self, position: Position) -> bool:
        """Tell whether a position has completed this length."""
        return self.count(position) >= self.length

    def is_passed(self, position: Position) -> bool:
        """Tell whether a position lies beyond this length, if decidable."""
        return self.count(position) > self.length

    def next_look(self, position: Position) -> int | None:
        """Return the batch count of the next possible due time; None for an epoch's end."""
        return position.batches + 1


class Batch(TrainUnit):
    """Global batches: all ranks train together on a global batch in a single step."""

    def count(self, position: Position) -> int:
        """Return the batches of a position."""
        return position.batches

    def next_look(self, position: Position) -> int | None:
        """Return the next multiple."""
        if not isinstance(self.value, int):
            return position.batches + 1
        return (position.batches // self.value + 1) * self.value


class Epoch(TrainUnit):
    """Passes over the training data, ending where the data end."""

    def count(self, position: Position) -> int:
        """Return the epochs of a position."""
        return position.epochs

    def is_passed(self, position: Position) -> bool:
        """Tell whether a position lies beyond the end of the last epoch."""
        return (position.epochs, position.batch_in_epoch) > (self.length, 0)

    def next_look(self, position: Position) -> int | None:
        """Return None: only the end of an epoch can be due."""
        return None


class Record(TrainUnit):
    """Samples over all ranks; a period is due with the batch of its last sample."""

    def count(self, position: Position) -> int:
        """Return the records of a position."""
        return position.records

    def is_passed(self, position: Position) -> bool:
        """Return False: the last batch may overshoot the length."""
        return False


def checked_unit(name: str, unit: Any) -> TrainUnit | None:
    """Return `unit` if a train unit or None.

    Raises:
        TypeError: It is something else; the message names the argument.
    """
    if unit is None or isinstance(unit, TrainUnit):
        return unit
    raise TypeError(
        f"`{name}` must be a train unit such as pytorch.Batch(100), but got {unit!r}."
        " Hint: wrap the number in Batch, Epoch or Record."
    )


def end_of_piece(begun: list[Any] | None, unit: TrainUnit, position: Position) -> TrainUnit:
    """Return where a piece of a training ends.

    Args:
        begun: The name of the unit and the end of a piece that was begun; None without one.
        unit: How much the piece has.
        position: Where the training is: the end of a new piece is so much further on.
    """
    if begun is not None and begun[0] == type(unit).__name__:
        end = type(unit)(begun[1])
        if not end.is_reached(position):
            return end
    return type(unit)(unit.count(position) + unit.length)


class StopReason(str, Enum):
    """Why training ended."""

    LENGTH = "reached max_length"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    REQUESTED = "stop requested"
    DATA = "no more data"
    TEST = "test mode"

    @property
    def is_early(self) -> bool:
        """Whether training stopped early, to be resumed later."""
        return self in (StopReason.PREEMPTED, StopReason.INTERRUPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Periods and length of a training; None means never.

    Attributes:
        saves_continuously: Whether checkpoints follow each other as fast as they are stored.
    """

    max_length: TrainUnit | None = None
    reporting: TrainUnit | None = None
    validation: TrainUnit | None = None
    checkpoint: TrainUnit | None = None
    saves_continuously: bool = False

    def is_reached(self, position: Position) -> bool:
        """Tell whether a position has completed the length."""
        return self.max_length is not None and self.max_length.is_reached(position)

    def next_look(self, position: Position) -> int | None:
        """Return after how many batches in all something may be due; None for an epoch's end."""
        units = (self.max_length, self.reporting, self.validation, self.checkpoint)
        looks = [unit.next_look(position) for unit in units if unit is not None]
        return min((look for look in looks if look is not None), default=None)


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
