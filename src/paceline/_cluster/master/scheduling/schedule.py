"""Give free slots to waiting trials, pool by pool, as the pool's policy says."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from paceline._cluster.master.scheduling.pool_policies import POLICIES
from paceline._cluster.master.scheduling.pools import (
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
from paceline._cluster.master.scheduling.slot_placement import (
    FreeSlots,
    choose_victims,
    choose_victims_until,
)

_NO_POOLS: Mapping[str, PoolSettings] = {}
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
) -> Schedule:
    """Decide who starts now and who must leave; no more of `waiting` is read than is needed."""
    found = Schedule(assignments=[], preemptions=[])
    # Nothing more can be given once each pool is held up.
    open_pools = {node.pool for node in nodes}
    for result in decide(waiting, holding, nodes, pools):
        trial = result.waiting
        if result.slots:
            found.assignments.append(
                SlotAssignment(
                    trial_id=trial.trial_id,
                    slots=result.slots,
                    node_id=result.node_id,
                    others=result.others,
                )
            )
        found.preemptions.extend((one, trial) for one in result.preempts)
        if result.reason in (Reason.SLOTS_IN_USE, Reason.POOL_LIMIT):
            open_pools.discard(trial.pool)
            if not open_pools:
                break
    return found


def decide(
    waiting: Iterable[Waiting],
    holding: Iterable[Holding],
    nodes: Sequence[NodeSlots],
    pools: Mapping[str, PoolSettings] = _NO_POOLS,
) -> Iterator[SchedulingResult]:
    """Yield each waiting trial's result: its slots, or the reason for waiting.

    The trials of one pool come in the order in which they get slots. A trial that does not fit
    holds up the trials of its pool behind it, so that a large one is never starved by small ones;
    a trial that only its experiment's own limit of slots or trials holds back does not, and neither
    does a trial too large for all nodes of its pool (which may have shrunk). A trial that waits for
    another node than that of its failure holds up one node.
    """
    holding = list(holding)
    used_by: Counter[int] = Counter()
    trials_of: Counter[int] = Counter()
    for holder in holding:
        used_by[holder.experiment_id] += holder.num_slots
        trials_of[holder.experiment_id] += 1
    nodes_of, holding_of = _by_pool(nodes, holding)
    # Queues for pools with waiting trials only: other pools need no work.
    queues: dict[str, _PoolSchedule] = {}
    collected: dict[str, list[Waiting]] = defaultdict(list)
    for trial in waiting:
        queue = queues.get(trial.pool)
        if queue is None:
            own = nodes_of.get(trial.pool, [])
            settings = pools.get(trial.pool) if own else None
            queue = queues[trial.pool] = _PoolSchedule(
                settings or PoolSettings(), holding_of.get(trial.pool, []), own, used_by, trials_of
            )
        if queue.is_fifo:
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
        holding: Sequence[Holding],
        nodes: Sequence[NodeSlots],
        used_by: Counter[int],
        trials_of: Counter[int],
    ) -> None:
        self.is_fifo = settings.policy is PolicyName.FIFO
        self._policy = POLICIES[settings.policy](holding)
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
        # Sizes for which all nodes, if they were free, are found to be too small or large enough.
        self._obstacles: dict[tuple[int, bool], Reason | None] = {}
        self._place = 0
        self._behind: Waiting | None = None
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
                if not self.is_fifo:
                    self._future.add(node.node_id, free, can_join=node.can_join)
        if not self.is_fifo:
            for one in holding:
                if one.is_leaving:
                    self._free_later(one)

    def judge_all(self, waiting: Sequence[Waiting]) -> Iterator[SchedulingResult]:
        """Yield each trial's result, in the order of the pool's policy."""
        for trial in self._policy.order(waiting):
            yield self.judge(trial)

    def judge(self, trial: Waiting) -> SchedulingResult:
        """Return the result for the next trial."""
        place = self._place
        self._place += 1
        reason = self._obstacle(trial)
        if reason is not None:
            behind = self._behind if reason is Reason.BEHIND_OTHERS else None
            return SchedulingResult(waiting=trial, reason=reason, place=place, behind=behind)
        avoided = self._nodes_to_avoid(trial)
        with self._without(avoided):
            parts = self._take_slots(trial)
            preempts = None if parts is not None or self.is_fifo else self._make_room(trial)
            if preempts is not None:
                # Free slots usable later by the trial are reserved until the rest is free.
                for part in (
                    self._future.take(trial.num_slots, allow_uneven=trial.allow_uneven) or ()
                ):
                    self._free.remove(*part)
        if parts is not None:
            for part in parts:
                self._future.remove(*part)
            num_slots = sum(len(slots) for _, slots in parts)
            is_larger = num_slots != trial.num_slots
            self._note_placement(replace(trial, num_slots=num_slots) if is_larger else trial, ())
            (node_id, slots), *others = parts
            return SchedulingResult(
                waiting=trial, slots=slots, node_id=node_id, others=tuple(others), place=place
            )
        if preempts is None:
            is_full = not self._has_room(self._num_used, trial.num_slots)
            if avoided and not is_full:
                self._keep_node(trial, avoided)
                return SchedulingResult(waiting=trial, reason=Reason.ELSEWHERE, place=place)
            self._behind = trial
            reason = Reason.POOL_LIMIT if is_full else Reason.SLOTS_IN_USE
            return SchedulingResult(waiting=trial, reason=reason, place=place)
        self._note_placement(trial, preempts)
        return SchedulingResult(
            waiting=trial, reason=Reason.PREEMPTING, place=place, preempts=preempts
        )

    def _obstacle(self, trial: Waiting) -> Reason | None:
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
        size = (trial.num_slots, trial.allow_uneven)
        if size not in self._obstacles:
            self._obstacles[size] = self._size_obstacle(*size)
        if (reason := self._obstacles[size]) is not None:
            return reason
        return None if self._behind is None else Reason.BEHIND_OTHERS

    def _nodes_to_avoid(self, trial: Waiting) -> frozenset[int]:
        """Return the trial's failed nodes, if another node has as many slots; else none."""
        if not trial.failed_on:
            return trial.failed_on
        others = self._usable.keys() - trial.failed_on
        has_other = trial.awaits_node or any(
            len(self._usable[node_id]) >= trial.num_slots for node_id in others
        )
        return trial.failed_on & self._usable.keys() if has_other else frozenset()

    @contextmanager
    def _without(self, avoided: frozenset[int]) -> Iterator[None]:
        """Hide some nodes within the context: they offer no usable slots."""
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

    def _size_obstacle(self, num_slots: int, allow_uneven: bool) -> Reason | None:
        """Return why a trial of a size gets nothing even if all slots are free."""
        if not self._all.fits(num_slots, allow_uneven=allow_uneven):
            return Reason.TOO_LARGE
        if not self._all_now.fits(num_slots, allow_uneven=allow_uneven):
            return Reason.PAUSING
        return None

    def _take_slots(self, trial: Waiting) -> list[Part] | None:
        """Take as many free slots as a trial can use; None if there are too few."""
        most = max(trial.num_slots, trial.most_slots)
        if trial.max_slots is not None:
            most = min(most, trial.max_slots - self._used_by[trial.experiment_id])
        for num_slots in range(most, trial.num_slots - 1, -1):
            if self._has_room(self._num_used, num_slots):
                parts = self._free.take(num_slots, allow_uneven=trial.allow_uneven)
                if parts is not None:
                    return parts
        return None

    def _make_room(self, trial: Waiting) -> tuple[Holding, ...] | None:
        """Return attempts to preempt, none if leaving attempts suffice; None if futile."""
        num_slots = trial.num_slots
        has_room = self._has_room(self._num_staying, num_slots)
        if has_room and self._future.fits(num_slots, allow_uneven=trial.allow_uneven):
            return ()
        if has_room and self._all.fits_one(num_slots):
            preempts = choose_victims(
                self._policy.candidates(trial), self._future, num_slots, self._usable_of
            )
        else:
            preempts = choose_victims_until(
                self._policy.candidates(trial), lambda chosen: self._suffices(trial, chosen)
            )
        for one in preempts or ():
            self._num_staying -= one.num_slots
            self._free_later(one)
        return preempts

    def _suffices(self, trial: Waiting, chosen: Sequence[Holding]) -> bool:
        """Return whether a trial has room, within the pool's limit too, once these have left."""
        freed = sum(one.num_slots for one in chosen)
        if not self._has_room(self._num_staying - freed, trial.num_slots):
            return False
        for one in chosen:
            self._free_later(one)
        is_enough = self._future.fits(trial.num_slots, allow_uneven=trial.allow_uneven)
        for one in chosen:
            for part in self._usable_of(one):
                self._future.remove(*part)
        return is_enough

    def _note_placement(self, trial: Waiting, preempts: tuple[Holding, ...]) -> None:
        self._used_by[trial.experiment_id] += trial.num_slots
        self._trials_of[trial.experiment_id] += 1
        self._num_used += trial.num_slots
        self._num_staying += trial.num_slots
        self._policy.note_given(trial, preempts)

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
