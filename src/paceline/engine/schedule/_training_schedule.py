"""Schedule of a training: which event is due when, and why the training ends."""

from dataclasses import dataclass
from enum import Enum

from paceline.engine.schedule._train_units import Position, TrainUnit


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
        """Whether training is to go on later where it was left."""
        return self in (StopReason.PREEMPTED, StopReason.INTERRUPTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What happens when; None means never.

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
