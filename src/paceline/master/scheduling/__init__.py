"""Which waiting trial gets which slots: pure functions over plain data."""

from paceline.master.scheduling._fifo import (
    Holding,
    Placement,
    Reason,
    Verdict,
    Waiting,
    judge,
    place,
)

__all__ = ["Holding", "Placement", "Reason", "Verdict", "Waiting", "judge", "place"]
