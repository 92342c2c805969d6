"""Which events give which notices: tables, and sequences at random."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.journal_records import encode_metrics
from paceline._cluster.master.notify.notices import (
    MAX_AGE_S,
    Happening,
    Memory,
    Notice,
    Rule,
    notices_of,
    overdue_notices,
)
from paceline._cluster.messages.states import ExperimentState, TrialState
from paceline.config._environment_and_secrets import Notify

ALL = ["alert", "experiment_ended", "experiment_failed", "trial_ended", "trial_failed", "node_lost"]
EVERYTHING = Rule.model_validate({"to": ["team"], "events": ALL, "alert_level": "debug"})


def rule(**fields: Any) -> Notify:
    return Notify.model_validate({"to": ["team"], "events": [], **fields})


def event(kind: str, *rules: Notify, time: float = 100.0, **data: Any) -> Happening:
    trial_id = None if kind in ("experiment_state", "node_lost") else 7
    since = data.pop("since", time)
    return Happening(
        time=time, since=since, kind=kind, experiment_id=3, trial_id=trial_id, data=data,
        name="mnist", rules=rules or (EVERYTHING,),
    )  # fmt: skip


def titles(*events: Happening, memory: Memory | None = None) -> list[str]:
    memory = memory or Memory()
    return [notice.title for one in events for _, notice in notices_of(one, memory)]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (event("experiment_state", state="COMPLETED"), "Experiment 3 (mnist) ended: COMPLETED"),
        (event("experiment_state", state="CANCELED"), "Experiment 3 (mnist) ended: CANCELED"),
        (event("experiment_state", state="ERROR"), "Experiment 3 (mnist) failed"),
        (event("trial_state", state="CANCELED"), "Trial 7 of experiment 3 (mnist) ended: CANCELED"),
        (event("trial_state", state="ERROR"), "Trial 7 of experiment 3 (mnist) failed"),
        (event("alert", title="Loss\r\nis NaN", level="warn"),
         "Loss is NaN (trial 7 of experiment 3 (mnist))"),
        (event("node_lost", node="box", seen_at=5.0), "The node box is lost"),
    ],
)  # fmt: skip
def test_event_gives_a_notice(one: Happening, expected: str) -> None:
    assert titles(one) == [expected]


@pytest.mark.parametrize("state", [state for state in ExperimentState if not state.is_terminal])
def test_experiment_that_goes_on_gives_none(state: ExperimentState) -> None:
    assert titles(event("experiment_state", state=state.value)) == []


@pytest.mark.parametrize("state", [state for state in TrialState if not state.is_terminal])
def test_trial_that_goes_on_gives_none(state: TrialState) -> None:
    assert titles(event("trial_state", state=state.value)) == []


@pytest.mark.parametrize("kind", ["experiment_state", "trial_state"])
@pytest.mark.parametrize("state", ["COMPLETED", "ERROR"])
@pytest.mark.parametrize("chosen", ALL[:5])
def test_rule_gives_only_its_events(kind: str, state: str, chosen: str) -> None:
    what = f"{kind.partition('_')[0]}_{'failed' if state == 'ERROR' else 'ended'}"
    assert bool(titles(event(kind, rule(events=[chosen]), state=state))) is (what == chosen)


@pytest.mark.parametrize("least", ["debug", "info", "warn", "error"])
@pytest.mark.parametrize("level", ["debug", "info", "warn", "error", "strange"])
def test_alert_below_the_level_gives_none(least: str, level: str) -> None:
    levels = ["debug", "info", "warn", "error"]
    is_told = level in levels and levels.index(level) >= levels.index(least)
    one = event("alert", rule(events=["alert"], alert_level=least), title="x", level=level)
    assert bool(titles(one)) is is_told


@pytest.mark.parametrize(
    ("limit", "group", "value", "is_told"),
    [
        ({"above": 1.0}, "training", 1.5, True),
        ({"above": 1.0}, "training", 1.0, False),
        ({"below": 1.0}, "training", 0.5, True),
        ({"below": 0.0}, "training", -0.5, True),
        ({"below": 1.0}, "training", 1.0, False),
        ({"above": 1.0}, "training", float("nan"), False),
        ({"above": 1.0}, "training", True, False),
        ({"above": 0.5}, "training", "0.9", False),
        ({"above": 1.0, "group": "validation"}, "training", 2.0, False),
        ({"above": 1.0, "group": "training"}, "training", 2.0, True),
        ({"above": 1.0, "group": "validation"}, "validation", 2.0, True),
    ],
)
def test_threshold(limit: dict[str, Any], group: str, value: Any, is_told: bool) -> None:
    watching = rule(thresholds=[{"metric": "loss", **limit}])
    kind = "validation" if group == "validation" else "metrics"
    given = {} if group == "validation" else {"group": group}
    one = event(kind, watching, metrics={"loss": value, "other": 9.0}, steps_completed=4, **given)
    memory = Memory()
    assert bool(titles(one, memory=memory)) is is_told
    # A second value gives none.
    assert titles(one, memory=memory) == []


def test_infinity_is_above_every_limit() -> None:
    watching = rule(thresholds=[{"metric": "loss", "above": 1.0}])
    metrics = encode_metrics({"loss": float("inf")})
    assert titles(event("metrics", watching, group="training", metrics=metrics)) == [
        "loss is inf, above 1, in trial 7 of experiment 3 (mnist)"
    ]


@pytest.mark.parametrize("value", [2**63, 10**400, -(10**400)])
def test_huge_integers_are_values_too(value: int) -> None:
    limit = {"above": 1.0} if value > 0 else {"below": 1.0}
    watching = rule(thresholds=[{"metric": "loss", **limit}])
    [title] = titles(event("metrics", watching, group="training", metrics={"loss": value}))
    assert title.startswith(f"loss is {max(-(10**300), min(value, 10**300)):g}, ")


def test_texts_of_strangers_are_cut_and_can_be_stored() -> None:
    one = event("alert", title="\ud800" + "x" * 10**6, description="\udfff" * 10**6, level="error")
    [(_, notice)] = notices_of(one, Memory())
    assert (notice.title[:2], len(notice.title), len(notice.text)) == ("?x", 300, 2000)
    assert msgspec.json.decode(msgspec.json.encode(notice), type=Notice) == notice


def test_threshold_of_two_rules_tells_both_channels() -> None:
    limit = [{"metric": "loss", "above": 1.0}]
    rules = (rule(thresholds=limit), rule(to=["ops", "team"], thresholds=limit))
    one = event("metrics", *rules, group="training", metrics={"loss": 2.0})
    assert [channel for channel, _ in notices_of(one, Memory())] == ["team", "ops"]


def test_end_of_a_trial_forgets_its_thresholds() -> None:
    watching = rule(thresholds=[{"metric": "loss", "above": 1.0}])
    one = event("metrics", watching, group="training", metrics={"loss": 2.0})
    memory = Memory(told={"70/x"})
    notices_of(one, memory)
    assert len(memory.told) == 2
    notices_of(event("trial_state", watching, state="COMPLETED"), memory)
    assert memory.told == {"70/x"}


def test_news_older_than_a_day_give_none() -> None:
    old = event("experiment_state", state="ERROR", time=MAX_AGE_S + 101.0, since=100.0)
    late = event("experiment_state", state="ERROR", time=MAX_AGE_S + 99.0, since=100.0)
    assert (titles(old), len(titles(late))) == ([], 1)


def test_node_that_stays_lost_gives_one_notice() -> None:
    memory = Memory()
    first, again = (
        event("node_lost", node="box", seen_at=5.0),
        event("node_lost", node="box", seen_at=9.0),
    )
    assert len(titles(first, first, memory=memory)) == 1
    # It was back in between.
    assert len(titles(again, memory=memory)) == 1


def running_trial(*rules: Notify) -> Memory:
    memory = Memory()
    notices_of(event("attempt_started", *rules, time=100.0), memory)
    return memory


def test_silent_trial_gives_one_notice_until_it_reports() -> None:
    watching = rule(silent_after=60.0)
    memory = running_trial(watching)
    assert overdue_notices(memory, 159.0) == []
    [(channel, notice)] = overdue_notices(memory, 160.0)
    assert (channel, notice.title) == ("team", "Trial 7 of experiment 3 (mnist) reports nothing")
    assert overdue_notices(memory, 1000.0) == []
    notices_of(event("metrics", watching, time=1000.0, group="training", metrics={}), memory)
    assert overdue_notices(memory, 1059.0) == []
    assert len(overdue_notices(memory, 1060.0)) == 1


def test_two_limits_on_silence_give_a_notice_each() -> None:
    memory = running_trial(rule(silent_after=60.0), rule(to=["ops"], silent_after=600.0))
    assert [channel for channel, _ in overdue_notices(memory, 160.0)] == ["team"]
    assert [channel for channel, _ in overdue_notices(memory, 700.0)] == ["ops"]


def test_trial_that_waits_is_not_silent() -> None:
    memory = running_trial(rule(silent_after=60.0))
    notices_of(event("attempt_ended"), memory)
    assert overdue_notices(memory, 1e6) == []


def system(time: float, watching: Notify, *percents: float) -> Happening:
    metrics = {f"gpu_{number}_percent": percent for number, percent in enumerate(percents)}
    return event("metrics", watching, time=time, group="system_rank_8", metrics=metrics)


def test_idle_gpus_give_a_notice_until_one_works() -> None:
    watching = rule(gpu_idle_after=60.0)
    memory = running_trial(watching)
    notices_of(system(100.0, watching, 0.0, 90.0), memory)
    assert overdue_notices(memory, 500.0) == []
    notices_of(system(510.0, watching, 1.0, 2.0), memory)
    notices_of(system(550.0, watching, 1.0, 2.0), memory)
    [(_, notice)] = overdue_notices(memory, 570.0)
    assert notice.title == "Trial 7 of experiment 3 (mnist) leaves its GPUs idle"
    assert overdue_notices(memory, 600.0) == []
    notices_of(system(610.0, watching, 50.0, 2.0), memory)
    notices_of(system(620.0, watching, 0.0, 0.0), memory)
    assert len(overdue_notices(memory, 680.0)) == 1


def test_machine_without_gpus_is_not_idle() -> None:
    watching = rule(gpu_idle_after=60.0)
    memory = running_trial(watching)
    notices_of(system(100.0, watching), memory)
    assert overdue_notices(memory, 1e6) == []


KINDS = st.sampled_from(
    ["attempt_started", "attempt_ended", "metrics", "validation", "alert", "trial_state"]
)


@given(st.lists(st.tuples(KINDS, st.floats(-10, 10), st.sampled_from(["ACTIVE", "ERROR"]))))
def test_any_order_of_events_tells_a_crossing_once_per_life_of_a_trial(
    sequence: list[tuple[str, float, str]],
) -> None:
    watching = rule(thresholds=[{"metric": "loss", "above": 1.0}], silent_after=60.0)
    memory, has_told, time = Memory(), False, 0.0
    for kind, value, state in sequence:
        time += 1.0
        given = {
            "metrics": {"group": "training", "metrics": {"loss": value}},
            "validation": {"metrics": {"loss": value}},
            "alert": {"title": "x", "level": "error"},
            "trial_state": {"state": state},
        }
        found = notices_of(event(kind, watching, time=time, **given.get(kind, {})), memory)
        is_crossing = kind in ("metrics", "validation") and value > 1.0 and not has_told
        assert len(found) == is_crossing
        has_told = (has_told or is_crossing) and (kind, state) != ("trial_state", "ERROR")
        assert overdue_notices(memory, time) == []
    assert bool(overdue_notices(memory, time + 61.0)) is bool(memory.running)


def test_time_without_a_master_is_no_silence() -> None:
    memory = running_trial(rule(silent_after=60.0))
    memory.started_at = 1000.0
    assert overdue_notices(memory, 1059.0) == []
    assert len(overdue_notices(memory, 1060.0)) == 1
