"""Which waiting trial gets which slots: pure functions over plain data."""

from paceline.master.scheduling._fifo import (
    Holding,
    NodeSlots,
    Reason,
    SchedulingResult,
    SlotAssignment,
    Waiting,
    assign_slots,
    decide,
)

__all__ = [
    "Holding",
    "NodeSlots",
    "Reason",
    "SchedulingResult",
    "SlotAssignment",
    "Waiting",
    "assign_slots",
    "decide",
]
