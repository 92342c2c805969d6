"""Hours in which interactive trials come first: their clock, and what they change."""

from dataclasses import replace
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._cluster.master.scheduling.interactive_hours import parse_hours
from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    Reason,
    Waiting,
)
from paceline._cluster.master.scheduling.schedule import decide, schedule

BERLIN = ZoneInfo("Europe/Berlin")
FIRST = Waiting(trial_id=1, experiment_id=1, num_slots=1, max_slots=None, queue_place=1.0)


def at(*fields: int, fold: int = 0) -> float:
    return datetime(*fields, tzinfo=BERLIN, fold=fold).timestamp()  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("text", "moment", "expected"),
    [
        # 2026-12-04 is a Friday.
        ("09:00-18:00 mon-fri Europe/Berlin", at(2026, 12, 4, 9, 0), True),
        ("09:00-18:00 mon-fri Europe/Berlin", at(2026, 12, 4, 8, 59, 59), False),
        ("09:00-18:00 mon-fri Europe/Berlin", at(2026, 12, 4, 18, 0), False),
        ("09:00-18:00 mon-fri Europe/Berlin", at(2026, 12, 5, 12, 0), False),
        ("09:00-18:00 fri-mon Europe/Berlin", at(2026, 12, 6, 12, 0), True),
        ("09:00-18:00 mon,wed Europe/Berlin", at(2026, 12, 4, 12, 0), False),
        # Without a zone it is UTC, an hour behind in winter; without days each day.
        ("09:00-18:00", at(2026, 12, 6, 9, 30), False),
        ("09:00-18:00", at(2026, 12, 6, 18, 30), True),
        # Over midnight, the hours are of the day on which they begin.
        ("22:00-06:00 fri Europe/Berlin", at(2026, 12, 5, 5, 59), True),
        ("22:00-06:00 fri Europe/Berlin", at(2026, 12, 5, 22, 30), False),
        ("18:00-24:00 fri Europe/Berlin", at(2026, 12, 4, 23, 59), True),
        # On days of a change of time, the clock on the wall counts: 02:30 comes twice, or never.
        ("02:00-03:00 sun Europe/Berlin", at(2026, 10, 25, 2, 30), True),
        ("02:00-03:00 sun Europe/Berlin", at(2026, 10, 25, 2, 30, fold=1), True),
        ("02:00-03:00 sun Europe/Berlin", at(2026, 3, 29, 1, 59) + 60, False),
        ("09:00-18:00 sun Europe/Berlin", at(2026, 10, 25, 9, 0), True),
        ("09:00-18:00 sun Europe/Berlin", at(2026, 3, 29, 17, 59), True),
    ],
)
def test_a_moment_is_in_the_hours_or_not(text: str, moment: float, expected: bool) -> None:
    assert parse_hours(text).has(moment) is expected


@given(st.floats(0, 4e9), st.integers(0, 1439), st.integers(0, 1439))
def test_hours_and_those_of_the_rest_of_the_day_are_all_hours(
    now: float, begin: int, end: int
) -> None:
    """Wherever a clock jumps, the answer is that of its new time alone."""
    first, last = (f"{one // 60:02}:{one % 60:02}" for one in (begin, end))
    if begin != end:
        hours, rest = (
            parse_hours(f"{one} mon-sun Europe/Berlin")
            for one in (f"{first}-{last}", f"{last}-{first}")
        )
        assert hours.has(now) is not rest.has(now)


@pytest.mark.parametrize(
    "text",
    [
        "", "9-18", "09:00-18:00 Mon", "09:00-18:00 mon-xyz", "09:00-18:00 mon-tue-wed",
        "25:00-26:00", "09:60-10:00", "24:00-06:00", "10:00-10:00", "09:00-18:00 Mars/Base",
        "09:00-18:00 Europe/../../etc/passwd", "09:00-18:00\n",
    ],
)  # fmt: skip
def test_other_texts_are_no_hours(text: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_hours(text)


@pytest.mark.parametrize("policy", PolicyName)
def test_interactive_trials_come_first_in_their_hours(policy: PolicyName) -> None:
    """The others follow in the order of the policy; a large one of these holds up no such trial."""
    large = replace(FIRST, num_slots=4, priority=1)
    waiting = [
        large, replace(FIRST, trial_id=2, experiment_id=2),
        replace(FIRST, trial_id=3, experiment_id=3, is_interactive=True, priority=99),
    ]  # fmt: skip
    nodes = [NodeSlots(slots=(0, 1, 2, 3))]
    held = [Holding(experiment_id=9, slots=(0,), attempt_id=1, priority=1, is_interactive=True)]
    for is_now in (True, False):
        pools = {"default": PoolSettings(policy=policy, is_interactive_now=is_now)}
        results = {one.waiting.trial_id: one for one in decide(waiting, held, nodes, pools)}
        assert results[1].reason is Reason.SLOTS_IN_USE
        assert results[2].reason is Reason.BEHIND_OTHERS
        assert results[3].reason is (None if is_now else Reason.BEHIND_OTHERS)


def test_an_interactive_attempt_makes_no_room_for_others_in_its_hours() -> None:
    """It would come first again, and so on for ever; fillers leave for it, whenever they came."""
    pools = {"default": PoolSettings(policy=PolicyName.PRIORITY, is_interactive_now=True)}
    nodes = [NodeSlots(slots=(0,))]
    held = Holding(experiment_id=2, slots=(0,), attempt_id=1, is_interactive=True)
    assert not schedule([replace(FIRST, priority=1)], [held], nodes, pools).preemptions
    pools = {"default": PoolSettings(backfill=True, is_interactive_now=True)}
    filler = replace(held, is_interactive=False, is_filler=True)
    mine = replace(FIRST, is_interactive=True)
    assert schedule([mine], [filler], nodes, pools).preemptions == [(filler, mine)]
    own = replace(filler, is_interactive=True)
    assert not schedule([mine], [own], nodes, pools).preemptions
