"""Estimated starts beside those of a simulation: they are exact where all ends are known."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_simulation import Job, Simulation, ours

from paceline._cluster.master.scheduling.pools import (
    NodeSlots,
    PolicyName,
    PoolSettings,
    Reason,
    StartEstimates,
    Waiting,
)
from paceline._cluster.master.scheduling.schedule import decide

ASKED_AT = 5.0
FOR_EVER = 1e6


@pytest.mark.parametrize("backfill", [False, True])
@given(st.integers(0, 10**9))
def test_trials_start_when_it_was_said(backfill: bool, seed: int) -> None:
    """Those that wait keep their slots for ever: nobody knows how long they take.

    With backfill, small ones may start in a gap before, and be there again after leaving it.
    """
    draw = random.Random(seed)
    can_join = draw.random() < 0.5
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    nodes = [
        NodeSlots(
            node_id=n, slots=tuple(range(size)), can_join=can_join, owner=draw.choice("ab"),
            reserved_for=frozenset("a") if draw.random() < 0.2 else None,
        )
        for n, size in enumerate(sizes)
    ]  # fmt: skip
    settings = PoolSettings(backfill=backfill)
    simulation = Simulation(nodes=nodes, rule=ours(settings))
    lengths = {}
    for number in range(1, 20):
        at = draw.uniform(0, 10)
        size = draw.choice([1, 1, 2, draw.randint(1, sum(sizes))])
        trial = Waiting(
            trial_id=number, experiment_id=number, num_slots=size, max_slots=None,
            user=draw.choice("ab"), queue_place=float(number),
            allow_uneven=draw.random() < 0.3,
        )  # fmt: skip
        lengths[number] = draw.uniform(1, 20)
        if at < ASKED_AT:
            simulation.add([Job(at, trial, lengths[number])])
    simulation.call_at(ASKED_AT, lambda: None)
    found = {}
    for now in simulation.steps():
        if now < ASKED_AT or found:
            continue
        holding = list(simulation.running.values())
        ends = {
            id_: one.since + simulation.left_s[simulation.trial_of[id_].trial_id]
            for id_, one in simulation.running.items()
        }
        starts = StartEstimates(holding, nodes, ends, {"default": settings})
        queue = simulation.queue()
        for result in decide(queue, holding, nodes, {"default": settings}):
            found[result.waiting.trial_id] = starts.note(result)
        for trial in queue:
            simulation.left_s[trial.trial_id] = FOR_EVER
        began_before = set(simulation.began)
    for number, at in found.items():
        if at is not None and number not in began_before:
            began = simulation.began[number]
            assert began <= at + 1e-9 if backfill else began == pytest.approx(at)


def test_where_no_single_end_makes_room_the_later_one_counts() -> None:
    """Two slots come free on two nodes; the trial needs both on one."""
    nodes = [NodeSlots(node_id=n, slots=(0, 1)) for n in (1, 2)]
    simulation = Simulation(nodes=nodes, rule=ours(PoolSettings()))
    small = Waiting(trial_id=0, experiment_id=1, num_slots=1, max_slots=None)
    for number, length_s in enumerate([10.0, 40.0, 20.0, 50.0], 1):
        trial = replace(small, trial_id=number, queue_place=float(number))
        simulation.add([Job(0.0, trial, length_s)])
    large = replace(small, trial_id=9, num_slots=2, queue_place=9.0)
    simulation.add([Job(1.0, large, 1.0)])
    estimates = []
    for _ in simulation.steps():
        holding = list(simulation.running.values())
        ends = {
            id_: simulation.left_s[trial.trial_id] for id_, trial in simulation.trial_of.items()
        }
        for result in decide(simulation.queue(), holding, nodes):
            if result.reason is Reason.SLOTS_IN_USE:
                starts = StartEstimates(holding, nodes, ends, {})
                estimates.append(starts.note(result))
    assert set(estimates) == {simulation.began[9]} == {40.0}


def test_a_limit_of_the_pool_and_elastic_trials_leave_no_estimate() -> None:
    nodes = [NodeSlots(slots=(0, 1))]
    pools = {"default": PoolSettings(max_slots=2, policy=PolicyName.FIFO)}
    simulation = Simulation(nodes=nodes, rule=ours(pools["default"]))
    first = Waiting(trial_id=1, experiment_id=1, num_slots=2, max_slots=None)
    elastic_one = replace(first, trial_id=2, num_slots=1, most_slots=2)
    waiting = [elastic_one, replace(first, trial_id=3, num_slots=1)]
    simulation.add([Job(0.0, first, 9.0)])
    next(iter(simulation.steps()))
    simulation.settle()
    holding = list(simulation.running.values())
    ends = {one.attempt_id: 9.0 for one in holding}
    limited = StartEstimates(holding, nodes, ends, pools)
    assert [limited.note(one) for one in decide(waiting, holding, nodes, pools)] == [None] * 2
    elastic = StartEstimates(holding, nodes, ends, {})
    assert [elastic.note(one) for one in decide(waiting, holding, nodes)] == [9.0, None]
