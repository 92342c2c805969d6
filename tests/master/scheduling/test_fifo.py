from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._cluster.master.scheduling.pools import Holding, NodeSlots, SlotAssignment, Waiting
from paceline._cluster.master.scheduling.schedule import schedule


def waiting(
    trial_id: int, num_slots: int = 1, experiment_id: int = 1, max_slots: int | None = None
) -> Waiting:
    return Waiting(
        trial_id=trial_id, experiment_id=experiment_id, num_slots=num_slots, max_slots=max_slots
    )


def holding(*slots: int, experiment_id: int = 1) -> Holding:
    return Holding(experiment_id=experiment_id, slots=slots)


def machine(num_slots: int) -> list[NodeSlots]:
    return [NodeSlots(slots=tuple(range(num_slots)))]


def ids(assignments: list[SlotAssignment]) -> list[int]:
    return [assignment.trial_id for assignment in assignments]


@pytest.mark.parametrize(
    ("queue", "held", "num_slots", "expected"),
    [
        pytest.param([], [], 4, {}, id="nobody waits"),
        pytest.param([waiting(1)], [], 0, {}, id="no slots"),
        pytest.param([waiting(1), waiting(2), waiting(3)], [], 2, {1: (0,), 2: (1,)}, id="fifo"),
        pytest.param([waiting(9), waiting(3)], [], 1, {9: (0,)}, id="order of arrival, not of ids"),
        pytest.param([waiting(1, 2)], [holding(1)], 4, {1: (0, 2)}, id="lowest free slots"),
        pytest.param([waiting(1, 3)], [holding(0), holding(2)], 4, {}, id="too few are free"),
        pytest.param(
            [waiting(1, 4), waiting(2), waiting(3)], [holding(0)], 4, {},
            id="a large trial is not overtaken",
        ),
        pytest.param(
            [waiting(1, 4), waiting(2), waiting(3)], [], 4, {1: (0, 1, 2, 3)},
            id="a large trial starts once all is free",
        ),
        pytest.param(
            [waiting(1, 5), waiting(2)], [], 4, {2: (0,)},
            id="a trial that can never fit holds nobody up",
        ),
        pytest.param(
            [waiting(1, max_slots=1), waiting(2, max_slots=1), waiting(3, experiment_id=2)], [], 4,
            {1: (0,), 3: (1,)},
            id="max_slots holds up its own experiment only",
        ),
        pytest.param(
            [waiting(1, max_slots=2)], [holding(0), holding(1)], 4, {}, id="held slots count"
        ),
        pytest.param(
            [waiting(1, max_slots=2)], [holding(0), holding(1, experiment_id=2)], 4, {1: (2,)},
            id="other experiments' slots do not count",
        ),
        pytest.param(
            [waiting(1, 2, max_slots=3), waiting(2, 2, max_slots=3)], [], 8, {1: (0, 1)},
            id="max_slots is not exceeded by the last trial",
        ),
        pytest.param(
            [waiting(1)], [holding(7)], 2, {1: (0,)}, id="a slot of an earlier, larger master"
        ),
    ],
)  # fmt: skip
def test_slots_are_given_as_the_table_says(
    queue: list[Waiting],
    held: list[Holding],
    num_slots: int,
    expected: dict[int, tuple[int, ...]],
) -> None:
    assignments = schedule(queue, held, machine(num_slots)).assignments
    assert {assignment.trial_id: assignment.slots for assignment in assignments} == expected


def test_a_large_trial_starts_although_small_ones_keep_coming() -> None:
    """Each round one running trial ends and another small one arrives."""
    running = {trial_id: (slot,) for slot, trial_id in enumerate((1, 2, 3, 4))}
    queue = [waiting(5, 4)]
    for arrival in range(6, 20):
        queue.append(waiting(arrival))
        if running:
            running.pop(min(running))
        held = [holding(*slots) for slots in running.values()]
        for assignment in schedule(queue, held, machine(4)).assignments:
            running[assignment.trial_id] = assignment.slots
            queue = [one for one in queue if one.trial_id != assignment.trial_id]
        if 5 in running:
            break
    assert running == {5: (0, 1, 2, 3)}


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[list[Waiting], list[Holding], range]:
    num_slots = draw(st.integers(0, 8))
    owners = draw(st.lists(st.integers(0, 3), min_size=num_slots, max_size=num_slots))
    held = [holding(slot, experiment_id=owner) for slot, owner in enumerate(owners) if owner]
    limits = draw(st.lists(st.none() | st.integers(1, 8), min_size=3, max_size=3))
    queue = [
        waiting(trial_id, size, experiment_id, limits[experiment_id - 1])
        for trial_id, (size, experiment_id) in enumerate(
            draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=8))
        )
    ]
    return queue, held, range(num_slots)


@given(situations())
def test_no_slot_is_used_twice_and_no_limit_exceeded(
    situation: tuple[list[Waiting], list[Holding], range],
) -> None:
    queue, held, slots = situation
    assignments = schedule(queue, held, machine(len(slots))).assignments
    used = [slot for holder in held for slot in holder.slots]
    used += [slot for assignment in assignments for slot in assignment.slots]
    assert len(used) == len(set(used))
    assert set(used) <= set(slots)
    by_id = {one.trial_id: one for one in queue}
    in_use = Counter(holder.experiment_id for holder in held)
    for assignment in assignments:
        trial = by_id[assignment.trial_id]
        assert len(assignment.slots) == trial.num_slots
        in_use[trial.experiment_id] += trial.num_slots
        assert trial.max_slots is None or in_use[trial.experiment_id] <= trial.max_slots
    assert len(set(ids(assignments))) == len(assignments)


@given(situations())
def test_whoever_could_start_now_waits_only_behind_an_earlier_one(
    situation: tuple[list[Waiting], list[Holding], range],
) -> None:
    queue, held, slots = situation
    assignments = schedule(queue, held, machine(len(slots))).assignments
    started = ids(assignments)
    assert started == [one.trial_id for one in queue if one.trial_id in started]
    in_use = Counter(holder.experiment_id for holder in held)
    num_free = len(slots) - sum(in_use.values())
    is_held_up = False
    for trial in queue:
        fits_limit = (
            trial.max_slots is None
            or in_use[trial.experiment_id] + trial.num_slots <= trial.max_slots
        )
        if trial.trial_id in started:
            assert not is_held_up
            num_free -= trial.num_slots
            in_use[trial.experiment_id] += trial.num_slots
        elif fits_limit and trial.num_slots <= len(slots):
            assert is_held_up or trial.num_slots > num_free
            is_held_up = True
