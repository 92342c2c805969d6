"""First come, first served, over the nodes of each pool."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.messages.nodes import DEFAULT_POOL, LOCAL_NODE


class Reason(str, Enum):
    """Why a waiting trial gets no slots."""

    SLOTS_IN_USE = "slots_in_use"
    BEHIND_OTHERS = "behind_others"
    MAX_SLOTS = "max_slots"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSlots:
    """The slots of a node; one that is not open keeps what it has and gets nothing."""

    node_id: int = LOCAL_NODE
    slots: tuple[int, ...]
    pool: str = DEFAULT_POOL
    is_open: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A trial that wants to run on a node of a pool, in the order of arrival."""

    trial_id: int
    experiment_id: int
    num_slots: int
    max_slots: int | None
    pool: str = DEFAULT_POOL


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """An attempt that holds slots of a node."""

    experiment_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAssignment:
    """Slots of a node, given to a trial."""

    trial_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingResult:
    """Result for a waiting trial: its slots and their node, or the reason why it gets none."""

    waiting: Waiting
    slots: tuple[int, ...] = ()
    node_id: int = LOCAL_NODE
    reason: Reason | None = None


def assign_slots(
    waiting: Iterable[Waiting], holding: Iterable[Holding], nodes: Sequence[NodeSlots]
) -> list[SlotAssignment]:
    """Give free slots to waiting trials in order.

    A trial that does not fit holds up those of its pool behind it, so that a large one is never
    starved by small ones; one that only its experiment's own `max_slots` holds back does not, and
    neither does one that needs more slots than any node has (the nodes may be fewer than before).
    """
    assignments = []
    # Nothing more can be given once each pool is held up.
    open_pools = {node.pool for node in nodes}
    for result in decide(waiting, holding, nodes):
        if result.reason is Reason.SLOTS_IN_USE:
            open_pools.discard(result.waiting.pool)
            if not open_pools:
                break
        if result.slots:
            assignments.append(
                SlotAssignment(
                    trial_id=result.waiting.trial_id, slots=result.slots, node_id=result.node_id
                )
            )
    return assignments


def decide(
    waiting: Iterable[Waiting], holding: Iterable[Holding], nodes: Sequence[NodeSlots]
) -> Iterator[SchedulingResult]:
    """Yield for each waiting trial, in order, what it gets and why it gets nothing.

    It gets slots of one node: of those with enough free slots the one with the fewest, and of
    several such the first.
    """
    used_by: Counter[int] = Counter()
    taken: set[tuple[int, int]] = set()
    for holder in holding:
        used_by[holder.experiment_id] += len(holder.slots)
        taken.update((holder.node_id, slot) for slot in holder.slots)
    pools: dict[str, _Pool] = {}
    for node in nodes:
        pool = pools.setdefault(node.pool, _Pool())
        free = [slot for slot in sorted(node.slots) if (node.node_id, slot) not in taken]
        pool.add(node, free)
    held_up: set[str] = set()
    for trial in waiting:
        in_use = used_by[trial.experiment_id]
        pool = pools.get(trial.pool) or _Pool()
        if trial.max_slots is not None and in_use + trial.num_slots > trial.max_slots:
            yield SchedulingResult(waiting=trial, reason=Reason.MAX_SLOTS)
        elif trial.num_slots > pool.largest:
            yield SchedulingResult(waiting=trial, reason=Reason.TOO_LARGE)
        elif trial.pool in held_up:
            yield SchedulingResult(waiting=trial, reason=Reason.BEHIND_OTHERS)
        elif (given := pool.take(trial.num_slots)) is None:
            held_up.add(trial.pool)
            yield SchedulingResult(waiting=trial, reason=Reason.SLOTS_IN_USE)
        else:
            node_id, slots = given
            used_by[trial.experiment_id] += trial.num_slots
            yield SchedulingResult(waiting=trial, slots=slots, node_id=node_id)


class _Pool:
    """The free slots of a pool's nodes; the nodes are found by how many they have."""

    def __init__(self) -> None:
        self.largest = 0
        self._free: list[tuple[int, list[int]]] = []
        # Of each number of free slots the nodes that have it, as a heap of places in `_free`.
        self._places: dict[int, list[int]] = {}

    def add(self, node: NodeSlots, free: list[int]) -> None:
        """Take in a node with its free slots; one that is not open only counts as large."""
        self.largest = max(self.largest, len(node.slots))
        if node.is_open:
            heapq.heappush(self._places.setdefault(len(free), []), len(self._free))
            self._free.append((node.node_id, free))

    def take(self, num_slots: int) -> tuple[int, tuple[int, ...]] | None:
        """Take slots of one node and return its id and them; None if no node has so many."""
        fitting = [n for n, places in self._places.items() if n >= num_slots and places]
        if not fitting:
            return None
        place = heapq.heappop(self._places[min(fitting)])
        node_id, free = self._free[place]
        left = free[num_slots:]
        self._free[place] = node_id, left
        heapq.heappush(self._places.setdefault(len(left), []), place)
        return node_id, tuple(free[:num_slots])
