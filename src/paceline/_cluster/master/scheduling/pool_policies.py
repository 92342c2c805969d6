"""Policies of pools: the order of the queue, who makes room; shares and quotas of users."""

import heapq
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline._cluster.master.scheduling.pools import (
    FreeSlots,
    Holding,
    Part,
    PolicyName,
    QuotaLimits,
    Waiting,
)

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
        served: When users and groups last had slots, by pool, in seconds since the epoch.
        quotas: Limits by name of a user or group, or id of a project.
        groups: The groups of users that are in one; their names begin with `@`.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    past: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    served: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    quotas: Mapping[str | int, QuotaLimits] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)


NO_SHARING = Sharing()


class QuotaUse:
    """Slots in use by those who have quotas: users, their groups, and projects."""

    def __init__(self, sharing: Sharing = NO_SHARING, holding: Iterable[Holding] = ()) -> None:
        self._quotas = quotas = sharing.quotas
        self._groups = sharing.groups
        self._used: dict[str | int, int] = defaultdict(int)
        self._known: dict[tuple[str, int], _Quotas] = {}
        for one in holding if quotas else ():
            self.add(one, one.num_slots)

    def add(self, one: Waiting | Holding, num_slots: int) -> None:
        """Count slots for a trial's user, group and project."""
        for owner, *_ in self._quotas_of(one):
            self._used[owner] += num_slots

    def group_of(self, user: str) -> str | None:
        """Return the group of a user, if any."""
        return self._groups.get(user)

    def reached(self, trial: Waiting) -> QuotaLimits | None:
        """Return the quota that keeps a trial waiting, if one does."""
        for owner, most, quota in self._quotas_of(trial):
            if quota.spent is not None or most - self._used[owner] < trial.num_slots:
                return quota
        return None

    def can_claim(self, trial: Waiting) -> bool:
        """Return whether `claim` keeps anything: none before has claimed it, and it may suffice."""
        known = self._quotas_of(trial)
        owner, most, _ = known[0]
        return self._used[owner] <= most and all(
            quota.spent is None and trial.num_slots <= most for _, most, quota in known
        )

    def claim(self, trial: Waiting) -> None:
        """Keep slots of quotas for a trial that waits for them, so that none behind it takes them.

        Its user's own quota comes first, then those that it shares with others: nothing of these is
        kept while the one before lets it wait.
        """
        for owner, most, _ in self._quotas_of(trial):
            self._used[owner] += trial.num_slots
            if self._used[owner] > most:
                return

    def room(self, trial: Waiting) -> float:
        """Return how many slots a trial may get."""
        left = (most - self._used[owner] for owner, most, _ in self._quotas_of(trial))
        return min(left, default=math.inf)

    def _quotas_of(self, one: Waiting | Holding) -> "_Quotas":
        key = (one.user, one.project)
        if (found := self._known.get(key)) is None:
            group = self._groups.get(one.user)
            owners = (one.user, one.project) if group is None else (one.user, group, one.project)
            quotas = [(owner, self._quotas[owner]) for owner in owners if owner in self._quotas]
            found = self._known[key] = [
                (owner, math.inf if quota.max_slots is None else quota.max_slots, quota)
                for owner, quota in quotas
            ]
        return found


_Quotas = list[tuple[str | int, float, QuotaLimits]]


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
        served: When users and groups last had slots.
    """

    def __init__(
        self,
        holding: Iterable[Holding],
        weights: Mapping[str, float] = _NONE,
        past: Mapping[str, float] = _NONE,
        groups: Mapping[str, str] = _NO_GROUPS,
        served: Mapping[str, float] = _NONE,
    ) -> None:
        self._weights, self._past, self._groups = weights, past, groups
        self._served = served
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

    def is_overtaken(self, trial: Waiting, filler: Holding) -> bool:
        """Return whether a filler took slots in front of a trial, and so leaves for it."""
        return filler.queue_place > trial.queue_place

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
        self._num_given = 0
        self._used: dict[int, int] = defaultdict(int)
        self._used_by: dict[str, int] = defaultdict(int)
        self._of: dict[int, list[Holding]] = defaultdict(list)
        self._experiments: dict[str, set[int]] = defaultdict(set)
        # Slots in gaps by experiment, user and group. They do not count in the order of the queue:
        # a user's own small trials in the gap in front of a large one would put others before it.
        self._in_gaps: dict[int | str, int] = defaultdict(int)
        # Ended experiments and such that got nothing yet say nothing of when a user had slots.
        self._last: dict[str, float] = dict(self._served)
        for one in sorted(self._staying, key=lambda one: one.attempt_id):
            self._used[one.experiment_id] += one.num_slots
            self._count(one.user, one.num_slots)
            self._of[one.experiment_id].append(one)
            self._experiments[one.user].add(one.experiment_id)
            for owner in {one.user, self._top(one.user)} if not one.is_filler else ():
                self._last[owner] = max(self._last.get(owner, 0.0), one.since)
            self._note_filler(one, 1)

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
            share_top, last_served_top, place_top, top = heapq.heappop(tops)
            turns = of_top[top]
            share_user, last_served_user, place, user = heapq.heappop(turns)
            mine = own[user]
            share, last_served, position, experiment_id = heapq.heappop(mine)
            queue = queues[experiment_id]
            before = self._num_given
            yield queue.pop()
            # Most trials of a long queue get nothing, and leave the shares as they are.
            is_same = before == self._num_given
            if queue:
                share = share if is_same else self._share(queue[-1])
                heapq.heappush(mine, (share, last_served, position, experiment_id))
            if mine:
                share = share_user if is_same else self._ordinary_share(user)
                heapq.heappush(turns, (share, last_served_user, place, user))
            if turns:
                share = share_top if is_same else self._ordinary_share(top)
                heapq.heappush(tops, (share, last_served_top, place_top, top))

    def candidates(self, trial: Waiting) -> Iterator[_Level]:
        """Yield the youngest attempts of users and experiments with more than their share."""
        yield self._surplus(trial)

    def is_overtaken(self, trial: Waiting, filler: Holding) -> bool:
        """Return whether a filler came later, or took slots since the trial's experiment did.

        The order is not that of arrival: early trials of others would fill each gap in front of it.
        """
        return super().is_overtaken(trial, filler) or filler.since > trial.last_served

    def note_given(self, trial: Waiting, preempted: Iterable[Holding]) -> None:
        """Count the slots gained by the trial's experiment and lost by the preempted ones."""
        self._num_given += 1
        self._used[trial.experiment_id] += trial.num_slots
        self._count(trial.user, trial.num_slots)
        for one in preempted:
            self._used[one.experiment_id] -= one.num_slots
            self._count(one.user, -one.num_slots)
            self._note_filler(one, -1)
            own = self._of[one.experiment_id]
            # Nearly always the youngest.
            del own[next(i for i in reversed(range(len(own))) if own[i] is one)]

    def _share(self, trial: Waiting) -> float:
        used = self._used[trial.experiment_id] - self._in_gaps[trial.experiment_id]
        return used / trial.weight

    def _ordinary_share(self, owner: str) -> float:
        """Return the share of a user or a group without slots in gaps."""
        return self._share_of(owner, self._used_by[owner] - self._in_gaps[owner])

    def _note_filler(self, one: Holding, sign: int) -> None:
        if one.is_filler:
            owners: set[int | str] = {one.experiment_id, one.user, self._top(one.user)}
            for owner in owners:
                self._in_gaps[owner] += sign * one.num_slots

    def _top(self, user: str) -> str:
        """Return the group of a user, or the user without one."""
        return self._groups.get(user, user)

    def _count(self, user: str, num_slots: int) -> None:
        for owner in {user, self._top(user)}:
            self._used_by[owner] += num_slots

    def _turn(
        self, owner: str, turns: Iterable[tuple[float, float, int, Any]]
    ) -> tuple[float, float, int, str]:
        """Return the turn of a user or a group: its share, when it last had slots, its place."""
        place = min(turns)[2]
        return self._ordinary_share(owner), self._last.get(owner, 0.0), place, owner

    def _held_share(self, owner: str, num_slots: int) -> float:
        return num_slots / self._weights.get(owner, 1.0)

    def _share_of(self, owner: str, num_slots: int) -> float:
        """Return the share of a user or a group with some slots, past use included."""
        past = self._past.get(owner, 0.0) / self._weights.get(owner, 1.0)
        return past + self._held_share(owner, num_slots)

    def _surplus(self, trial: Waiting) -> Iterator[Holding]:
        rivals: dict[str, list[str]] = defaultdict(list)
        for user in self._experiments:
            rivals[self._rivals(user, trial.user)[0]].append(user)
        # Owners with the largest share that one may keep: few of them are looked into.
        owners = [
            (-self._share_of(owner, self._used_by[owner] - 1), owner)
            for owner in rivals
            if self._may_have_more(trial, owner, self._used_by[owner] - 1)
        ]
        heapq.heapify(owners)
        known: dict[str, _Surplus] = {}
        # The next attempt of each owner by the share that it leaves, the largest one first.
        kept: list[tuple[float, float, int, str]] = []
        while True:
            while owners and (not kept or owners[0][0] <= kept[0][0]):
                owner = heapq.heappop(owners)[1]
                experiments = (one for user in rivals[owner] for one in self._experiments[user])
                attempts = {one: self._of[one] for one in experiments if one != trial.experiment_id}
                known[owner] = _Surplus(attempts, self._used, self._used_by[owner])
                self._offer(trial, owner, known[owner], kept)
            if not kept:
                return
            owner = heapq.heappop(kept)[3]
            yield known[owner].take()
            self._offer(trial, owner, known[owner], kept)

    def _offer(
        self,
        trial: Waiting,
        owner: str,
        surplus: "_Surplus",
        kept: list[tuple[float, float, int, str]],
    ) -> None:
        """Add the next attempt of an owner that has more than its share, if there is one."""
        least = (self._used[trial.experiment_id] + trial.num_slots) / trial.weight
        while surplus.next:
            num_slots, left, attempt_id, *_ = surplus.next[0]
            held = surplus.num_used - num_slots
            is_more = -left >= least if owner == trial.user else False
            if is_more or (owner != trial.user and self._may_have_more(trial, owner, held)):
                share = self._share_of(owner, held)
                heapq.heappush(kept, (-share, left, attempt_id, owner))
                return
            heapq.heappop(surplus.next)

    def _rivals(self, user: str, gaining: str) -> tuple[str, str]:
        """Return who are compared: the groups of two users, or of one group the users."""
        other, top = self._top(user), self._top(gaining)
        return (other, top) if other != top else (user, gaining)

    def _may_have_more(self, trial: Waiting, owner: str, held: int) -> bool:
        """Return whether an owner that keeps some slots has as much as the trial's one then has."""
        if owner == trial.user:
            return True
        own = self._top(trial.user)
        if self._groups.get(owner, "") == own or owner == own:
            own = trial.user
        gained = self._used_by[own] + trial.num_slots
        if self._held_share(owner, held) < self._held_share(own, gained):
            return False
        return self._share_of(owner, held) >= self._share_of(own, gained)


class _Surplus:
    """Attempts of an owner in the order in which they leave: of small ones, and large experiments.

    Attributes:
        num_used: The slots of the owner that are left.
        next: A heap of the youngest attempt of each experiment: its slots, the share that its
            experiment keeps and its id, both negated, and its experiment and index there.
    """

    def __init__(
        self, attempts: Mapping[int, Sequence[Holding]], used: Mapping[int, int], num_used: int
    ) -> None:
        self._attempts, self.num_used = attempts, num_used
        self._used = {one: used[one] for one in attempts}
        self.next: list[tuple[int, float, int, int, int]] = []
        for experiment_id, found in attempts.items():
            self._push(experiment_id, len(found) - 1)

    def take(self) -> Holding:
        """Remove and return the next attempt."""
        num_slots, _, _, experiment_id, index = heapq.heappop(self.next)
        self._used[experiment_id] -= num_slots
        self.num_used -= num_slots
        self._push(experiment_id, index - 1)
        return self._attempts[experiment_id][index]

    def _push(self, experiment_id: int, index: int) -> None:
        if index >= 0:
            one = self._attempts[experiment_id][index]
            left = (self._used[experiment_id] - one.num_slots) / one.weight
            turn = (one.num_slots, -left, -one.attempt_id, experiment_id, index)
            heapq.heappush(self.next, turn)


POLICIES: dict[PolicyName, type[Policy]] = {
    PolicyName.FIFO: FifoPolicy,
    PolicyName.PRIORITY: PriorityPolicy,
    PolicyName.FAIR_SHARE: FairSharePolicy,
}


UsableSlots = Callable[[Holding], Sequence[Part]]
"""Returns the parts of an attempt that others may use once it has left."""


def choose_victims(
    levels: Iterator[Iterable[Holding]], free: FreeSlots, num_slots: int, usable: UsableSlots
) -> tuple[Holding, ...] | None:
    """Return attempts to preempt for room on a single node; None if there are none.

    Attempts of a level are chosen only if the levels before do not suffice. Then as
    few as possible are chosen, and among equally few the first ones.
    """
    on_node: dict[int, list[tuple[int, int, Holding]]] = defaultdict(list)
    gained: dict[int, int] = defaultdict(int)
    place = 0
    for level in levels:
        for one in level:
            for node_id, slots in usable(one):
                size = len(slots)
                if size == 0:
                    continue
                missing = num_slots - free.num_free(node_id)
                if size >= missing:
                    return (one,)
                on_node[node_id].append((place, size, one))
                gained[node_id] += size
                place += 1
        found = [
            _fewest_victims(attempts, num_slots - free.num_free(node_id))
            for node_id, attempts in on_node.items()
            if gained[node_id] >= num_slots - free.num_free(node_id)
        ]
        if found:
            best = min(found, key=lambda chosen: (len(chosen), [place for place, _, _ in chosen]))
            return tuple(one for _, _, one in best)
    return None


def _fewest_victims(
    attempts: Sequence[tuple[int, int, Holding]], missing: int
) -> list[tuple[int, int, Holding]]:
    """Return as few attempts as give so many slots; of equally few the earliest."""
    left = sorted((size for _, size, _ in attempts), reverse=True)
    number, total = 0, 0
    while total < missing:
        total += left[number]
        number += 1
    chosen: list[tuple[int, int, Holding]] = []
    for index, attempt in enumerate(attempts):
        if len(chosen) == number:
            break
        others = sorted((size for _, size, _ in attempts[index + 1 :]), reverse=True)
        most = sum(others[: number - len(chosen) - 1])
        # An early attempt is taken if the later ones can give the rest.
        if attempt[1] + most >= missing:
            chosen.append(attempt)
            missing -= attempt[1]
    return chosen


def choose_victims_until(
    levels: Iterator[Iterable[Holding]], suffices: Callable[[Sequence[Holding]], bool]
) -> tuple[Holding, ...] | None:
    """Return attempts sufficient together, in the order of the levels; None if none are.

    None of them can be left out.
    """
    chosen: list[Holding] = []
    for level in levels:
        for one in level:
            chosen.append(one)
            if suffices(chosen):
                return tuple(_needed_victims(chosen, suffices))
    return None


def _needed_victims(
    chosen: list[Holding], suffices: Callable[[Sequence[Holding]], bool]
) -> list[Holding]:
    needed = list(chosen)
    # The last ones are spared first.
    for one in reversed(chosen):
        others = [other for other in needed if other is not one]
        if suffices(others):
            needed = others
    return needed
