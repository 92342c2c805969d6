"""Trials that come, run, make room and end in simulated time, under any rule of scheduling.

Two rules are here: Paceline's, and the priority scheduler of Determined 0.38 as a pure function.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from paceline._cluster.master.scheduling.pool_policies import (
    NO_SHARING,
    Sharing,
    as_slots,
    faded,
    recent_use,
)
from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    Part,
    PoolSettings,
    SlotAssignment,
    Waiting,
)
from paceline._cluster.master.scheduling.schedule import Schedule, schedule

Rule = Callable[[Sequence[Waiting], Sequence[Holding], Sequence[NodeSlots], Sharing], Schedule]


def ours(settings: PoolSettings) -> Rule:
    """Return Paceline's rule for one pool."""
    pools = {"default": settings}
    return lambda waiting, holding, nodes, sharing: schedule(
        waiting, holding, nodes, pools, sharing
    )


@dataclass(frozen=True, slots=True)
class Job:
    """Trial that comes at a time and trains for some seconds on its slots."""

    at: float
    trial: Waiting
    length_s: float


@dataclass
class Simulation:
    """Cluster in simulated time.

    Args:
        nodes: The nodes, which `change_nodes` may replace.
        rule: Who starts and who leaves.
        sharing: Weights, quotas and groups.
        leaving_s: How long an attempt that is asked to leave keeps its slots: its checkpoint.
        half_life_s: The half-life of past use; None is none.
        after: Called each time after slots were given.
    """

    nodes: Sequence[NodeSlots]
    rule: Rule
    sharing: Sharing = NO_SHARING
    leaving_s: float = 0.0
    half_life_s: float | None = None
    now: float = 0.0
    waiting: dict[int, Waiting] = field(default_factory=dict)
    running: dict[int, Holding] = field(default_factory=dict)
    trial_of: dict[int, Waiting] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    num_preempted: int = 0
    after: Callable[[], None] = lambda: None
    useful_slot_s: float = 0.0

    def __post_init__(self) -> None:
        self.left_s: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = count(1)
        self._use: dict[str, tuple[float, float]] = {}
        self._served: dict[str, float] = {}
        self._served_experiment: dict[int, float] = {}

    def add(self, jobs: Iterable[Job]) -> None:
        """Let trials come at their times."""
        for job in jobs:
            self._push(job.at, "come", job)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call something at a time, before the trials of this time are given slots."""
        self._push(at, "call", call)

    def steps(self) -> Iterator[float]:
        """Yield each time at which something has happened, before and after slots are given."""
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                _, _, kind, what = heapq.heappop(self._events)
                self._happen(kind, what)
            yield self.now
            self.settle()

    def run(self) -> None:
        """Train everything to its end."""
        for _ in self.steps():
            pass

    def queue(self) -> list[Waiting]:
        """Return the waiting trials in order of arrival."""
        served = self._served_experiment
        return [
            replace(one, last_served=served.get(one.experiment_id, 0.0))
            for one in sorted(self.waiting.values(), key=lambda one: one.queue_place)
        ]

    def shares(self) -> Sharing:
        """Return weights, past use, quotas and groups at this moment."""
        served, past = dict(self._served), {}
        if self.half_life_s is not None:
            for user, (use, at) in self._use.items():
                past[user] = as_slots(faded(use, at, self.now, self.half_life_s), self.half_life_s)
            for one in self.running.values():
                recent_s = recent_use(one.num_slots, one.since, self.now, self.half_life_s)
                past[one.user] = past.get(one.user, 0.0) + as_slots(recent_s, self.half_life_s)
        for user, group in self.sharing.groups.items():
            served[group] = max(served.get(group, 0.0), served.get(user, 0.0))
            past[group] = past.get(group, 0.0) + past.get(user, 0.0)
        return replace(self.sharing, past={"default": past}, served={"default": served})

    # ---- parts of a step --------------------------------------------------------------------

    def _push(self, at: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, what))

    def _happen(self, kind: str, what: object) -> None:
        if kind == "come":
            assert isinstance(what, Job)
            self.waiting[what.trial.trial_id] = what.trial
            self.left_s[what.trial.trial_id] = what.length_s
        elif kind == "call":
            assert callable(what)
            what()
        elif kind == "end" and what in self.running and not self.running[what].is_leaving:
            trial = self._take_off(what)
            self.ended[trial.trial_id] = self.now
        elif kind == "leave":
            trial = self._take_off(what)
            self.waiting[trial.trial_id] = trial

    def _take_off(self, attempt_id: object) -> Waiting:
        assert isinstance(attempt_id, int)
        one, trial = self.running.pop(attempt_id), self.trial_of.pop(attempt_id)
        if not one.is_leaving:
            self._note_work(one, trial)
        if not one.is_filler:
            self._served[one.user] = self.now
        if self.half_life_s is not None:
            before, at = self._use.get(one.user, (0.0, self.now))
            recent_s = recent_use(one.num_slots, one.since, self.now, self.half_life_s)
            use = faded(before, at, self.now, self.half_life_s) + recent_s
            self._use[one.user] = (use, self.now)
        return trial

    def _note_work(self, one: Holding, trial: Waiting) -> None:
        worked_s = self.now - one.since
        self.left_s[trial.trial_id] -= worked_s
        self.useful_slot_s += one.num_slots * worked_s

    def leave(self, attempt_id: int) -> None:
        """Ask an attempt to leave: it stores its work, and waits again once it has left."""
        one = self.running[attempt_id]
        if not one.is_leaving:
            self._note_work(one, self.trial_of[attempt_id])
            self.running[attempt_id] = replace(one, is_leaving=True)
            self._push(self.now + self.leaving_s, "leave", attempt_id)

    def settle(self) -> None:
        """Give slots, and ask attempts to leave, as the rule says for now."""
        plan = self.rule(self.queue(), list(self.running.values()), self.nodes, self.shares())
        for one, _ in plan.preemptions:
            self.num_preempted += 1
            self.leave(one.attempt_id)
        for given in plan.assignments:
            trial, attempt_id = self.waiting.pop(given.trial_id), next(self._numbers)
            self.trial_of[attempt_id] = trial
            self._served_experiment[trial.experiment_id] = self.now
            self.began.setdefault(trial.trial_id, self.now)
            self.running[attempt_id] = Holding(
                experiment_id=trial.experiment_id, attempt_id=attempt_id, slots=given.slots,
                node_id=given.node_id, others=given.others, priority=trial.priority,
                weight=trial.weight, queue_place=trial.queue_place, is_filler=given.is_filler,
                user=trial.user, project=trial.project, since=self.now,
                is_interactive=trial.is_interactive,
            )  # fmt: skip
            self._push(self.now + self.left_s[trial.trial_id], "end", attempt_id)
        self.after()


# ---- Determined's priority scheduler -----------------------------------------------------------


def determined(*, preempts: bool = False) -> Rule:
    """Return the rule of Determined's priority scheduler, the default of its pools."""

    def rule(
        waiting: Sequence[Waiting],
        holding: Sequence[Holding],
        nodes: Sequence[NodeSlots],
        sharing: Sharing,
    ) -> Schedule:
        del sharing
        return _DeterminedPass(holding, nodes, preempts).plan(waiting)

    return rule


class _DeterminedPass:
    """One pass over the queue, on a copy of the agents.

    Its steps are those of `agentrm/priority.go` and `fitting.go` of Determined 0.38, without tasks
    of zero slots and without the flag for uneven fits: nobody's trials here have either.
    """

    def __init__(
        self, holding: Sequence[Holding], nodes: Sequence[NodeSlots], preempts: bool
    ) -> None:
        self._holding, self._preempts = list(holding), preempts
        self._all = {node.node_id: len(set(node.slots) - node.drained) for node in nodes}
        self._free: dict[int, list[int]] = {
            node.node_id: sorted(set(node.slots) - node.drained) for node in nodes if node.is_open
        }
        for one in holding:
            for node_id, slots in one.parts:
                if node_id in self._free:
                    left = [slot for slot in self._free[node_id] if slot not in slots]
                    self._free[node_id] = left
        self._released: list[tuple[Holding, Waiting]] = []

    def plan(self, waiting: Sequence[Waiting]) -> Schedule:
        """Return who starts, and who is released."""
        started: list[SlotAssignment] = []
        is_backfilling = False
        for priority in sorted({one.priority for one in waiting}):
            is_any_left = False
            for trial in waiting:
                if trial.priority != priority:
                    continue
                parts = self._fit(trial.num_slots, self._free)
                if parts is None:
                    is_any_left = True
                    if self._preempts:
                        self._make_room(trial)
                    continue
                self._take(parts)
                if not self._released and (self._preempts or not is_backfilling):
                    (node_id, slots), *others = parts
                    started.append(
                        SlotAssignment(trial_id=trial.trial_id, slots=slots, node_id=node_id,
                                       others=tuple(others))
                    )  # fmt: skip
            is_backfilling = is_backfilling or is_any_left
        return Schedule(assignments=started, preemptions=self._released)

    def _make_room(self, trial: Waiting) -> None:
        """Release the least important, newest first, down to the trial's own priority."""
        future = {node_id: list(slots) for node_id, slots in self._free.items()}
        gone = {one.attempt_id for one, _ in self._released}
        for one in self._holding:
            if one.is_leaving or one.attempt_id in gone:
                self._give_back(one, future)
        if (parts := self._fit(trial.num_slots, future)) is not None:
            # Earlier releases suffice; they are kept for it.
            self._take(parts)
            return
        chosen: list[Holding] = []
        for one in sorted(self._holding, key=lambda one: (-one.priority, -one.attempt_id)):
            is_behind = one.priority == trial.priority and one.queue_place > trial.queue_place
            if one.is_leaving or one.attempt_id in gone:
                continue
            if one.priority > trial.priority or is_behind:
                chosen.append(one)
                self._give_back(one, future)
                if (parts := self._fit(trial.num_slots, future)) is not None:
                    self._take(parts)
                    self._released += [(other, trial) for other in chosen]
                    return

    def _give_back(self, one: Holding, free: dict[int, list[int]]) -> None:
        for node_id, slots in one.parts:
            if node_id in free:
                free[node_id] = sorted({*free[node_id], *slots})

    def _take(self, parts: Sequence[Part]) -> None:
        for node_id, slots in parts:
            self._free[node_id] = [one for one in self._free[node_id] if one not in slots]

    def _fit(self, num_slots: int, free: Mapping[int, Sequence[int]]) -> list[Part] | None:
        """Return slots of the agent that fits best, else of idle agents of one size."""
        fitting = [(len(slots), node_id) for node_id, slots in free.items()]
        if one := min((one for one in fitting if one[0] >= num_slots), default=None):
            return [(one[1], tuple(free[one[1]][:num_slots]))]
        idle: dict[int, list[int]] = {}
        for size, node_id in fitting:
            if size and size == self._all[node_id]:
                idle.setdefault(size, []).append(node_id)
        for size in sorted(idle, reverse=True):
            if num_slots % size == 0 and num_slots // size <= len(idle[size]):
                return [(one, tuple(free[one])) for one in idle[size][: num_slots // size]]
        return None
