"""What is scheduled: trials that wait, attempts that hold slots, nodes, and the pools' settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from paceline.messages.nodes import DEFAULT_POOL, LOCAL_NODE

DEFAULT_PRIORITY = 42
"""The priority of an experiment that names none; 1 is the most important one, 99 the least."""


class Reason(str, Enum):
    """Why a waiting trial gets no slots."""

    SLOTS_IN_USE = "slots_in_use"
    BEHIND_OTHERS = "behind_others"
    MAX_SLOTS = "max_slots"
    TOO_LARGE = "too_large"
    POOL_LIMIT = "pool_limit"
    PREEMPTING = "preempting"
    PAUSING = "pausing"


class PolicyName(str, Enum):
    """How the trials of a pool are ordered, and which ones make room for others."""

    FIFO = "fifo"
    PRIORITY = "priority"
    FAIR_SHARE = "fair_share"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """How a pool is shared; `max_slots` is how many of its slots may be in use at once.

    Nodes that have all its labels, and name no pool themselves, belong to it.
    """

    policy: PolicyName = PolicyName.FIFO
    max_slots: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSlots:
    """The slots of a node; one that is not open keeps what it has and gets nothing.

    The same holds for a single slot that is drained. One that is pausing will be open again in a
    moment: a trial that needs it waits, and holds up no other.
    """

    node_id: int = LOCAL_NODE
    slots: tuple[int, ...]
    pool: str = DEFAULT_POOL
    is_open: bool = True
    is_pausing: bool = False
    drained: frozenset[int] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A trial that wants to run on a node of a pool, in the order of arrival.

    `last_served` is when its experiment last got slots, in seconds since the epoch.
    """

    trial_id: int
    experiment_id: int
    num_slots: int
    max_slots: int | None
    pool: str = DEFAULT_POOL
    priority: int = DEFAULT_PRIORITY
    weight: float = 1.0
    last_served: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """An attempt that holds slots of a node; one that is leaving was asked to free them."""

    experiment_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE
    attempt_id: int = 0
    priority: int = DEFAULT_PRIORITY
    weight: float = 1.0
    is_leaving: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAssignment:
    """Slots of a node, given to a trial."""

    trial_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingResult:
    """Result for a waiting trial: its slots and their node, or the reason why it gets none.

    Attributes:
        place: How many trials of its pool come before it.
        behind: The trial that holds it up.
        preempts: Attempts that must leave so that it gets slots.
    """

    waiting: Waiting
    slots: tuple[int, ...] = ()
    node_id: int = LOCAL_NODE
    reason: Reason | None = None
    place: int = 0
    behind: Waiting | None = None
    preempts: tuple[Holding, ...] = field(default=())
