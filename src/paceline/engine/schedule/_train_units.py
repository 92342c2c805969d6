"""Train units: batches, epochs and records, and when a period of them is due."""

from collections.abc import Container
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
        """Tell whether a position lies beyond this length, as far as that can be told."""
        return self.count(position) > self.length

    def next_look(self, position: Position) -> int | None:
        """Return after how many batches in all it may be due next; None for an epoch's end."""
        return position.batches + 1


class Batch(TrainUnit):
    """Global batches: one is what all ranks train on together in one step."""

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
        """Return None: it is due at an epoch's end only."""
        return None


class Record(TrainUnit):
    """Samples over all ranks; a period is due with the batch that completes it."""

    def count(self, position: Position) -> int:
        """Return the records of a position."""
        return position.records

    def is_passed(self, position: Position) -> bool:
        """Return False: the batch that completes the length may have gone beyond it."""
        return False


def checked_unit(name: str, unit: Any) -> TrainUnit | None:
    """Return `unit` if it is a train unit or None.

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
