"""Which waiting trial gets which slots: pure functions over plain data."""

from paceline.master.scheduling._fifo import (
    Holding,
    Reason,
    SchedulingResult,
    SlotAssignment,
    Waiting,
    judge,
    place,
)

__all__ = ["Holding", "SlotAssignment", "Reason", "SchedulingResult", "Waiting", "judge", "place"]
