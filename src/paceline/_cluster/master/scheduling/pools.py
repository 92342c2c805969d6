"""Inputs and results of scheduling: waiting trials, attempts, nodes; shares and pool policies."""

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from paceline._cluster.messages.runner_messages import DEFAULT_POOL, LOCAL_NODE

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
    `own_runners`, trials start only on runners of their user.
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
    reserved_for: frozenset[str] | None = None
    reserved_from: float = 0.0
    reserved_until: float = 0.0

    def is_closed_to(self, user: str) -> bool:
        """Return whether the node is reserved for others than a user, or is another's own."""
        if self.is_owners and user != self.owner:
            return True
        return self.reserved_for is not None and user not in self.reserved_for


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

    Slots of a pool are counted, on whatever nodes they are. Trials that come later are not known.

    Args:
        holding: The attempts that hold slots.
        nodes: The nodes in their pools.
        ends: When attempts end, as far as that can be said.
    """

    def __init__(
        self, holding: Iterable[Holding], nodes: Iterable[NodeSlots], ends: Mapping[int, float]
    ) -> None:
        self._free: Counter[str] = Counter()
        self._coming: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._at: dict[str, float] = defaultdict(float)
        pool_of_node = {}
        for node in nodes:
            pool_of_node[node.node_id] = node.pool
            if node.is_open and not node.is_pausing:
                self._free[node.pool] += len(set(node.slots) - node.drained)
        for one in holding:
            pool = pool_of_node.get(one.node_id, "")
            self._free[pool] -= one.num_slots
            self._coming[pool].append((ends.get(one.attempt_id, math.inf), one.num_slots))
        for coming in self._coming.values():
            coming.sort(reverse=True)

    def note(self, result: SchedulingResult) -> float | None:
        """Return when a trial starts, None if unknown; trials come in the order of the queue."""
        if result.reason not in (Reason.SLOTS_IN_USE, Reason.BEHIND_OTHERS):
            return None
        pool = result.waiting.pool
        self._free[pool] -= result.waiting.num_slots
        while self._free[pool] < 0 and self._coming[pool]:
            self._at[pool], num_slots = self._coming[pool].pop()
            self._free[pool] += num_slots
        is_known = self._free[pool] >= 0 and 0 < self._at[pool] < math.inf
        return self._at[pool] if is_known else None


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
        return replace(node, pool=node.only_pool, is_open=False)
    is_owners = pool in pools and pools[pool].own_runners
    if (node.pool, node.is_owners) == (pool, is_owners):
        return node
    return replace(node, pool=pool, is_owners=is_owners)


DEFAULT_HALF_LIFE_S = 7 * 86400.0
"""Half-life by which past use is kept for pools that have none yet."""
# A held slot counts like this part of a half-life of past use: slots given in one pass alternate
# between users, and in the long run past use decides.
_AHEAD = 0.01


def recent_use(num_slots: int, begin: float, end: float, half_life_s: float) -> float:
    """Return slot seconds at the moment `end`, of which each half-life before halves the worth.

    At most a half-life's worth counts per slot, however far the clock jumps.
    """
    age = max(end - begin, 0.0)
    return num_slots * half_life_s / math.log(2) * -math.expm1(-age / half_life_s * math.log(2))


def faded(use_s: float, at: float, now: float, half_life_s: float) -> float:
    """Return past use at another time; use from beyond a clock that was set back fades as well."""
    return float(use_s * 0.5 ** (abs(now - at) / half_life_s))


def as_slots(use_s: float, half_life_s: float) -> float:
    """Return recent use as a number of held slots, as fair shares compare both."""
    return use_s / (_AHEAD * half_life_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What users and projects may use of the slots, at one moment.

    Attributes:
        weights: Weights of users and groups; 1 for those not listed.
        past: Recent use of users and groups as slots, by pool.
        quotas: Limits by name of a user or group, or id of a project.
        groups: The groups of users that are in one; their names begin with `@`.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    past: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    quotas: Mapping[str | int, QuotaLimits] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)


NO_SHARING = Sharing()


class QuotaUse:
    """Slots in use by those who have quotas: users, their groups, and projects."""

    def __init__(self, sharing: Sharing = NO_SHARING, holding: Iterable[Holding] = ()) -> None:
        self._quotas = quotas = sharing.quotas
        self._groups = sharing.groups
        self._used: Counter[str | int] = Counter()
        for one in holding if quotas else ():
            self.add(one, one.num_slots)

    def add(self, one: Waiting | Holding, num_slots: int) -> None:
        """Count slots for a trial's user, group and project."""
        for owner in self._owners(one):
            self._used[owner] += num_slots

    def group_of(self, user: str) -> str | None:
        """Return the group of a user, if any."""
        return self._groups.get(user)

    def reached(self, trial: Waiting) -> QuotaLimits | None:
        """Return the quota that keeps a trial waiting, if one does."""
        for left, quota in self._left(trial):
            if quota.spent is not None or left < trial.num_slots:
                return quota
        return None

    def room(self, trial: Waiting) -> float:
        """Return how many slots a trial may get."""
        return min((left for left, _ in self._left(trial)), default=math.inf)

    def _left(self, trial: Waiting) -> Iterator[tuple[float, QuotaLimits]]:
        for owner in self._owners(trial) if self._quotas else ():
            quota = self._quotas.get(owner)
            if quota is not None:
                most = math.inf if quota.max_slots is None else quota.max_slots
                yield most - self._used[owner], quota

    def _owners(self, one: Waiting | Holding) -> tuple[str | int, ...]:
        group = self._groups.get(one.user)
        return (one.user, one.project) if group is None else (one.user, group, one.project)


def moved(
    places: Mapping[int, float], experiment_id: int, *, ahead_of: float | None, behind: float | None
) -> dict[int, float]:
    """Return the changed queue places after moving an experiment.

    Args:
        places: The places of all experiments that were moved before.
        experiment_id: The one that is moved.
        ahead_of: The place right before which it goes.
        behind: The place right after which it goes, if not ahead of one.
    """
    if ahead_of is not None:
        target, cell = ahead_of, math.ceil(ahead_of) - 1
    else:
        assert behind is not None
        target, cell = behind, math.floor(behind)
    # Places between the same two integers, in order; they are spread anew, so there is always
    # room between two neighbours.
    same = sorted(
        (place, other)
        for other, place in places.items()
        if cell < place < cell + 1 and other != experiment_id
    )
    if ahead_of is not None:
        index = sum(place < target for place, _ in same)
    else:
        index = sum(place <= target for place, _ in same)
    order = [other for _, other in same]
    order.insert(index, experiment_id)
    return {other: cell + (n + 1) / (len(order) + 1) for n, other in enumerate(order)}


_Level = Iterable[Holding]
_NONE: Mapping[str, float] = {}
_NO_GROUPS: Mapping[str, str] = {}


class Policy(ABC):
    """The order of a pool's trials.

    Args:
        holding: The attempts of the pool; those that are leaving count as gone.
        weights: Weights of users and groups; 1 for those not listed.
        past: Recent use of users and groups, as slots.
        groups: The groups of users that are in one.
    """

    def __init__(
        self,
        holding: Iterable[Holding],
        weights: Mapping[str, float] = _NONE,
        past: Mapping[str, float] = _NONE,
        groups: Mapping[str, str] = _NO_GROUPS,
    ) -> None:
        self._weights, self._past, self._groups = weights, past, groups
        self._staying = [one for one in holding if not one.is_leaving]

    @abstractmethod
    def order(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        """Yield trials in order of service, taking `note_given` calls in between into account."""

    def candidates(self, trial: Waiting) -> Iterator[_Level]:
        """Yield preemptible attempts for a trial, in levels.

        A level is preempted only if the levels before do not suffice. Within a level, the
        order is the order of leaving.
        """
        del trial
        return iter(())

    def note_given(self, trial: Waiting, preempted: Iterable[Holding]) -> None:
        """Record slots granted to a trial, at once or after leaving attempts have left."""
        del trial, preempted


class FifoPolicy(Policy):
    """First come, first served."""

    def order(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        """Yield trials in the order of arrival."""
        return iter(waiting)


class PriorityPolicy(Policy):
    """The most important first, and within a priority first come, first served.

    Attempts make room for trials of a more important priority. Among these, the least important
    leave, as few as possible, and the youngest first.
    """

    def __init__(self, holding: Iterable[Holding], *shares: Mapping[str, Any]) -> None:
        super().__init__(holding, *shares)
        self._levels: dict[int, list[Holding]] = defaultdict(list)
        for one in sorted(self._staying, key=lambda one: -one.attempt_id):
            self._levels[one.priority].append(one)

    def order(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        """Yield trials by priority; equal ones keep their order."""
        return iter(sorted(waiting, key=lambda trial: trial.priority))

    def candidates(self, trial: Waiting) -> Iterator[_Level]:
        """Yield less important attempts, the least important level first."""
        for priority in sorted(self._levels, reverse=True):
            if priority > trial.priority:
                yield self._levels[priority]

    def note_given(self, trial: Waiting, preempted: Iterable[Holding]) -> None:
        """Forget the preempted attempts."""
        for one in preempted:
            self._levels[one.priority].remove(one)


class FairSharePolicy(Policy):
    """Slots in proportion to the weights of groups, of users in them, and of their experiments.

    A user without a group stands for itself among the groups. The next trial is one of the group
    with the least for the weight, past use included, and in it one of the user of whom that holds;
    among the user's experiments it is one of that with the fewest slots for its weight. Of several
    such, it is the one that got slots the longest time ago. An attempt makes room only if its
    group, or if that is the same its user, or else its experiment, keeps at least as much for its
    weight as the other one then has, with past use and without. So each preemption makes the shares
    more equal, and none is ever undone.
    """

    def __init__(self, holding: Iterable[Holding], *shares: Mapping[str, Any]) -> None:
        super().__init__(holding, *shares)
        self._used: dict[int, int] = defaultdict(int)
        self._used_by: dict[str, int] = defaultdict(int)
        self._of: dict[int, list[Holding]] = defaultdict(list)
        for one in sorted(self._staying, key=lambda one: one.attempt_id):
            self._used[one.experiment_id] += one.num_slots
            self._count(one.user, one.num_slots)
            self._of[one.experiment_id].append(one)

    def order(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        """Yield trials, always from the user and the experiment with the smallest share."""
        queues: dict[int, list[Waiting]] = defaultdict(list)
        for trial in waiting:
            queues[trial.experiment_id].append(trial)
        own: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
        for position, (experiment_id, queue) in enumerate(queues.items()):
            # Reversed order: taking from the end of a list is cheap, from its start is not.
            queue.reverse()
            turn = (self._share(queue[-1]), queue[-1].last_served, position, experiment_id)
            own[queue[-1].user].append(turn)
        of_top: dict[str, list[tuple[float, float, int, str]]] = defaultdict(list)
        for user, mine in own.items():
            heapq.heapify(mine)
            of_top[self._top(user)].append(self._turn(user, mine))
        tops = []
        for top, turns in of_top.items():
            heapq.heapify(turns)
            tops.append(self._turn(top, turns))
        heapq.heapify(tops)
        while tops:
            _, last_served_top, place_top, top = heapq.heappop(tops)
            turns = of_top[top]
            _, last_served_user, place, user = heapq.heappop(turns)
            mine = own[user]
            _, last_served, position, experiment_id = heapq.heappop(mine)
            queue = queues[experiment_id]
            yield queue.pop()
            if queue:
                turn = (self._share(queue[-1]), last_served, position, experiment_id)
                heapq.heappush(mine, turn)
            if mine:
                share = self._share_of(user, self._used_by[user])
                heapq.heappush(turns, (share, last_served_user, place, user))
            if turns:
                share = self._share_of(top, self._used_by[top])
                heapq.heappush(tops, (share, last_served_top, place_top, top))

    def candidates(self, trial: Waiting) -> Iterator[_Level]:
        """Yield the youngest attempts of users and experiments with more than their share."""
        yield self._surplus(trial)

    def note_given(self, trial: Waiting, preempted: Iterable[Holding]) -> None:
        """Count the slots gained by the trial's experiment and lost by the preempted ones."""
        self._used[trial.experiment_id] += trial.num_slots
        self._count(trial.user, trial.num_slots)
        for one in preempted:
            self._used[one.experiment_id] -= one.num_slots
            self._count(one.user, -one.num_slots)
            own = self._of[one.experiment_id]
            # Nearly always the youngest.
            del own[next(i for i in reversed(range(len(own))) if own[i] is one)]

    def _share(self, trial: Waiting) -> float:
        return self._used[trial.experiment_id] / trial.weight

    def _top(self, user: str) -> str:
        """Return the group of a user, or the user without one."""
        return self._groups.get(user, user)

    def _count(self, user: str, num_slots: int) -> None:
        for owner in {user, self._top(user)}:
            self._used_by[owner] += num_slots

    def _turn(
        self, owner: str, turns: Iterable[tuple[float, float, int, Any]]
    ) -> tuple[float, float, int, str]:
        """Return the turn of a user or a group: its share, when it last got slots, its place."""
        turns = list(turns)
        last_served = max(last for _, last, _, _ in turns)
        return self._share_of(owner, self._used_by[owner]), last_served, min(turns)[2], owner

    def _held_share(self, owner: str, num_slots: int) -> float:
        return num_slots / self._weights.get(owner, 1.0)

    def _share_of(self, owner: str, num_slots: int) -> float:
        """Return the share of a user or a group with some slots, past use included."""
        past = self._past.get(owner, 0.0) / self._weights.get(owner, 1.0)
        return past + self._held_share(owner, num_slots)

    def _surplus(self, trial: Waiting) -> Iterator[Holding]:
        top = self._top(trial.user)
        least = (self._used[trial.experiment_id] + trial.num_slots) / trial.weight
        gained = {one: self._used_by[one] + trial.num_slots for one in (top, trial.user)}
        used, used_by = dict(self._used), dict(self._used_by)
        # The shares that remain without one more attempt; the largest one first.
        kept: list[tuple[float, float, int, int, int]] = []

        def rival(user: str) -> tuple[str, str]:
            """Return who are compared: the groups, or of one group its users."""
            other = self._top(user)
            return (other, top) if other != top else (user, trial.user)

        def offer(experiment_id: int, index: int) -> None:
            if index < 0 or experiment_id == trial.experiment_id:
                return
            one = self._of[experiment_id][index]
            left = (used[experiment_id] - one.num_slots) / one.weight
            owner, own = rival(one.user)
            held = used_by[owner] - one.num_slots
            share = self._share_of(owner, held)
            if one.user == trial.user:
                is_more = left >= least
            else:
                is_more = self._held_share(owner, held) >= self._held_share(own, gained[own])
                is_more = is_more and share >= self._share_of(own, gained[own])
            if is_more:
                heapq.heappush(kept, (-share, -left, -one.attempt_id, experiment_id, index))

        for experiment_id, attempts in self._of.items():
            offer(experiment_id, len(attempts) - 1)
        while kept:
            share, _, _, experiment_id, index = heapq.heappop(kept)
            one = self._of[experiment_id][index]
            owner = rival(one.user)[0]
            if -share != self._share_of(owner, used_by[owner] - one.num_slots):
                # Outdated: another attempt of its owner was yielded meanwhile.
                offer(experiment_id, index)
                continue
            used[experiment_id] -= one.num_slots
            for known in {one.user, self._top(one.user)}:
                used_by[known] -= one.num_slots
            yield one
            offer(experiment_id, index - 1)


POLICIES: dict[PolicyName, type[Policy]] = {
    PolicyName.FIFO: FifoPolicy,
    PolicyName.PRIORITY: PriorityPolicy,
    PolicyName.FAIR_SHARE: FairSharePolicy,
}
