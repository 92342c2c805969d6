"""Which waiting trial gets which slots: pure functions over plain data."""

from paceline.master.scheduling._pool_needs import PoolNeed, needs_node, needs_of
from paceline.master.scheduling._pool_of_node import in_pools, pool_of
from paceline.master.scheduling._queue_order import moved
from paceline.master.scheduling._schedule import Schedule, decide, schedule
from paceline.master.scheduling._scheduling_types import (
    DEFAULT_PRIORITY,
    Holding,
    NodeSlots,
    Part,
    PolicyName,
    PoolSettings,
    Reason,
    SchedulingResult,
    SlotAssignment,
    Waiting,
)
from paceline.master.scheduling._slot_placement import fits_nodes

__all__ = [
    "DEFAULT_PRIORITY",
    "Holding",
    "NodeSlots",
    "Part",
    "PolicyName",
    "PoolNeed",
    "PoolSettings",
    "Reason",
    "Schedule",
    "SchedulingResult",
    "SlotAssignment",
    "Waiting",
    "decide",
    "fits_nodes",
    "in_pools",
    "moved",
    "needs_node",
    "needs_of",
    "pool_of",
    "schedule",
]
