"""Train units, when a period of them is due, and the end of a training."""

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


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
