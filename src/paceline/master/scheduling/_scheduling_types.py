"""What is scheduled: trials that wait, attempts that hold slots, nodes, and the pools' settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from paceline.messages.node_runners import DEFAULT_POOL, LOCAL_NODE

DEFAULT_PRIORITY = 42
"""The priority of an experiment that names none; 1 is the most important one, 99 the least."""


class Reason(str, Enum):
    """Why a waiting trial gets no slots."""

    SLOTS_IN_USE = "slots_in_use"
    BEHIND_OTHERS = "behind_others"
    MAX_SLOTS = "max_slots"
    MAX_TRIALS = "max_concurrent_trials"
    TOO_LARGE = "too_large"
    POOL_LIMIT = "pool_limit"
    PREEMPTING = "preempting"
    PAUSING = "pausing"
    ELSEWHERE = "elsewhere"


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
    `can_join` tells that other nodes reach it, so
    that trials on several nodes may use it. `only_pool` is the one that it may be in.
    """

    node_id: int = LOCAL_NODE
    slots: tuple[int, ...]
    pool: str = DEFAULT_POOL
    is_open: bool = True
    is_pausing: bool = False
    drained: frozenset[int] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    can_join: bool = False
    only_pool: str | None = None


Part = tuple[int, tuple[int, ...]]
"""The id of a node, and slots of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A trial that wants to run on nodes of a pool, in the order of arrival.

    Attributes:
        num_slots: How many slots it needs. An elastic one takes up to `most_slots`.
        max_slots: How many slots its experiment may use at once; None is no limit.
        max_trials: How many trials of its experiment may run at once; None is no limit.
        allow_uneven: It may have more slots on one node than on another.
        failed_on: Nodes on which its last attempts failed. It gets another one, if one is large
            enough.
        awaits_node: Such a node is not there, but was a moment ago: the trial waits for it.
        last_served: When its experiment last got slots, in seconds since the epoch.
    """

    trial_id: int
    experiment_id: int
    num_slots: int
    max_slots: int | None
    max_trials: int | None = None
    pool: str = DEFAULT_POOL
    priority: int = DEFAULT_PRIORITY
    weight: float = 1.0
    last_served: float = 0.0
    most_slots: int = 0
    allow_uneven: bool = False
    failed_on: frozenset[int] = frozenset()
    awaits_node: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """An attempt that holds slots of a node; one that is leaving was asked to free them.

    `others` are its parts on further nodes.
    """

    experiment_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE
    attempt_id: int = 0
    priority: int = DEFAULT_PRIORITY
    weight: float = 1.0
    is_leaving: bool = False
    others: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """All nodes that it runs on, with its slots there."""
        return ((self.node_id, self.slots), *self.others)

    @property
    def num_slots(self) -> int:
        """The number of slots that it holds."""
        if not self.others:
            return len(self.slots)
        return sum(len(slots) for _, slots in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAssignment:
    """Slots of a node, given to a trial; `others` are those on further nodes."""

    trial_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE
    others: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingResult:
    """Result for a waiting trial: its slots and their node, or the reason why it gets none.

    Attributes:
        place: How many trials of its pool come before it.
        behind: The trial that holds it up.
        preempts: Attempts that must leave so that it gets slots.
        others: Its slots on further nodes.
    """

    waiting: Waiting
    slots: tuple[int, ...] = ()
    node_id: int = LOCAL_NODE
    reason: Reason | None = None
    place: int = 0
    behind: Waiting | None = None
    preempts: tuple[Holding, ...] = field(default=())
    others: tuple[Part, ...] = ()
