"""Which waiting trial gets which slots: pure functions over plain data."""

from paceline.master.scheduling._fifo import Holding, Placement, Waiting, place

__all__ = ["Holding", "Placement", "Waiting", "place"]
