"""Trials on several nodes: which ones they get, all slots or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    Reason,
    SlotAssignment,
    Waiting,
    fits_nodes,
)
from paceline._cluster.master.scheduling.schedule import decide, schedule


def nodes(*sizes: int, can_join: bool = True) -> list[NodeSlots]:
    """Return nodes 1, 2, ... with so many slots."""
    return [
        NodeSlots(node_id=number, slots=tuple(range(size)), can_join=can_join)
        for number, size in enumerate(sizes, 1)
    ]


def waiting(trial_id: int, num_slots: int, **more: object) -> Waiting:
    values = {"trial_id": trial_id, "experiment_id": trial_id, "max_slots": None} | more
    return Waiting(num_slots=num_slots, **values)  # type: ignore[arg-type]


def parts(assignment: SlotAssignment) -> dict[int, int]:
    found = [(assignment.node_id, assignment.slots), *assignment.others]
    assert len({node_id for node_id, _ in found}) == len(found)
    return {node_id: len(slots) for node_id, slots in found}


@pytest.mark.parametrize(
    ("sizes", "trial", "expected"),
    [
        pytest.param([2, 2], waiting(1, 4), {1: 2, 2: 2}, id="both nodes"),
        pytest.param([2, 2, 4], waiting(1, 4), {3: 4}, id="one node if one has as many"),
        pytest.param([2, 3, 2], waiting(1, 4), {1: 2, 3: 2}, id="the ones that fit best"),
        pytest.param([2, 2, 2], waiting(1, 6), {1: 2, 2: 2, 3: 2}, id="three nodes"),
        pytest.param([1, 1, 1, 1], waiting(1, 4), {1: 1, 2: 1, 3: 1, 4: 1}, id="one slot each"),
        pytest.param([2, 1], waiting(1, 3), None, id="no uneven ones"),
        pytest.param([2, 1], waiting(1, 3, allow_uneven=True), {1: 2, 2: 1}, id="uneven ones"),
        pytest.param([3, 5, 1], waiting(1, 7, allow_uneven=True), {2: 5, 1: 2}, id="the largest"),
        pytest.param([2, 2], waiting(1, 5, allow_uneven=True), None, id="too few in all"),
        pytest.param([3], waiting(1, 2, most_slots=8), {1: 3}, id="elastic, on one node"),
        pytest.param([2, 2], waiting(1, 2, most_slots=8), {1: 2, 2: 2}, id="elastic, on two"),
        pytest.param([4, 1], waiting(1, 2, most_slots=8), {1: 4}, id="elastic, but even"),
        pytest.param(
            [4, 4], waiting(1, 2, most_slots=8, max_slots=6), {1: 3, 2: 3}, id="within max_slots"
        ),
    ],
)
def test_a_trial_gets_these_nodes(
    sizes: list[int], trial: Waiting, expected: dict[int, int] | None
) -> None:
    found = schedule([trial], [], nodes(*sizes)).assignments
    assert [parts(one) for one in found] == ([] if expected is None else [expected])


def test_nodes_that_others_cannot_reach_join_no_group() -> None:
    [result] = decide([waiting(1, 4)], [], nodes(2, 2, can_join=False))
    assert result.reason is Reason.TOO_LARGE
    assert not fits_nodes(nodes(2, 2, can_join=False), 4)
    mixed = [*nodes(2, 2), NodeSlots(node_id=9, slots=(0, 1, 2), can_join=False)]
    [found] = schedule([waiting(1, 4)], [], mixed).assignments
    assert parts(found) == {1: 2, 2: 2}


def test_two_groups_that_each_find_half_of_their_slots_take_none_and_run_in_turn() -> None:
    held = [Holding(experiment_id=9, slots=(0, 1), node_id=1)]
    queue = [waiting(1, 4), waiting(2, 4)]
    assert schedule(queue, held, nodes(2, 2)).assignments == []
    [first] = schedule(queue, [], nodes(2, 2)).assignments
    assert (first.trial_id, parts(first)) == (1, {1: 2, 2: 2})


def test_a_small_trial_behind_a_group_waits_and_one_in_front_does_not() -> None:
    held = [Holding(experiment_id=9, slots=(0, 1), node_id=1)]
    queue = [waiting(1, 1), waiting(2, 4), waiting(3, 1)]
    found = list(decide(queue, held, nodes(2, 2)))
    assert [one.reason for one in found] == [None, Reason.SLOTS_IN_USE, Reason.BEHIND_OTHERS]


def test_attempts_on_several_nodes_make_room_for_a_more_important_group() -> None:
    held = [
        Holding(
            experiment_id=n, attempt_id=n, slots=(0, 1), node_id=n, others=((n + 1, (0, 1)),),
            priority=50,
        )
        for n in (1, 3)
    ]  # fmt: skip
    pools = {"default": PoolSettings(policy=PolicyName.PRIORITY)}
    found = schedule([waiting(7, 4, priority=1)], held, nodes(2, 2, 2, 2), pools)
    assert [one.attempt_id for one, _ in found.preemptions] == [3]
    found = schedule([waiting(7, 8, priority=1)], held, nodes(2, 2, 2, 2), pools)
    assert sorted(one.attempt_id for one, _ in found.preemptions) == [1, 3]


@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6), st.booleans()), max_size=8),
)
def test_groups_get_all_slots_or_none(
    sizes: list[int], wanted: list[tuple[int, int, bool]]
) -> None:
    """No slot is given twice, no trial gets too few or too many, and even ones are even."""
    machines = nodes(*sizes)
    queue = [
        waiting(number, least, most_slots=least + more, allow_uneven=uneven)
        for number, (least, more, uneven) in enumerate(wanted, 1)
    ]
    trials = {trial.trial_id: trial for trial in queue}
    taken: set[tuple[int, int]] = set()
    for one in schedule(queue, [], machines).assignments:
        trial, given_slots = trials[one.trial_id], parts(one)
        held = {
            (node_id, slot)
            for node_id, slots in [(one.node_id, one.slots), *one.others]
            for slot in slots
        }
        assert not held & taken
        taken |= held
        assert trial.num_slots <= len(held) <= max(trial.num_slots, trial.most_slots)
        assert trial.allow_uneven or len(set(given_slots.values())) == 1
        assert all(0 < number <= sizes[node_id - 1] for node_id, number in given_slots.items())
        assert fits_nodes(machines, trial.num_slots, allow_uneven=trial.allow_uneven)
