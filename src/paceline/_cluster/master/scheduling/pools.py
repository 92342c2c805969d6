"""Inputs and results of scheduling: waiting trials, holding attempts, nodes, free slots, pools."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from paceline._cluster.master.scheduling.interactive_hours import InteractiveHours
from paceline._cluster.messages.runner_messages import DEFAULT_POOL, LOCAL_NODE

if TYPE_CHECKING:
    from paceline._cluster.master.scheduling.pool_policies import QuotaUse

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
    QUOTA = "quota"
    CLOSED_POOL = "closed_pool"
    RESERVED = "reserved"


class PolicyName(str, Enum):
    """Policy of a pool: the order of its trials, and the trials to be preempted for others."""

    FIFO = "fifo"
    PRIORITY = "priority"
    FAIR_SHARE = "fair_share"


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleLimits:
    """How long a trial may report nothing, or not use its slots, and then be left running.

    None is no limit.
    """

    silent_after_s: float | None = None
    unused_after_s: float | None = None
    pause_after_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """How a pool is shared; `max_slots` is how many of its slots may be in use at once.

    Nodes that have all its labels, and name no pool themselves, belong to it. With `backfill`,
    trials run in the gap in front of one that needs more slots than are free, until it has room.
    Under `fair_share`, use of the past counts by half for each `half_life_s`; None is not at all.
    It is `open_to` users, groups (`@NAME`) and projects (ids), if any are named. With
    `own_runners`, trials start only on runners of their user. In the hours of `interactive_first`,
    interactive trials come before the others; `is_interactive_now` says that it is such an hour.
    """

    policy: PolicyName = PolicyName.FIFO
    max_slots: int | None = None
    backfill: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    half_life_s: float | None = None
    idle: IdleLimits = IdleLimits()
    best_priority: int | None = None
    open_to: frozenset[str | int] = frozenset()
    own_runners: bool = False
    interactive_first: InteractiveHours | None = None
    is_interactive_now: bool = False

    def is_open_to(self, user: str, group: str | None, project: int) -> bool:
        """Return whether the pool takes trials of a user in a project."""
        return not self.open_to or bool(self.open_to & {user, group, project})


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSlots:
    """Slots of a node; a closed node keeps its attempts and gets no new attempts.

    The same holds for a single drained slot. A pausing node will be open again in a moment: a trial
    that needs it waits, and holds up no other. One with a `problem` pauses until that is mended.
    `can_join` says that other nodes reach it, so
    that trials on several nodes may use it. `only_pool` is the one that it may be in. Trials of
    others than `reserved_for` do not start there, and if it `is_owners`, only those of the `owner`.
    `packages` are those for interactive work that it has, None if that is unknown.
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
    problem: str = ""
    owner: str = ""
    is_owners: bool = False
    packages: frozenset[str] | None = None
    reserved_for: frozenset[str] | None = None
    reserved_from: float = 0.0
    reserved_until: float = 0.0

    def is_closed_to(self, user: str) -> bool:
        """Return whether the node is reserved for others than a user, or is another's own."""
        if self.is_owners and user != self.owner:
            return True
        return self.reserved_for is not None and user not in self.reserved_for

    def suits(self, pool: str, user: str, num_slots: int, avoided: Set[int]) -> bool:
        """Return whether the node could take a trial of a user that avoids some nodes."""
        return (
            self.pool == pool
            and self.node_id not in avoided
            and len(set(self.slots) - self.drained) >= num_slots
            and not self.is_closed_to(user)
        )


Part = tuple[int, tuple[int, ...]]
"""The id of a node, and some of its slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Trial waiting for slots of a pool, in order of arrival.

    Attributes:
        num_slots: How many slots it needs. An elastic one takes up to `most_slots`.
        max_slots: How many slots its experiment may use at once; None is no limit.
        max_trials: How many trials of its experiment may run at once; None is no limit.
        allow_uneven: It may have more slots on one node than on another.
        failed_on: Nodes on which its last attempts failed. It gets another one, if one is large
            enough.
        awaits_node: Such a node is not there, but was a moment ago: the trial waits for it.
        last_served: When its experiment last got slots, in seconds since the epoch.
        queue_place: Its place in the order of arrival.
        user: The owner of its experiment.
        project: The id of its project.
        excluded: Nodes on which it never starts.
        is_interactive: Somebody works with it, and waits for it.
        is_task: It would lose its state with its slots, so it fills no gap in front of others; and
            all of its slots are on one node.
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
    queue_place: float = 0.0
    user: str = ""
    project: int = 0
    excluded: frozenset[int] = frozenset()
    is_interactive: bool = False
    is_task: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Attempt holding slots of a node; a leaving attempt was already asked to free them.

    `others` are its parts on further nodes. A filler overtook trials that were too large for the
    free slots, and leaves once one of them has room; `queue_place` is that of its trial. It has
    its slots `since` a time in seconds since the epoch.
    """

    experiment_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE
    attempt_id: int = 0
    priority: int = DEFAULT_PRIORITY
    weight: float = 1.0
    is_leaving: bool = False
    others: tuple[Part, ...] = ()
    queue_place: float = 0.0
    is_filler: bool = False
    user: str = ""
    project: int = 0
    since: float = 0.0
    is_interactive: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """Nodes of the attempt, each with the slots held there."""
        return ((self.node_id, self.slots), *self.others)

    @property
    def num_slots(self) -> int:
        """Number of slots held on all nodes."""
        if not self.others:
            return len(self.slots)
        return sum(len(slots) for _, slots in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaLimits:
    """Limits of a user or a project; `spent` describes the one that is used up, if any is."""

    whose: str
    max_slots: int | None = None
    spent: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAssignment:
    """Slots of a node, given to a trial; `others` are those on further nodes."""

    trial_id: int
    slots: tuple[int, ...]
    node_id: int = LOCAL_NODE
    others: tuple[Part, ...] = ()
    is_filler: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingResult:
    """Result for a waiting trial: its slots and node, or the reason for waiting.

    Attributes:
        place: How many trials of its pool come before it.
        behind: The trial that holds it up.
        preempts: Attempts that must leave so that it gets slots.
        others: Its slots on further nodes.
        is_filler: Whether it overtakes the trial that holds up its pool.
        ends_pool: Whether no trial behind it can get slots of its pool now.
        quota: The quota that keeps it waiting.
    """

    waiting: Waiting
    slots: tuple[int, ...] = ()
    node_id: int = LOCAL_NODE
    reason: Reason | None = None
    place: int = 0
    behind: Waiting | None = None
    preempts: tuple[Holding, ...] = field(default=())
    others: tuple[Part, ...] = ()
    is_filler: bool = False
    ends_pool: bool = False
    quota: QuotaLimits | None = None


# Reasons no additional node can remove.
_NO_NODE_HELPS = frozenset(
    {
        Reason.MAX_SLOTS,
        Reason.MAX_TRIALS,
        Reason.POOL_LIMIT,
        Reason.PREEMPTING,
        Reason.PAUSING,
        Reason.QUOTA,
        Reason.CLOSED_POOL,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNeed:
    """Unmet need for slots of a pool's waiting trials.

    `sizes` has the number of slots of each of them, in the order in which they get some.
    """

    sizes: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Return the sum of the slots needed."""
        return sum(self.sizes)


def needs_node(result: SchedulingResult) -> bool:
    """Return whether an additional node could help a waiting trial."""
    return result.reason is not None and result.reason not in _NO_NODE_HELPS


def needs_of(
    results: Iterable[SchedulingResult], holding: Iterable[Holding], quota_use: "QuotaUse"
) -> dict[str, PoolNeed]:
    """Return each pool's unmet need for nodes; pools without need are absent.

    The limits of experiments and quotas count: if an experiment may use three more slots, only
    trials for three slots count. `quota_use` is that of `holding`.
    """
    used: Counter[int] = Counter()
    num_trials: Counter[int] = Counter()
    for holder in holding:
        used[holder.experiment_id] += holder.num_slots
        num_trials[holder.experiment_id] += 1
    sizes: dict[str, list[int]] = defaultdict(list)
    for result in results:
        trial = result.waiting
        if result.reason in _NO_NODE_HELPS or quota_use.reached(trial) is not None:
            continue
        used[trial.experiment_id] += trial.num_slots
        num_trials[trial.experiment_id] += 1
        if _is_beyond(trial.max_slots, used[trial.experiment_id]) or _is_beyond(
            trial.max_trials, num_trials[trial.experiment_id]
        ):
            used[trial.experiment_id] -= trial.num_slots
            num_trials[trial.experiment_id] -= 1
            continue
        quota_use.add(trial, trial.num_slots)
        if result.reason is not None:
            sizes[trial.pool].append(trial.num_slots)
    return {pool: PoolNeed(sizes=tuple(found)) for pool, found in sizes.items()}


class StartEstimates:
    """Estimates of when waiting trials start, from those of when attempts end.

    Each waiting trial takes, in its turn, slots that are free or come free, on nodes as a schedule
    would choose them, and keeps them: how long it takes is not known. Nor are trials that come
    later, and so pools with a limit have no estimates.

    Args:
        holding: The attempts that hold slots.
        nodes: The nodes in their pools.
        ends: When attempts end, as far as that can be said.
        pools: The settings of the pools.
    """

    def __init__(
        self,
        holding: Iterable[Holding],
        nodes: Iterable[NodeSlots],
        ends: Mapping[int, float],
        pools: Mapping[str, PoolSettings],
    ) -> None:
        nodes = list(nodes)
        pool_of = {node.node_id: node.pool for node in nodes}
        self._closable = [one for one in nodes if one.is_owners or one.reserved_for is not None]
        self._usable = {
            node.node_id: frozenset(node.slots) - node.drained
            for node in nodes
            if node.is_open and not node.is_pausing
        }
        self._free: dict[str, FreeSlots] = defaultdict(FreeSlots)
        self._coming: dict[str, list[tuple[float, int, Holding]]] = defaultdict(list)
        self._at: dict[str, float] = defaultdict(float)
        self._unknown = {name for name, one in pools.items() if one.max_slots is not None}
        taken: dict[int, set[int]] = defaultdict(set)
        for one in holding:
            for node_id, slots in one.parts:
                taken[node_id].update(slots)
            end = 0.0 if one.is_leaving else ends.get(one.attempt_id, math.inf)
            pool = pool_of.get(one.node_id, "")
            self._coming[pool].append((end, one.attempt_id, one))
        for node in nodes:
            free = self._usable.get(node.node_id, frozenset()) - taken[node.node_id]
            self._free[node.pool].add(node.node_id, free, can_join=node.can_join)
        for coming in self._coming.values():
            heapq.heapify(coming)

    def note(self, result: SchedulingResult) -> float | None:
        """Return when a trial starts, None if unknown; trials come in the order of the queue."""
        trial = result.waiting
        free, coming = self._free[trial.pool], self._coming[trial.pool]
        for part in ((result.node_id, result.slots), *result.others) if result.slots else ():
            free.remove(*part)
        is_next = result.reason in (Reason.SLOTS_IN_USE, Reason.BEHIND_OTHERS, Reason.PREEMPTING)
        if not is_next or trial.pool in self._unknown:
            return None
        # Fillers behind it leave once it has room with their slots.
        gone = {one.attempt_id for one in result.preempts} | {
            id_ for _, id_, one in coming if one.is_filler and one.queue_place > trial.queue_place
        }
        if gone:
            coming[:] = [(0.0 if id_ in gone else end, id_, one) for end, id_, one in coming]
            heapq.heapify(coming)
        closed = trial.excluded | {
            node.node_id for node in self._closable if node.is_closed_to(trial.user)
        }
        while True:
            with free.without(closed):
                parts = free.take_for(trial)
            if parts is not None or not coming or coming[0][0] == math.inf:
                break
            end, _, one = heapq.heappop(coming)
            gone |= {one.attempt_id} if one.is_leaving else set()
            self._at[trial.pool] = max(self._at[trial.pool], end)
            for node_id, slots in one.parts:
                free.add(node_id, self._usable.get(node_id, frozenset()) & set(slots))
        # Those behind are not before it; who leaves waits again, perhaps before them; and nobody
        # knows how many slots an elastic trial takes.
        if parts is None or gone or trial.most_slots > trial.num_slots:
            self._unknown.add(trial.pool)
        is_known = parts is not None and result.reason is not Reason.PREEMPTING
        return self._at[trial.pool] or None if is_known else None


def _is_beyond(limit: int | None, number: int) -> bool:
    return limit is not None and number > limit


def pool_of(named: str, labels: Mapping[str, str], pools: Mapping[str, PoolSettings]) -> str:
    """Return a node's pool: the named pool, else the first pool with matching labels."""
    if named != DEFAULT_POOL:
        return named
    # Most nodes have no labels.
    for name, settings in sorted(pools.items()) if labels else ():
        if settings.labels and settings.labels.items() <= labels.items():
            return name
    return DEFAULT_POOL


def in_pools(nodes: Iterable[NodeSlots], pools: Mapping[str, PoolSettings]) -> list[NodeSlots]:
    """Return the nodes with the pools chosen by their labels.

    A node gets nothing in a pool that its labels choose but its token excludes.
    """
    return [_in_pool(node, pool_of(node.pool, node.labels, pools), pools) for node in nodes]


def _in_pool(node: NodeSlots, pool: str, pools: Mapping[str, PoolSettings]) -> NodeSlots:
    if node.only_pool not in (None, pool):
        # Drained as well: a trial that only this node could take must hold up no others.
        drained = frozenset(node.slots)
        return replace(node, pool=node.only_pool, is_open=False, drained=drained)
    is_owners = pool in pools and pools[pool].own_runners
    if (node.pool, node.is_owners) == (pool, is_owners):
        return node
    return replace(node, pool=pool, is_owners=is_owners)


class FreeSlots:
    """Free slots of a pool's nodes; the nodes are found by how many they have."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        # The order in which nodes were added: of several that fit equally well, the first is taken.
        self._rank: dict[int, int] = {}
        self._nodes: list[int] = []
        # Heaps of node ranks by number of free slots, with outdated entries removed lazily.
        self._ranks: dict[int, list[int]] = {}
        # How many of the nodes that can join others have each number of free slots.
        self._joining: dict[int, int] = {}
        self._can_join: set[int] = set()

    def add(self, node_id: int, slots: Iterable[int], *, can_join: bool = False) -> None:
        """Add free slots of a node; `can_join` counts only at the node's first call."""
        if node_id not in self._rank:
            if can_join:
                self._can_join.add(node_id)
            self._rank[node_id] = len(self._nodes)
            self._nodes.append(node_id)
            self._set(node_id, sorted(slots))
        else:
            self._set(node_id, sorted({*self._free[node_id], *slots}))

    def remove(self, node_id: int, slots: Iterable[int]) -> None:
        """Remove slots of a node; absent slots are ignored."""
        if node_id in self._free:
            gone = set(slots)
            self._set(node_id, [slot for slot in self._free[node_id] if slot not in gone])

    @contextmanager
    def without(self, node_ids: Iterable[int]) -> Iterator[None]:
        """Hide some nodes within the context: they have no free slots."""
        hidden = {node_id: free for node_id in node_ids if (free := self._free.get(node_id))}
        for node_id in hidden:
            self._set(node_id, [])
        try:
            yield
        finally:
            for node_id, free in hidden.items():
                self._set(node_id, free)

    def keep(self, node_id: int) -> None:
        """Give no slot of a node any more."""
        if node_id in self._free:
            self._set(node_id, [])

    def num_free(self, node_id: int) -> int:
        """Return the number of free slots of a node."""
        return len(self._free.get(node_id, ()))

    def take(self, num_slots: int, *, allow_uneven: bool = False) -> list[Part] | None:
        """Take slots of a single node, else of several; None if they do not fit.

        Args:
            num_slots: The number of slots in all.
            allow_uneven: Whether one of several nodes may give more than another.
        """
        sizes = self._sizes(num_slots, allow_uneven)
        if sizes is None:
            return None
        found: list[tuple[int, list[int]]] = []
        passed_over: list[tuple[int, list[int]]] = []
        while len(found) < len(sizes):
            node_id = self._find(sizes[len(found)])
            assert node_id is not None
            free = self._free[node_id]
            is_fitting = len(sizes) == 1 or node_id in self._can_join
            (found if is_fitting else passed_over).append((node_id, free))
            # Empty entry for now: the next search must not find the node again.
            self._set(node_id, [])
        parts = []
        for (node_id, free), size in zip(found, sizes, strict=True):
            self._set(node_id, free[size:])
            parts.append((node_id, tuple(free[:size])))
        for node_id, free in passed_over:
            self._set(node_id, free)
        return parts

    @property
    def can_join(self) -> bool:
        """Whether several nodes may give slots to one trial."""
        return len(self._can_join) > 1

    def fits(self, num_slots: int, *, allow_uneven: bool = False) -> bool:
        """Return whether `take` would find so many slots."""
        return self._sizes(num_slots, allow_uneven) is not None

    def take_for(self, trial: Waiting, num_slots: int | None = None) -> list[Part] | None:
        """Take slots as a trial may have them, as many as it needs if not said; None if unfit."""
        number = trial.num_slots if num_slots is None else num_slots
        if trial.is_task and not self.fits_one(number):
            return None
        return self.take(number, allow_uneven=trial.allow_uneven)

    def fits_trial(self, trial: Waiting) -> bool:
        """Return whether `take_for` would find the slots that a trial needs."""
        if trial.is_task:
            return self.fits_one(trial.num_slots)
        return self.fits(trial.num_slots, allow_uneven=trial.allow_uneven)

    def fits_one(self, num_slots: int) -> bool:
        """Return whether a single node has the number of slots."""
        return self._find(num_slots) is not None

    def _sizes(self, num_slots: int, allow_uneven: bool) -> list[int] | None:
        """Return how many slots each of the nodes is to give, the largest number first."""
        if self._find(num_slots) is not None:
            return [num_slots]
        counts = sorted(
            ((size, n) for size, n in self._joining.items() if n and size), reverse=True
        )
        if sum(size * number for size, number in counts) < num_slots:
            return None
        for num_nodes in range(2, num_slots + 1):
            size = num_slots // num_nodes
            if num_slots % num_nodes == 0 and num_nodes <= sum(n for s, n in counts if s >= size):
                return [size] * num_nodes
        return list(_filled(counts, num_slots)) if allow_uneven else None

    def _find(self, num_slots: int) -> int | None:
        for number in sorted(n for n, ranks in self._ranks.items() if n >= num_slots and ranks):
            ranks = self._ranks[number]
            while ranks:
                node_id = self._nodes[ranks[0]]
                if len(self._free[node_id]) == number:
                    return node_id
                # Outdated entry: the node has another number of free slots by now.
                heapq.heappop(ranks)
        return None

    def _set(self, node_id: int, free: list[int]) -> None:
        if node_id in self._can_join:
            if node_id in self._free:
                self._joining[len(self._free[node_id])] -= 1
            self._joining[len(free)] = self._joining.get(len(free), 0) + 1
        self._free[node_id] = free
        heapq.heappush(self._ranks.setdefault(len(free), []), self._rank[node_id])


def _filled(counts: Iterable[tuple[int, int]], num_slots: int) -> Iterator[int]:
    """Yield how many slots nodes give if the largest are used up first."""
    for size, number in counts:
        for _ in range(number):
            if num_slots <= 0:
                return
            yield min(size, num_slots)
            num_slots -= size


def fits_nodes(nodes: Iterable[NodeSlots], num_slots: int, *, allow_uneven: bool = False) -> bool:
    """Return whether a trial could run on some nodes if they were free."""
    free = FreeSlots()
    for node in nodes:
        free.add(node.node_id, set(node.slots) - node.drained, can_join=node.can_join)
    return free.fits(num_slots, allow_uneven=allow_uneven)
