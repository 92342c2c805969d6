"""Give free slots to waiting trials, pool by pool, and place each on fitting nodes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from paceline._cluster.master.scheduling.pool_policies import (
    NO_SHARING,
    POLICIES,
    Policy,
    QuotaUse,
    Sharing,
    choose_victims,
    choose_victims_until,
)
from paceline._cluster.master.scheduling.pools import (
    FreeSlots,
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

_NO_POOLS: Mapping[str, PoolSettings] = {}
# Trials looked at for a gap, as a queue can be long.
_MOST_BEHIND = 500
_NO_SLOTS: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Decision for now: slot assignments, and attempts to preempt with the trial in need."""

    assignments: list[SlotAssignment]
    preemptions: list[tuple[Holding, Waiting]]


def schedule(
    waiting: Iterable[Waiting],
    holding: Iterable[Holding],
    nodes: Sequence[NodeSlots],
    pools: Mapping[str, PoolSettings] = _NO_POOLS,
    sharing: Sharing = NO_SHARING,
) -> Schedule:
    """Decide who starts now and who must leave; no more of `waiting` is read than is needed."""
    found = Schedule(assignments=[], preemptions=[])
    # Nothing more can be given once each pool is held up.
    open_pools = {node.pool for node in nodes}
    for result in decide(waiting, holding, nodes, pools, sharing):
        trial = result.waiting
        if result.slots:
            found.assignments.append(
                SlotAssignment(
                    trial_id=trial.trial_id,
                    slots=result.slots,
                    node_id=result.node_id,
                    others=result.others,
                    is_filler=result.is_filler,
                )
            )
        found.preemptions.extend((one, trial) for one in result.preempts)
        if result.ends_pool:
            open_pools.discard(trial.pool)
            if not open_pools:
                break
    return found


def decide(
    waiting: Iterable[Waiting],
    holding: Iterable[Holding],
    nodes: Sequence[NodeSlots],
    pools: Mapping[str, PoolSettings] = _NO_POOLS,
    sharing: Sharing = NO_SHARING,
) -> Iterator[SchedulingResult]:
    """Yield each waiting trial's result: its slots, or the reason for waiting.

    The trials of one pool come in the order in which they get slots. A trial that does not fit
    holds up the trials of its pool behind it, so that a large one is never starved by small ones;
    a trial that only a quota, or its experiment's own limit, holds back does not, but keeps its
    part of the quota from those behind it. Neither does a trial too large for all nodes of its pool
    (which may have shrunk). A trial that waits for another node than that of its failure holds up
    one node. In a pool with backfill, those behind get free slots as fillers, which leave once the
    one in front has room with theirs.
    """
    holding = list(holding)
    used_by: Counter[int] = Counter()
    trials_of: Counter[int] = Counter()
    for holder in holding:
        used_by[holder.experiment_id] += holder.num_slots
        trials_of[holder.experiment_id] += 1
    quota_use = QuotaUse(sharing, holding)
    nodes_of, holding_of = _by_pool(nodes, holding)
    # Queues for pools with waiting trials only: other pools need no work.
    queues: dict[str, _PoolSchedule] = {}
    collected: dict[str, list[Waiting]] = defaultdict(list)
    for trial in waiting:
        queue = queues.get(trial.pool)
        if queue is None:
            own = nodes_of.get(trial.pool, [])
            settings = pools.get(trial.pool) if own else None
            mine = holding_of.get(trial.pool, [])
            settings = settings or PoolSettings()
            past, served = (one.get(trial.pool, {}) for one in (sharing.past, sharing.served))
            policy = POLICIES[settings.policy](mine, sharing.weights, past, sharing.groups, served)
            queue = queues[trial.pool] = _PoolSchedule(
                settings, policy, mine, own, used_by, trials_of, quota_use
            )
        if queue.is_by_arrival:
            yield queue.judge(trial)
        else:
            collected[trial.pool].append(trial)
    for name, trials in collected.items():
        yield from queues[name].judge_all(trials)


def _by_pool(
    nodes: Sequence[NodeSlots], holding: Sequence[Holding]
) -> tuple[dict[str, list[NodeSlots]], dict[str, list[Holding]]]:
    of_node = {node.node_id: node.pool for node in nodes}
    nodes_of: dict[str, list[NodeSlots]] = defaultdict(list)
    for node in nodes:
        nodes_of[node.pool].append(node)
    holding_of: dict[str, list[Holding]] = defaultdict(list)
    for holder in holding:
        if holder.node_id in of_node:
            holding_of[of_node[holder.node_id]].append(holder)
    return nodes_of, holding_of


class _PoolSchedule:
    """Scheduling state of a pool: slots free now, and slots free after preemptions."""

    def __init__(
        self,
        settings: PoolSettings,
        policy: Policy,
        holding: Sequence[Holding],
        nodes: Sequence[NodeSlots],
        used_by: Counter[int],
        trials_of: Counter[int],
        quota_use: QuotaUse,
    ) -> None:
        self._settings = settings
        is_fifo = settings.policy is PolicyName.FIFO
        self.is_by_arrival = is_fifo and not settings.is_interactive_now
        self._policy = policy
        self._quota_use = quota_use
        self._backfill = settings.backfill
        self._preempts = settings.backfill or not is_fifo
        self._fillers = sorted(
            (one for one in holding if one.is_filler and not one.is_leaving),
            key=lambda one: -one.attempt_id,
        )
        self._max_slots = settings.max_slots
        self._used_by = used_by
        self._trials_of = trials_of
        self._usable = {
            node.node_id: frozenset(node.slots) - node.drained
            for node in nodes
            if _takes_slots(node)
        }
        self._all = self._all_now = _undrained(nodes)
        if any(node.is_pausing for node in nodes):
            self._all_now = _undrained([node for node in nodes if not node.is_pausing])
        self._reserved = [node for node in nodes if node.reserved_for is not None or node.is_owners]
        self._closed_to: dict[str, frozenset[int]] = {}
        self._nodes = nodes
        self._known = frozenset(node.node_id for node in nodes)
        # Sizes for which all nodes, if they were free, are found to be too small or large enough;
        # with the nodes that are reserved for others.
        self._obstacles: dict[tuple[int, bool, bool, frozenset[int]], Reason | None] = {}
        self._place = 0
        self._behind: Waiting | None = None
        self._num_behind = 0
        self._free, self._future = FreeSlots(), FreeSlots()
        self._num_used = sum(one.num_slots for one in holding)
        self._num_staying = sum(one.num_slots for one in holding if not one.is_leaving)
        self._add_slots(holding, nodes)

    def _add_slots(self, holding: Sequence[Holding], nodes: Sequence[NodeSlots]) -> None:
        taken: dict[int, set[int]] = defaultdict(set)
        for one in holding:
            for node_id, slots in one.parts:
                taken[node_id].update(slots)
        for node in nodes:
            if _takes_slots(node):
                free = self._usable[node.node_id] - taken.get(node.node_id, _NO_SLOTS)
                self._free.add(node.node_id, free, can_join=node.can_join)
                if self._preempts:
                    self._future.add(node.node_id, free, can_join=node.can_join)
        if self._preempts:
            for one in holding:
                if one.is_leaving:
                    self._free_later(one)

    def judge_all(self, waiting: Sequence[Waiting]) -> Iterator[SchedulingResult]:
        """Yield each trial's result, in the order of the pool's policy; interactive ones first."""
        first = [one for one in waiting if self._comes_first(one)]
        rest = [one for one in waiting if not self._comes_first(one)] if first else waiting
        for trials in (first, rest):
            for trial in self._policy.order(trials):
                yield self.judge(trial)

    def _comes_first(self, one: Waiting | Holding) -> bool:
        return self._settings.is_interactive_now and one.is_interactive

    def judge(self, trial: Waiting) -> SchedulingResult:
        """Return the result for the next trial."""
        place = self._place
        self._place += 1
        if not self._settings.is_open_to(
            trial.user, self._quota_use.group_of(trial.user), trial.project
        ):
            return SchedulingResult(waiting=trial, reason=Reason.CLOSED_POOL, place=place)
        if (quota := self._quota_use.reached(trial)) is not None:
            if self._behind is None and self._quota_use.can_claim(trial):
                self._claim_quota(trial)
            return SchedulingResult(waiting=trial, reason=Reason.QUOTA, place=place, quota=quota)
        reserved = self._nodes_closed_to(trial)
        reason = self._obstacle(trial, reserved)
        if reason is Reason.BEHIND_OTHERS and self._backfill and not trial.is_task:
            return self._judge_filler(trial, place, reserved)
        if reason is not None:
            behind = self._behind if reason is Reason.BEHIND_OTHERS else None
            return SchedulingResult(waiting=trial, reason=reason, place=place, behind=behind)
        avoided = self._nodes_to_avoid(trial, reserved)
        with self._without(avoided | reserved):
            parts = self._take_slots(trial)
            preempts = self._make_room(trial) if parts is None and self._preempts else None
            if preempts is not None:
                # Free slots usable later by the trial are reserved until the rest is free.
                for part in self._future.take_for(trial) or ():
                    self._free.remove(*part)
        if parts is not None:
            return self._place_trial(trial, parts, place)
        if preempts is None:
            is_full = not self._has_room(self._num_used, trial.num_slots)
            if avoided and not is_full:
                self._keep_node(trial, avoided | reserved)
                self._note_placement(trial, ())
                return SchedulingResult(waiting=trial, reason=Reason.ELSEWHERE, place=place)
            self._behind = trial
            self._count_use(trial)
            reason = Reason.POOL_LIMIT if is_full else Reason.SLOTS_IN_USE
            return SchedulingResult(
                waiting=trial, reason=reason, place=place, ends_pool=not self._can_fill()
            )
        self._note_placement(trial, preempts)
        return SchedulingResult(
            waiting=trial, reason=Reason.PREEMPTING, place=place, preempts=preempts
        )

    def _claim_quota(self, trial: Waiting) -> None:
        if self._obstacle(trial, self._nodes_closed_to(trial)) is None:
            self._quota_use.claim(trial)

    def _nodes_closed_to(self, trial: Waiting) -> frozenset[int]:
        closed = self._closed_to.get(trial.user)
        if closed is None:
            closed = self._closed_to[trial.user] = frozenset(
                node.node_id for node in self._reserved if node.is_closed_to(trial.user)
            )
        return trial.excluded & self._known | closed if trial.excluded else closed

    def _judge_filler(
        self, trial: Waiting, place: int, reserved: frozenset[int]
    ) -> SchedulingResult:
        """Return the result for a trial behind one that is too large: free slots, or none."""
        self._num_behind += 1
        with self._without(self._nodes_to_avoid(trial, reserved) | reserved):
            parts = self._take_slots(trial)
        if parts is not None:
            return self._place_trial(trial, parts, place, is_filler=True)
        return SchedulingResult(
            waiting=trial, reason=Reason.BEHIND_OTHERS, place=place, behind=self._behind,
            ends_pool=not self._can_fill(),
        )  # fmt: skip

    def _can_fill(self) -> bool:
        """Return whether trials behind the one that is too large may get slots."""
        return (
            self._backfill
            and self._num_behind < _MOST_BEHIND
            and self._has_room(self._num_used, 1)
            and self._free.fits_one(1)
        )

    def _place_trial(
        self, trial: Waiting, parts: Sequence[Part], place: int, *, is_filler: bool = False
    ) -> SchedulingResult:
        for part in parts:
            self._future.remove(*part)
        num_slots = sum(len(slots) for _, slots in parts)
        is_larger = num_slots != trial.num_slots
        self._note_placement(replace(trial, num_slots=num_slots) if is_larger else trial, ())
        (node_id, slots), *others = parts
        return SchedulingResult(
            waiting=trial, slots=slots, node_id=node_id, others=tuple(others), place=place,
            is_filler=is_filler,
        )  # fmt: skip

    def _candidates(self, trial: Waiting) -> Iterator[Iterable[Holding]]:
        """Yield attempts that may leave for a trial: fillers behind it, then by the policy."""
        is_first = self._comes_first(trial)
        behind = {
            one.attempt_id: one
            for one in self._fillers
            if (is_first and not self._comes_first(one))
            or (is_first >= self._comes_first(one) and self._policy.is_overtaken(trial, one))
        }
        if behind:
            yield behind.values()
        # Interactive attempts stay: they would come first again at once.
        others = self._settings.is_interactive_now and not is_first
        for level in self._policy.candidates(trial):
            yield (
                one
                for one in level
                if one.attempt_id not in behind and not (others and one.is_interactive)
            )

    def _obstacle(self, trial: Waiting, reserved: frozenset[int]) -> Reason | None:
        """Return why a trial gets nothing, whatever is free."""
        in_use = self._used_by[trial.experiment_id]
        if trial.max_slots is not None and in_use + trial.num_slots > trial.max_slots:
            return Reason.MAX_SLOTS
        # Leaving attempts count as running until they have left.
        if (
            trial.max_trials is not None
            and self._trials_of[trial.experiment_id] >= trial.max_trials
        ):
            return Reason.MAX_TRIALS
        if self._max_slots is not None and trial.num_slots > self._max_slots:
            return Reason.POOL_LIMIT
        size = (trial.num_slots, trial.allow_uneven, trial.is_task, reserved)
        if size not in self._obstacles:
            self._obstacles[size] = self._size_obstacle(trial, reserved)
        if (reason := self._obstacles[size]) is not None:
            return reason
        return None if self._behind is None else Reason.BEHIND_OTHERS

    def _nodes_to_avoid(self, trial: Waiting, reserved: frozenset[int]) -> frozenset[int]:
        """Return the trial's failed nodes, if another node has as many slots; else none."""
        if not trial.failed_on:
            return trial.failed_on
        others = self._usable.keys() - trial.failed_on - reserved
        has_other = trial.awaits_node or any(
            len(self._usable[node_id]) >= trial.num_slots for node_id in others
        )
        return trial.failed_on & self._usable.keys() if has_other else frozenset()

    @contextmanager
    def _without(self, avoided: frozenset[int]) -> Iterator[None]:
        """Hide some nodes within the context: they offer no usable slots."""
        if not avoided:
            yield
            return
        usable = self._usable
        self._usable = {one: slots for one, slots in usable.items() if one not in avoided}
        try:
            with self._free.without(avoided), self._future.without(avoided):
                yield
        finally:
            self._usable = usable

    def _keep_node(self, trial: Waiting, avoided: frozenset[int]) -> None:
        """Reserve the node with the fewest missing slots for a trial, keeping its place there.

        Those behind it get slots of other nodes, also of those on which it failed.
        """
        others = [
            node_id
            for node_id, slots in self._usable.items()
            if node_id not in avoided and len(slots) >= trial.num_slots
        ]
        # None if it awaits one that is not there.
        for kept in [max(others, key=self._free.num_free)] if others else ():
            self._free.keep(kept)
            self._future.keep(kept)

    def _size_obstacle(self, trial: Waiting, reserved: frozenset[int]) -> Reason | None:
        """Return why a trial of a size gets nothing even if all slots are free."""
        if not self._all.fits_trial(trial):
            return Reason.TOO_LARGE
        now = self._all_now
        if reserved:
            left = [node for node in self._nodes if node.node_id not in reserved]
            if not _undrained(left).fits_trial(trial):
                return Reason.RESERVED
            # A place is on a node that is both: neither closed to the trial nor resting.
            now = _undrained(node for node in left if not node.is_pausing)
        if not now.fits_trial(trial):
            return Reason.PAUSING
        return None

    def _take_slots(self, trial: Waiting) -> list[Part] | None:
        """Take as many free slots as a trial can use; None if there are too few."""
        most = max(trial.num_slots, trial.most_slots)
        if trial.max_slots is not None:
            most = min(most, trial.max_slots - self._used_by[trial.experiment_id])
        most = int(min(most, self._quota_use.room(trial)))
        for num_slots in range(most, trial.num_slots - 1, -1):
            if self._has_room(self._num_used, num_slots):
                parts = self._free.take_for(trial, num_slots)
                if parts is not None:
                    return parts
        return None

    def _make_room(self, trial: Waiting) -> tuple[Holding, ...] | None:
        """Return attempts to preempt, none if leaving attempts suffice; None if futile."""
        num_slots = trial.num_slots
        has_room = self._has_room(self._num_staying, num_slots)
        if has_room and self._future.fits_trial(trial):
            return ()
        preempts = None
        if has_room and self._all.fits_one(num_slots):
            preempts = choose_victims(
                self._candidates(trial), self._future, num_slots, self._usable_of
            )
        # The one node that is large enough may be another's, or held by those that stay.
        can_join = self._future.can_join and not trial.is_task
        if preempts is None and (can_join or not has_room):
            preempts = choose_victims_until(
                self._candidates(trial), lambda chosen: self._suffices(trial, chosen)
            )
        for one in preempts or ():
            self._num_staying -= one.num_slots
            self._free_later(one)
            if one.is_filler:
                self._fillers.remove(one)
        return preempts

    def _suffices(self, trial: Waiting, chosen: Sequence[Holding]) -> bool:
        """Return whether a trial has room, within the pool's limit too, once these have left."""
        freed = sum(one.num_slots for one in chosen)
        if not self._has_room(self._num_staying - freed, trial.num_slots):
            return False
        for one in chosen:
            self._free_later(one)
        is_enough = self._future.fits_trial(trial)
        for one in chosen:
            for part in self._usable_of(one):
                self._future.remove(*part)
        return is_enough

    def _note_placement(self, trial: Waiting, preempts: tuple[Holding, ...]) -> None:
        self._count_use(trial)
        self._num_used += trial.num_slots
        self._num_staying += trial.num_slots
        self._policy.note_given(trial, preempts)

    def _count_use(self, trial: Waiting) -> None:
        """Count a trial that has slots, or is next to get some, in what limits it and others.

        Those behind it, as fillers and in other pools, would else keep its limits used up for ever.
        """
        self._used_by[trial.experiment_id] += trial.num_slots
        self._trials_of[trial.experiment_id] += 1
        self._quota_use.add(trial, trial.num_slots)

    def _has_room(self, num_used: int, num_slots: int) -> bool:
        return self._max_slots is None or num_used + num_slots <= self._max_slots

    def _usable_of(self, one: Holding) -> list[Part]:
        found = []
        for node_id, slots in one.parts:
            usable = self._usable.get(node_id, frozenset())
            found.append((node_id, tuple(slot for slot in slots if slot in usable)))
        return found

    def _free_later(self, one: Holding) -> None:
        for part in self._usable_of(one):
            self._future.add(*part)


def _undrained(nodes: Iterable[NodeSlots]) -> FreeSlots:
    found = FreeSlots()
    for node in nodes:
        found.add(node.node_id, frozenset(node.slots) - node.drained, can_join=node.can_join)
    return found


def _takes_slots(node: NodeSlots) -> bool:
    return node.is_open and not node.is_pausing
