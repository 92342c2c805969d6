"""Policies of pools: what holds of each schedule, whatever the situation."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline._cluster.master.scheduling.pool_policies import QuotaUse, moved
from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    Reason,
    SchedulingResult,
    StartEstimates,
    Waiting,
    in_pools,
    needs_of,
)
from paceline._cluster.master.scheduling.schedule import decide, schedule

FIFO, PRIORITY, FAIR_SHARE = PolicyName.FIFO, PolicyName.PRIORITY, PolicyName.FAIR_SHARE


@dataclass(frozen=True)
class Situation:
    """A cluster with one pool, and who wants and has its slots."""

    waiting: tuple[Waiting, ...]
    holding: tuple[Holding, ...]
    nodes: tuple[NodeSlots, ...]
    settings: PoolSettings

    @property
    def pools(self) -> dict[str, PoolSettings]:
        return {"default": self.settings}

    def results(self) -> list[SchedulingResult]:
        return list(decide(self.waiting, self.holding, self.nodes, self.pools))

    def after(self) -> "Situation":
        """Return what is there once the schedule was carried out and nobody has left yet."""
        plan = schedule(self.waiting, self.holding, self.nodes, self.pools)
        by_id = {trial.trial_id: trial for trial in self.waiting}
        leaving = {one.attempt_id for one, _ in plan.preemptions}
        newest = max((one.attempt_id for one in self.holding), default=0)
        holding = [
            replace(one, is_leaving=one.is_leaving or one.attempt_id in leaving)
            for one in self.holding
        ]
        for number, given_ in enumerate(plan.assignments, newest + 1):
            trial = by_id.pop(given_.trial_id)
            holding.append(
                Holding(
                    experiment_id=trial.experiment_id, slots=given_.slots, attempt_id=number,
                    node_id=given_.node_id, priority=trial.priority, weight=trial.weight,
                    queue_place=trial.queue_place, is_filler=given_.is_filler,
                )
            )  # fmt: skip
        return replace(self, waiting=tuple(by_id.values()), holding=tuple(holding))

    def left(self) -> "Situation":
        """Return what is there once all that are leaving have left: their trials wait again."""
        again = [
            Waiting(
                trial_id=10_000 + one.attempt_id, experiment_id=one.experiment_id,
                num_slots=len(one.slots), max_slots=None, priority=one.priority, weight=one.weight,
                queue_place=one.queue_place,
            )
            for one in self.holding
            if one.is_leaving
        ]  # fmt: skip
        staying = tuple(one for one in self.holding if not one.is_leaving)
        return replace(self, waiting=(*self.waiting, *again), holding=staying)


@st.composite
def situations(draw: st.DrawFn, policy: PolicyName | None = None) -> Situation:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    drained = [draw(st.integers(0, 9)) == 0 for _ in range(sum(sizes))]
    nodes, number = [], 0
    for node_id, size in enumerate(sizes):
        gone = frozenset(slot for slot in range(size) if drained[number + slot])
        is_open = draw(st.integers(0, 9)) > 0
        nodes.append(
            NodeSlots(node_id=node_id, slots=tuple(range(size)), is_open=is_open, drained=gone)
        )
        number += size
    # An experiment's trials are all of one size, and share its limit, its priority and its weight.
    kinds = [
        (
            draw(st.integers(1, 3)),
            draw(st.none() | st.integers(3, 8)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([0.5, 1.0, 3.0])),
            float(draw(st.integers(0, 3))),
        )
        for _ in range(4)
    ]
    holding, free = [], {node.node_id: list(node.slots) for node in nodes}
    for attempt_id in range(1, draw(st.integers(0, 8)) + 1):
        experiment_id = draw(st.integers(1, 4))
        num_slots, limit, priority, weight, _ = kinds[experiment_id - 1]
        places = [node_id for node_id, slots in free.items() if len(slots) >= num_slots]
        in_use = sum(len(one.slots) for one in holding if one.experiment_id == experiment_id)
        if not places or (limit is not None and in_use + num_slots > limit):
            continue
        node_id = draw(st.sampled_from(places))
        slots = tuple(free[node_id][:num_slots])
        del free[node_id][:num_slots]
        holding.append(
            Holding(
                experiment_id=experiment_id, slots=slots, node_id=node_id, attempt_id=attempt_id,
                priority=priority, weight=weight, is_leaving=draw(st.integers(0, 5)) == 0,
            )
        )  # fmt: skip
    waiting = []
    for trial_id in range(1, draw(st.integers(0, 8)) + 1):
        experiment_id = draw(st.integers(1, 4))
        num_slots, limit, priority, weight, served = kinds[experiment_id - 1]
        waiting.append(
            Waiting(
                trial_id=trial_id, experiment_id=experiment_id, num_slots=num_slots,
                max_slots=limit, priority=priority, weight=weight, last_served=served,
                queue_place=trial_id,
            )
        )  # fmt: skip
    used = sum(len(one.slots) for one in holding)
    room = draw(st.none() | st.integers(max(used, 1), max(used, 1) + 6))
    settings = PoolSettings(
        policy=policy or draw(st.sampled_from(PolicyName)), max_slots=room,
        backfill=draw(st.booleans()),
    )  # fmt: skip
    return Situation(tuple(waiting), tuple(holding), tuple(nodes), settings)


@st.composite
def situations_after_failures(draw: st.DrawFn) -> Situation:
    """Return situations in which trials have failed on some of the nodes."""
    situation = draw(situations())
    node_ids = st.frozensets(st.sampled_from([node.node_id for node in situation.nodes]))
    waiting = tuple(replace(one, failed_on=draw(node_ids)) for one in situation.waiting)
    return replace(situation, waiting=waiting)


@given(situations_after_failures())
def test_a_trial_that_waits_for_another_node_holds_its_place_there(situation: Situation) -> None:
    usable = {
        node.node_id: set(node.slots) - node.drained for node in situation.nodes if node.is_open
    }
    results = situation.results()
    for number, result in enumerate(results):
        trial = result.waiting
        others = [
            node_id
            for node_id, slots in usable.items()
            if node_id not in trial.failed_on and len(slots) >= trial.num_slots
        ]
        if others:
            # It does not go where it failed, nor does it make others leave there.
            assert result.node_id in others or not result.slots
            assert all(
                any(part[0] not in trial.failed_on for part in one.parts) for one in result.preempts
            )
        if result.reason is Reason.ELSEWHERE:
            taken = {one.node_id for one in results[number + 1 :] if one.slots}
            assert set(others) - taken, "all nodes that it waits for are given to those behind"


@pytest.mark.parametrize("policy", PolicyName)
def test_a_large_trial_that_failed_on_one_node_starts_on_another_one(policy: PolicyName) -> None:
    """Small ones keep coming, and get the slots of the node on which it failed."""
    nodes = (NodeSlots(node_id=1, slots=(0, 1, 2, 3)), NodeSlots(node_id=2, slots=(0, 1, 2, 3)))
    large = Waiting(
        trial_id=1, experiment_id=1, num_slots=4, max_slots=None, priority=1,
        failed_on=frozenset({1}),
    )  # fmt: skip
    small = tuple(
        Waiting(trial_id=10 + n, experiment_id=2, num_slots=1, max_slots=None, priority=99)
        for n in range(40)
    )
    holding = tuple(
        Holding(experiment_id=2, slots=(slot,), node_id=2, attempt_id=slot + 1, priority=99)
        for slot in range(4)
    )
    situation = Situation((large, *small), holding, nodes, PoolSettings(policy=policy))
    started: list[int] = []
    for _ in range(8):
        after = situation.after()
        started += [one.node_id for one in after.holding if one.experiment_id == 1]
        if started:
            break
        # Each round the attempt of node 2 that began first ends, and all that are leaving leave.
        oldest = next(one for one in after.holding if one.node_id == 2)
        staying = [one for one in after.holding if one is not oldest and not one.is_leaving]
        situation = replace(after, holding=tuple(staying))
    assert started == [2]
    assert sum(one.node_id == 1 for one in after.holding) == 4


@pytest.mark.parametrize("drained", ["slots", "node"])
def test_drained_slots_are_not_counted_on_for_a_group(drained: str) -> None:
    """It needs more than is left, and holds up nobody."""
    nodes = (
        NodeSlots(node_id=1, slots=(0, 1), can_join=True),
        NodeSlots(
            node_id=2, slots=(0, 1), can_join=True, drained=frozenset({0, 1}),
            is_open=drained == "slots",
        ),
    )  # fmt: skip
    group = Waiting(trial_id=1, experiment_id=1, num_slots=4, max_slots=None)
    small = Waiting(trial_id=2, experiment_id=2, num_slots=1, max_slots=None)
    first, second = decide([group, small], [], nodes)
    assert first.reason is Reason.TOO_LARGE
    assert (second.node_id, second.slots) == (1, (0,))


@given(situations())
def test_no_slot_is_given_twice_and_no_limit_exceeded(situation: Situation) -> None:
    after = situation.after()
    used = [(one.node_id, slot) for one in after.holding for slot in one.slots]
    assert len(used) == len(set(used))
    if situation.settings.max_slots is not None:
        assert len(used) <= situation.settings.max_slots
    new = after.holding[len(situation.holding) :]
    nodes = {node.node_id: node for node in situation.nodes}
    for one in new:
        assert nodes[one.node_id].is_open
        assert not nodes[one.node_id].drained & set(one.slots)
        assert set(one.slots) <= set(nodes[one.node_id].slots)
    in_use: Counter[int] = Counter()
    for one in after.holding:
        in_use[one.experiment_id] += len(one.slots)
    for trial in situation.waiting:
        assert trial.max_slots is None or in_use[trial.experiment_id] <= trial.max_slots


@given(situations())
def test_each_waiting_trial_gets_one_result_and_a_reason_if_it_gets_nothing(
    situation: Situation,
) -> None:
    results = situation.results()
    assert sorted(one.waiting.trial_id for one in results) == [
        trial.trial_id for trial in situation.waiting
    ]
    assert [one.place for one in results] == list(range(len(results)))
    for number, one in enumerate(results):
        assert (one.reason is None) == bool(one.slots)
        assert bool(one.behind) == (one.reason is Reason.BEHIND_OTHERS)
        if one.behind is not None:
            earlier = [other.waiting for other in results[:number]]
            assert one.behind in earlier
        assert not one.preempts or one.reason is Reason.PREEMPTING


@given(situations())
def test_nothing_changes_when_nothing_changes(situation: Situation) -> None:
    after = situation.after()
    again = schedule(after.waiting, after.holding, after.nodes, after.pools)
    assert (again.assignments, again.preemptions) == ([], [])


@given(situations())
def test_who_was_preempted_and_waits_again_preempts_nobody(situation: Situation) -> None:
    settled, preempted = situation, []
    for _ in range(20):
        plan = schedule(settled.waiting, settled.holding, settled.nodes, settled.pools)
        if not plan.assignments and not plan.preemptions:
            break
        preempted.append(len(plan.preemptions))
        settled = settled.after().left()
    else:
        pytest.fail("The schedule never came to rest.")
    if situation.settings.policy is FIFO and not situation.settings.backfill:
        assert not any(preempted)


@given(situations(PRIORITY))
def test_nothing_less_important_starts_while_something_more_important_fits(
    situation: Situation,
) -> None:
    results = situation.results()
    after = situation.after()
    started = [one.waiting for one in results if one.slots]
    waits = [one for one in results if one.reason in (Reason.SLOTS_IN_USE, Reason.BEHIND_OTHERS)]
    least = max((trial.priority for trial in started), default=0)
    for one in waits:
        # Neither in place of a less important one that starts, nor of one that runs.
        if one.reason is Reason.SLOTS_IN_USE:
            assert least <= one.waiting.priority
            assert not fits_without_less_important(after, one.waiting)
        else:
            assert one.behind is not None
            assert one.behind.priority <= one.waiting.priority


def fits_without_less_important(situation: Situation, trial: Waiting) -> bool:
    """Tell whether a trial would fit on a node that less important attempts have left."""
    room = situation.settings.max_slots
    staying = [
        one for one in situation.holding
        if not one.is_leaving and one.priority <= trial.priority
    ]  # fmt: skip
    reserved = sum(
        one.waiting.num_slots for one in situation.results() if one.reason is Reason.PREEMPTING
    )
    if reserved:
        # Slots are kept for others: who gets which is for the planner to say.
        return False
    if room is not None and sum(len(one.slots) for one in staying) + trial.num_slots > room:
        return False
    taken = {(one.node_id, slot) for one in staying for slot in one.slots}
    return any(
        len([slot for slot in set(node.slots) - node.drained if (node.node_id, slot) not in taken])
        >= trial.num_slots
        for node in situation.nodes
        if node.is_open
    )


@given(situations(PRIORITY))
def test_only_less_important_attempts_are_preempted_and_as_few_young_ones_as_possible(
    situation: Situation,
) -> None:
    assume(situation.settings.max_slots is None)
    first = next((one for one in situation.results() if one.preempts), None)
    if first is None:
        return
    trial = first.waiting
    for one in first.preempts:
        assert one.priority > trial.priority
        assert not one.is_leaving
    earlier = [
        one for one in situation.results()[: first.place]
        if one.slots or one.reason is Reason.PREEMPTING
    ]  # fmt: skip
    assume(not earlier)
    least = min(one.priority for one in first.preempts)
    possible = [
        one for one in situation.holding
        if not one.is_leaving and one.priority > trial.priority and one.priority >= least
    ]  # fmt: skip
    # With the more unimportant ones alone it would not fit.
    assert not any(
        makes_room(situation, trial, chosen)
        for number in range(len(possible) + 1)
        for chosen in combinations([one for one in possible if one.priority > least], number)
    )
    fewest = next(
        found
        for number in range(1, len(possible) + 1)
        if (found := [
            chosen for chosen in combinations(possible, number)
            if makes_room(situation, trial, chosen)
        ])
    )  # fmt: skip

    def order(chosen: tuple[Holding, ...]) -> list[tuple[int, int]]:
        return sorted((-one.priority, -one.attempt_id) for one in chosen)

    assert order(first.preempts) == min(map(order, fewest))


def makes_room(situation: Situation, trial: Waiting, chosen: tuple[Holding, ...]) -> bool:
    gone = {one.attempt_id for one in chosen}
    taken = {
        (one.node_id, slot)
        for one in situation.holding
        if not one.is_leaving and one.attempt_id not in gone
        for slot in one.slots
    }
    return any(
        len([slot for slot in set(node.slots) - node.drained if (node.node_id, slot) not in taken])
        >= trial.num_slots
        for node in situation.nodes
        if node.is_open
    )


@given(situations(FAIR_SHARE))
def test_preemption_makes_the_shares_more_equal(situation: Situation) -> None:
    used: Counter[int] = Counter()
    weights = {one.experiment_id: one.weight for one in situation.holding}
    weights |= {one.experiment_id: one.weight for one in situation.waiting}
    for one in situation.holding:
        if not one.is_leaving:
            used[one.experiment_id] += len(one.slots)
    for result in situation.results():
        trial = result.waiting
        if result.slots or result.reason is Reason.PREEMPTING:
            used[trial.experiment_id] += trial.num_slots
        for one in result.preempts:
            used[one.experiment_id] -= len(one.slots)
        for one in result.preempts:
            mine = used[trial.experiment_id] / trial.weight
            assert used[one.experiment_id] / weights[one.experiment_id] >= mine


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 4.0]), st.integers(1, 3)),
        min_size=2,
        max_size=6,
    ),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_no_experiment_starves_under_fair_share(
    experiments: list[tuple[int, float, int]], sizes: list[int], random: object
) -> None:
    """All want more than there is, for ever; attempts run for some rounds each."""
    nodes = tuple(NodeSlots(node_id=n, slots=tuple(range(size))) for n, size in enumerate(sizes))
    experiments = [(min(size, max(sizes)), weight, runs) for size, weight, runs in experiments]
    pools = {"default": PoolSettings(policy=FAIR_SHARE)}
    last_served = dict.fromkeys(range(len(experiments)), 0.0)
    running: dict[int, tuple[Holding, int]] = {}
    number = 0
    served: Counter[int] = Counter()
    for now in range(1, 60):
        running = {
            id_: (one, rounds - 1)
            for id_, (one, rounds) in running.items()
            if rounds > 1 and not one.is_leaving
        }
        waiting = [
            Waiting(
                trial_id=1000 * experiment_id + index, experiment_id=experiment_id,
                num_slots=size, max_slots=None, weight=weight,
                last_served=last_served[experiment_id],
            )
            for experiment_id, (size, weight, _) in enumerate(experiments)
            for index in range(sum(sizes))
        ]  # fmt: skip
        plan = schedule(waiting, [one for one, _ in running.values()], nodes, pools)
        for one, _ in plan.preemptions:
            running[one.attempt_id] = (replace(one, is_leaving=True), 1)
        for given_ in plan.assignments:
            number += 1
            experiment_id = given_.trial_id // 1000
            size, weight, rounds = experiments[experiment_id]
            running[number] = (
                Holding(
                    experiment_id=experiment_id, slots=given_.slots, node_id=given_.node_id,
                    attempt_id=number, weight=weight,
                ),
                rounds + random.randint(0, 2),  # type: ignore[attr-defined]
            )  # fmt: skip
            last_served[experiment_id] = float(now)
            served[experiment_id] += 1
    assert set(served) == set(range(len(experiments)))


# ---- single cases, most of them those of the predecessor's users ----------------------------


def trials(experiment_id: int, number: int, num_slots: int = 1, **more: object) -> list[Waiting]:
    return [
        Waiting(
            trial_id=100 * experiment_id + index, experiment_id=experiment_id,
            num_slots=num_slots, **{"max_slots": None} | more,  # type: ignore[arg-type]
        )
        for index in range(number)
    ]  # fmt: skip


def run(
    policy: PolicyName, sizes: list[int], waiting: list[Waiting], *holding: Holding
) -> Situation:
    nodes = tuple(NodeSlots(node_id=n, slots=tuple(range(size))) for n, size in enumerate(sizes))
    return Situation(tuple(waiting), holding, nodes, PoolSettings(policy=policy))


def started(situation: Situation) -> Counter[int]:
    new = situation.after().holding[len(situation.holding) :]
    return Counter(one.experiment_id for one in new)


@pytest.mark.parametrize(
    ("sizes", "waiting", "expected"),
    [
        ([4], trials(1, 4, max_slots=1) + trials(2, 4), {1: 1, 2: 3}),
        ([8], trials(1, 3, weight=10) + trials(2, 7, weight=30), {1: 2, 2: 6}),
        ([4, 4], trials(1, 1, 4) + trials(2, 1, 4), {1: 1, 2: 1}),
        ([4], trials(1, 1, 5) + trials(2, 1, 4), {2: 1}),
        ([6], trials(1, 9) + trials(2, 9) + trials(3, 9), {1: 2, 2: 2, 3: 2}),
        ([6], trials(1, 1) + trials(2, 9) + trials(3, 9), {1: 1, 2: 3, 3: 2}),
    ],
)
def test_slots_are_shared_in_proportion_to_weights(
    sizes: list[int], waiting: list[Waiting], expected: dict[int, int]
) -> None:
    assert started(run(FAIR_SHARE, sizes, waiting)) == expected


def test_a_newcomer_gets_its_share_from_the_youngest_attempts_of_the_others() -> None:
    held = [Holding(experiment_id=1, slots=(n,), attempt_id=n + 1) for n in range(4)]
    situation = run(FAIR_SHARE, [4], trials(2, 4), *held)
    plan = schedule(situation.waiting, held, situation.nodes, situation.pools)
    assert [one.attempt_id for one, _ in plan.preemptions] == [4, 3]
    settled = situation.after().left().after()
    assert Counter(one.experiment_id for one in settled.holding) == {1: 2, 2: 2}


def test_a_more_important_trial_takes_the_slots_of_the_least_important_and_youngest() -> None:
    held = [
        Holding(experiment_id=1, slots=(0,), attempt_id=1, priority=50),
        Holding(experiment_id=2, slots=(1,), attempt_id=2, priority=90),
        Holding(experiment_id=2, slots=(2,), attempt_id=3, priority=90),
        Holding(experiment_id=3, slots=(3,), attempt_id=4, priority=10),
    ]
    situation = run(PRIORITY, [4], trials(9, 4, priority=10), *held)
    plan = schedule(situation.waiting, held, situation.nodes, situation.pools)
    assert [one.attempt_id for one, _ in plan.preemptions] == [3, 2, 1]


def test_an_important_trial_for_which_nobody_can_make_room_preempts_nobody() -> None:
    held = [
        Holding(experiment_id=1, slots=(0,), attempt_id=1, priority=10),
        Holding(experiment_id=2, slots=(1,), attempt_id=2, priority=90),
    ]
    situation = run(PRIORITY, [2], trials(9, 1, 2, priority=10) + trials(8, 1, priority=20), *held)
    assert [one.reason for one in situation.results()] == [
        Reason.SLOTS_IN_USE, Reason.BEHIND_OTHERS,
    ]  # fmt: skip
    assert situation.after().holding == tuple(held)


def test_others_start_in_slots_that_are_not_kept_for_who_waits_for_preempted_attempts() -> None:
    low = Holding(experiment_id=1, slots=(0, 1), node_id=0, attempt_id=1, priority=90)
    situation = run(PRIORITY, [2, 1], trials(9, 1, 2, priority=1) + trials(8, 2), low)
    results = situation.results()
    assert [one.reason for one in results] == [Reason.PREEMPTING, None, Reason.SLOTS_IN_USE]
    assert [one.node_id for one in results[1:2]] == [1]


def test_free_slots_are_kept_for_who_waits_for_the_rest_of_its_slots() -> None:
    low = Holding(experiment_id=1, slots=(1,), attempt_id=1, priority=90)
    waiting = trials(9, 1, 2, priority=1) + trials(8, 1, priority=50)
    results = run(PRIORITY, [2], waiting, low).results()
    assert [one.reason for one in results] == [Reason.PREEMPTING, Reason.SLOTS_IN_USE]


def test_a_drained_slot_is_given_to_nobody_and_does_not_hold_up_others() -> None:
    nodes = [NodeSlots(slots=(0, 1), drained=frozenset({1}))]
    results = list(decide(trials(1, 1, 2) + trials(2, 1), [], nodes))
    assert [one.reason for one in results] == [Reason.TOO_LARGE, None]


def test_a_pool_says_how_many_slots_it_lacks() -> None:
    holding = [Holding(experiment_id=1, slots=(0,), attempt_id=1)]
    waiting = trials(1, 3, max_slots=2) + trials(2, 2, 2) + trials(3, 1, pool="empty")
    needs = needs_of(decide(waiting, holding, [NodeSlots(slots=(0, 1))]), holding, QuotaUse())
    # Experiment 1 gets the free slot, and may have no more.
    assert {pool: need.sizes for pool, need in needs.items()} == {"default": (2, 2), "empty": (1,)}
    assert needs["default"].num_slots == 4


def test_a_pausing_node_holds_up_nobody_but_who_needs_it() -> None:
    nodes = [
        NodeSlots(node_id=0, slots=(0, 1), is_pausing=True),
        NodeSlots(node_id=1, slots=(0,)),
    ]
    results = list(decide(trials(1, 1, 2) + trials(2, 1), [], nodes))
    assert [(one.reason, one.node_id, one.slots) for one in results] == [
        (Reason.PAUSING, 0, ()), (None, 1, (0,)),
    ]  # fmt: skip


def test_a_node_belongs_to_the_pool_that_it_names_or_whose_labels_it_has() -> None:
    pools = {
        "any": PoolSettings(),
        "big": PoolSettings(labels={"gpu": "a100"}),
        "room-1": PoolSettings(labels={"gpu": "a100", "room": "1"}),
    }
    nodes = [
        NodeSlots(node_id=1, slots=(0,), labels={"gpu": "a100", "room": "1"}),
        NodeSlots(node_id=2, slots=(0,), labels={"room": "1"}),
        NodeSlots(node_id=3, slots=(0,), labels={"gpu": "a100"}, pool="own"),
    ]
    assert [node.pool for node in in_pools(nodes, pools)] == ["big", "default", "own"]


# ---- the order that people change -------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), max_size=40))
def test_a_moved_experiment_is_right_beside_the_other_one_and_the_rest_keeps_its_order(
    moves: list[tuple[int, int, bool]],
) -> None:
    """Five experiments have one trial each, whose ids are their own."""
    places: dict[int, float] = {}
    order = [1, 2, 3, 4, 5]
    for one, other, is_ahead in moves:
        if one == other:
            continue
        target = places.get(other, float(other))
        places |= moved(
            places, one, ahead_of=target if is_ahead else None, behind=None if is_ahead else target
        )
        order.remove(one)
        order.insert(order.index(other) + (not is_ahead), one)
        assert sorted(order, key=lambda id_: places.get(id_, float(id_))) == order


def test_there_is_room_for_any_number_of_moves() -> None:
    places: dict[int, float] = {}
    for number in range(500):
        one, other = (1, 2) if number % 2 else (2, 1)
        places |= moved(places, one, ahead_of=places.get(other, float(other)), behind=None)
        assert places.get(one, one) < places.get(other, other)


def test_a_start_is_estimated_from_the_ends_of_those_that_run() -> None:
    """Trials take their turns; an end that nobody knows leaves those who need it without one."""
    nodes = [NodeSlots(slots=tuple(range(5)))]
    holding = [
        Holding(experiment_id=1, slots=(0, 1), attempt_id=1),
        Holding(experiment_id=2, slots=(2,), attempt_id=2),
        Holding(experiment_id=3, slots=(3,), attempt_id=3),
    ]
    ends = {1: 200.0, 2: 100.0}
    waiting = [
        Waiting(trial_id=n, experiment_id=9, num_slots=size, max_slots=None)
        for n, size in enumerate([2, 1, 1, 1, 1])
    ]
    starts = StartEstimates(holding, nodes, ends, {})
    results = list(decide(waiting, holding, nodes))
    # One slot is free, and another one at 100; two more at 200; the end of the third is unknown.
    assert [starts.note(one) for one in results] == [100.0, 200.0, 200.0, None, None]
    none = StartEstimates(holding, nodes, {}, {})
    assert [none.note(one) for one in results] == [None] * 5
