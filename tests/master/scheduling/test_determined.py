"""Decisions beside those of Determined's priority scheduler, case by case; docs have the table."""

import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from scheduling_simulation import Rule, determined, ours

from paceline._cluster.master.scheduling.pool_policies import NO_SHARING
from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    Waiting,
)
from paceline._cluster.master.scheduling.schedule import decide

PAGE = Path(__file__).parents[3] / "docs" / "scheduling.md"
HIGH, MED, LOW = 40, 45, 50


@dataclass(frozen=True)
class Case:
    """A situation: sizes of nodes, who runs where, and who waits.

    Those who run are (name, slots by node, priority), oldest first; those who wait (name, slots,
    priority), in order. What follows is who starts, and who is asked to leave.
    """

    id: str
    sizes: list[int]
    running: list[tuple[str, dict[int, int], int]]
    waiting: list[tuple[str, int, int]]
    theirs: tuple[str, str]
    here: tuple[str, str]
    with_backfill: tuple[str, str] | None = None
    preempts: bool = False
    max_slots: int | None = None


CASES = [
    Case(
        "P-1", [4, 4], [], [("a", 4, LOW), ("b", 1, LOW), ("c", 1, HIGH), ("d", 4, HIGH)],
        ("b c d", ""), ("c d", ""), with_backfill=("b c d", ""),
    ),
    Case(
        "P-2", [4, 4], [], [("a", 4, LOW), ("b", 1, LOW), ("c", 12, HIGH)],
        ("", ""), ("a b", ""),
    ),
    Case(
        "P-3", [4, 4], [("b", {0: 1}, LOW), ("c", {0: 1}, HIGH), ("d", {1: 4}, HIGH)],
        [("a", 4, LOW), ("e", 1, LOW), ("f", 1, LOW), ("g", 1, LOW)],
        ("e f", ""), ("", ""), with_backfill=("e f", ""),
    ),
    Case(
        "P-4", [4], [("a", {0: 2}, HIGH), ("b", {0: 1}, LOW), ("c", {0: 1}, LOW)],
        [("d", 1, HIGH)], ("", ""), ("", "c"),
    ),
    Case("P-6", [4, 4], [("d", {1: 4}, HIGH)], [("a", 1, LOW), ("b", 1, LOW)],
         ("a b", ""), ("a b", "")),
    Case(
        "P-10", [4, 4], [("a", {0: 4}, MED), ("b", {1: 4}, HIGH)],
        [("c", 1, LOW), ("d", 4, HIGH), ("e", 8, HIGH)], ("", "a"), ("", "a"), preempts=True,
    ),
    Case(
        "P-14", [4, 4], [("a", {0: 1}, LOW), ("c", {1: 4}, LOW)], [("b", 4, LOW)],
        ("", "c"), ("", ""), preempts=True,
    ),
    Case(
        "P-16", [4, 4], [("a", {0: 1}, LOW), ("c", {1: 4}, LOW)], [("b", 8, LOW)],
        ("", ""), ("", ""), preempts=True,
    ),
    Case(
        "superfluous", [4, 4],
        [("a", {0: 3}, HIGH), ("b", {1: 4}, LOW), ("c", {0: 1}, LOW)], [("d", 4, HIGH)],
        ("", "b c"), ("", "b"), preempts=True,
    ),
    Case(
        "gap", [4], [("a", {0: 2}, HIGH)], [("b", 4, HIGH), ("c", 1, LOW)],
        ("c", ""), ("", ""), with_backfill=("c", ""), preempts=True,
    ),
    Case(
        "same priority", [4], [("a", {0: 2}, LOW)], [("b", 4, LOW), ("c", 1, LOW)],
        ("c", ""), ("", ""), with_backfill=("c", ""),
    ),
    Case("F-4", [2, 4], [], [("a", 2, LOW)], ("a:0", ""), ("a:0", "")),
    Case("F-5", [4, 1], [], [("a", 1, LOW)], ("a:1", ""), ("a:1", "")),
    Case("F-15", [8, 7, 7, 4, 4, 4, 4], [], [("a", 16, LOW)],
         ("a:3456", ""), ("a:3456", "")),
    Case("F-17", [8, 8, 3, 3, 3], [], [("a", 12, LOW)], ("", ""), ("a:01", "")),
    Case(
        "half-used", [8, 8], [("x", {0: 4}, LOW), ("y", {1: 4}, LOW)], [("a", 8, LOW)],
        ("", ""), ("a:01", ""),
    ),
    Case(
        "max_slots", [4], [], [("a", 1, LOW), ("b", 1, LOW), ("c", 1, LOW)],
        ("a b c", ""), ("a b", ""), max_slots=2,
    ),
]  # fmt: skip


def found(case: Case, rule: Rule) -> tuple[str, str]:
    """Return who starts, with nodes where a case names them, and who leaves."""
    nodes = [
        NodeSlots(node_id=n, slots=tuple(range(size)), can_join=True)
        for n, size in enumerate(case.sizes)
    ]
    names, holding, waiting = {}, [], []
    used = [0] * len(nodes)
    # P-14 and P-16 have one that waits between two that run.
    places = {name: float(ord(name)) for name, *_ in (*case.running, *case.waiting)}
    for attempt_id, (name, by_node, priority) in enumerate(case.running, 1):
        parts = []
        for node_id, size in by_node.items():
            parts.append((node_id, tuple(range(used[node_id], used[node_id] + size))))
            used[node_id] += size
        (node_id, slots), *others = parts
        names[attempt_id] = name
        holding.append(
            Holding(
                experiment_id=attempt_id, attempt_id=attempt_id, node_id=node_id, slots=slots,
                others=tuple(others), priority=priority, queue_place=places[name],
            )
        )  # fmt: skip
    for trial_id, (name, size, priority) in zip(count(100), case.waiting, strict=False):
        names[trial_id] = name
        waiting.append(
            Waiting(
                trial_id=trial_id, experiment_id=99 if case.max_slots else trial_id, num_slots=size,
                max_slots=case.max_slots, priority=priority, queue_place=places[name],
            )
        )  # fmt: skip
    plan = rule(waiting, holding, nodes, NO_SHARING)
    started = []
    for one in sorted(plan.assignments, key=lambda one: one.trial_id):
        ids = sorted([one.node_id, *(node_id for node_id, _ in one.others)])
        where = f":{''.join(map(str, ids))}" if ":" in case.theirs[0] + case.here[0] else ""
        started.append(names[one.trial_id] + where)
    left = sorted(names[one.attempt_id] for one, _ in plan.preemptions)
    return " ".join(started), " ".join(left)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_both_decide_as_the_table_says(case: Case) -> None:
    assert found(case, determined(preempts=case.preempts)) == case.theirs
    plain = PoolSettings(policy=PolicyName.PRIORITY)
    assert found(case, ours(plain)) == case.here
    filled = PoolSettings(policy=PolicyName.PRIORITY, backfill=True)
    assert found(case, ours(filled)) == (case.with_backfill or case.here)


def test_the_page_has_each_case_and_says_which_ones_differ() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|.*\| (same|differs)\b.*\|$", PAGE.read_text(), re.MULTILINE)
    said = {name: word == "same" for name, word in rows}
    assert said == {case.id: case.theirs == case.here for case in CASES}


def test_an_agent_that_is_gone_is_not_planned_with() -> None:
    """Determined's agents that do not answer are disabled after 25 s; here a lease ends."""
    nodes = [NodeSlots(node_id=1, slots=(0, 1)), NodeSlots(node_id=2, slots=(0,), is_open=False)]
    waiting = [Waiting(trial_id=n, experiment_id=n, num_slots=1, max_slots=None) for n in (1, 2, 3)]
    started = determined()(waiting, [], nodes, NO_SHARING).assignments
    assert {one.node_id for one in started} == {1}
    results = list(decide(waiting, [], nodes))
    assert [one.node_id for one in results if one.slots] == [1, 1]
