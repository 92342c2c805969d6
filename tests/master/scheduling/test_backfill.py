"""Trials in the gap in front of a large one: no slot idles, and nobody ends later for it."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    Reason,
    Waiting,
)
from paceline._cluster.master.scheduling.schedule import decide, schedule


def trial(number: int, num_slots: int, priority: int = 42) -> Waiting:
    return Waiting(
        trial_id=number, experiment_id=number, num_slots=num_slots, max_slots=None,
        priority=priority, queue_place=number,
    )  # fmt: skip


@dataclass
class Machine:
    """A pool of one node whose trials come, run for some ticks, and resume where they were."""

    num_slots: int
    settings: PoolSettings
    waiting: list[Waiting] = field(default_factory=list)
    holding: dict[int, tuple[Waiting, Holding]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    num_attempts: int = 0
    num_idle: int = 0

    def settle(self) -> None:
        """Schedule until nothing changes; who is asked to leave leaves at once."""
        nodes = [NodeSlots(slots=tuple(range(self.num_slots)))]
        for _ in range(200):
            held = [one for _, one in self.holding.values()]
            plan = schedule(self.waiting, held, nodes, {"default": self.settings})
            if not plan.assignments and not plan.preemptions:
                return
            for one, _ in plan.preemptions:
                self.waiting.append(self.holding.pop(one.attempt_id)[0])
            by_id = {one.trial_id: one for one in self.waiting}
            for given_ in plan.assignments:
                self.num_attempts += 1
                began = by_id.pop(given_.trial_id)
                self.holding[self.num_attempts] = began, Holding(
                    experiment_id=began.experiment_id, slots=given_.slots,
                    attempt_id=self.num_attempts, priority=began.priority,
                    queue_place=began.queue_place, is_filler=given_.is_filler,
                )  # fmt: skip
            self.waiting = sorted(by_id.values(), key=lambda one: one.queue_place)
        pytest.fail("The schedule never came to rest.")

    def run(self, arrivals: list[tuple[int, Waiting, int]]) -> None:
        """Let trials arrive at their ticks and train them all to their ends."""
        arrivals = sorted(arrivals, key=lambda one: (one[0], one[1].trial_id))
        for now in range(10_000):
            while arrivals and arrivals[0][0] <= now:
                _, one, length = arrivals.pop(0)
                self.waiting.append(one)
                self.left[one.trial_id] = length
            self.settle()
            free = self.num_slots - sum(one.num_slots for _, one in self.holding.values())
            self.num_idle += any(one.num_slots <= free for one in self.waiting)
            for attempt_id, (one, _) in list(self.holding.items()):
                self.left[one.trial_id] -= 1
                if not self.left[one.trial_id]:
                    self.ends[one.trial_id] = now
                    del self.holding[attempt_id]
            if not arrivals and not self.waiting and not self.holding:
                return


workloads = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 42])),
    min_size=1,
    max_size=14,
)


@given(workloads, st.integers(2, 6), st.sampled_from([PolicyName.FIFO, PolicyName.PRIORITY]))
def test_no_trial_ends_later_and_no_slot_idles_that_a_waiting_trial_could_use(
    load: list[tuple[int, int, int, int]], num_slots: int, policy: PolicyName
) -> None:
    load.sort()
    arrivals = [
        (at, trial(number, min(size, num_slots), priority), length)
        for number, (at, size, length, priority) in enumerate(load, 1)
    ]
    plain = Machine(num_slots, PoolSettings(policy=policy))
    filled = Machine(num_slots, PoolSettings(policy=policy, backfill=True))
    plain.run(arrivals)
    filled.run(arrivals)
    assert filled.num_idle == 0
    assert filled.ends.keys() == plain.ends.keys()
    if policy is PolicyName.FIFO:
        assert all(filled.ends[one] <= plain.ends[one] for one in plain.ends)


def test_fillers_leave_for_the_trial_in_front_and_for_no_other() -> None:
    nodes = [NodeSlots(slots=(0, 1, 2))]
    pools = {"default": PoolSettings(backfill=True)}
    ordinary = Holding(experiment_id=1, slots=(0,), attempt_id=1, queue_place=1)
    large, small, later = trial(2, 3), trial(3, 1), trial(4, 2)
    first, second, third = decide([large, small, later], [ordinary], nodes, pools)
    assert first.reason is Reason.SLOTS_IN_USE
    assert (second.slots, second.is_filler) == ((1,), True)
    assert third.reason is Reason.BEHIND_OTHERS
    filler = Holding(experiment_id=3, slots=(1,), attempt_id=2, queue_place=3, is_filler=True)
    # The later one, alone in the queue, waits for the filler's end.
    [alone] = decide([later], [ordinary, filler], nodes, pools)
    assert (alone.reason, alone.preempts) == (Reason.SLOTS_IN_USE, ())
    # The filler stays while the large one would not fit with its slot.
    [still, *_] = decide([large], [ordinary, filler], nodes, pools)
    assert still.reason is Reason.SLOTS_IN_USE
    [now, *_] = decide([large], [filler], nodes, pools)
    assert (now.reason, now.preempts) == (Reason.PREEMPTING, (filler,))
    # Nobody takes what the large one is about to get.
    leaving = replace(filler, is_leaving=True)
    asked, behind = decide([large, small], [leaving], nodes, pools)
    assert (asked.reason, asked.preempts) == (Reason.PREEMPTING, ())
    assert not behind.slots


def test_interactive_work_fills_no_gap_as_it_would_lose_its_state() -> None:
    nodes = [NodeSlots(slots=(0, 1, 2))]
    pools = {"default": PoolSettings(backfill=True)}
    holder = Holding(experiment_id=1, slots=(0,), attempt_id=1, queue_place=1)
    task = replace(trial(3, 1), is_task=True)
    _, waits, fills = decide([trial(2, 3), task, trial(4, 1)], [holder], nodes, pools)
    assert (waits.slots, waits.reason) == ((), Reason.BEHIND_OTHERS)
    assert fills.is_filler


def test_interactive_work_has_all_its_slots_on_one_node() -> None:
    nodes = [NodeSlots(node_id=number, slots=tuple(range(4)), can_join=True) for number in (1, 2)]
    held = [
        Holding(experiment_id=9, slots=(0, 1), node_id=one, attempt_id=one, queue_place=one)
        for one in (1, 2)
    ]
    [both] = decide([trial(3, 4)], held, nodes)
    assert [both.node_id, *(node for node, _ in both.others)] == [1, 2]
    task = replace(trial(3, 4), is_task=True)
    [waits] = decide([task], held, nodes)
    assert (waits.slots, waits.reason) == ((), Reason.SLOTS_IN_USE)
    [starts] = decide([task], held[1:], nodes)
    assert (starts.node_id, starts.slots, starts.others) == (1, (0, 1, 2, 3), ())
    # A pool that preempts makes room on one node, and does not count halves of two.
    pools = {"default": PoolSettings(policy=PolicyName.PRIORITY)}
    urgent = replace(task, priority=1)
    [preempts] = decide([urgent], held, nodes, pools)
    assert preempts.reason is Reason.PREEMPTING
    assert len(preempts.preempts) == 1


def test_nothing_fills_a_gap_unless_the_pool_says_so() -> None:
    nodes = [NodeSlots(slots=(0, 1, 2))]
    holder = Holding(experiment_id=1, slots=(0,), attempt_id=1, queue_place=1)
    _, small = decide([trial(2, 3), trial(3, 1)], [holder], nodes)
    assert small.reason is Reason.BEHIND_OTHERS


def test_a_long_queue_is_not_read_to_its_end_for_a_gap() -> None:
    read = []

    def waiting():
        for number in range(2, 100_000):
            read.append(number)
            yield trial(number, 3)

    holder = Holding(experiment_id=1, slots=(0,), attempt_id=1, queue_place=1)
    pools = {"default": PoolSettings(backfill=True)}
    assert not schedule(waiting(), [holder], [NodeSlots(slots=(0, 1, 2))], pools).assignments
    assert len(read) < 1000


def test_fillers_leave_for_a_trial_on_several_nodes_if_the_one_large_node_is_not_for_it() -> None:
    """It is another user's own, or rests: the trial does not wait for it."""
    pools = {"default": PoolSettings(backfill=True)}
    filler = Holding(
        experiment_id=3, slots=(0,), node_id=3, attempt_id=2, queue_place=3, is_filler=True
    )
    for large in (
        NodeSlots(node_id=2, slots=(0, 1, 2), can_join=True, is_owners=True, owner="eve"),
        NodeSlots(node_id=2, slots=(0, 1, 2), can_join=True, is_pausing=True),
    ):
        nodes = [NodeSlots(node_id=n, slots=(0,), can_join=True) for n in (1, 3)] + [large]
        [result] = decide([trial(2, 2)], [filler], nodes, pools)
        assert (result.reason, result.preempts) == (Reason.PREEMPTING, (filler,))
