"""What a follower of an experiment reads."""

from typing import Any

import pytest

from paceline._cluster.messages.experiment_models import Experiment
from paceline._cluster.messages.master_models import Event
from paceline._cluster.messages.states import ExperimentState
from paceline.cli._event_feed import EventFeed

HALVING = {"name": "adaptive_asha", "time_metric": "epochs", "max_time": 16}


def feed(searcher: dict[str, Any], *, smaller_is_better: bool = True) -> EventFeed:
    """Return the feed of an experiment that was created at time 100."""
    return EventFeed(
        Experiment(
            id=3,
            name="x",
            description="",
            labels=[],
            state=ExperimentState.ACTIVE,
            progress=0.0,
            created_at=100.0,
            ended_at=None,
            searcher=searcher["name"],
            metric="loss",
            smaller_is_better=smaller_is_better,
            num_trials=0,
            num_running=0,
            best_trial_id=None,
            best_metric=None,
            error=None,
            parent_trial_id=None,
            config={"searcher": searcher},
        )
    )


def lines(
    view: EventFeed, kind: str, time: float = 101.0, trial: int = 7, **data: Any
) -> list[str]:
    event = Event(id=1, time=time, experiment_id=3, trial_id=trial, kind=kind, data=data)
    return [str(line).rstrip() for line in view.handle(event)]


def test_a_search_tells_one_line_per_thing_that_happens_to_a_trial() -> None:
    view = feed(HALVING)
    told = [
        *lines(view, "trial_created", hparams={"lr": 0.012345, "net": {"size": 8}}),
        *lines(view, "attempt_started", number=1, slots=[0]),
        *lines(view, "metrics", group="training", steps_completed=9, count=1, metrics={"a": 1}),
        *lines(
            view,
            "validation",
            time=165.0,
            steps_completed=10,
            metrics={"epochs": 1, "accuracy": 0.25, "loss": 2.0},
        ),
        *lines(view, "trial_state", state="STOPPING_COMPLETED", reason="stopped by the search"),
        *lines(view, "attempt_ended", number=1, exit={"reason": "killed", "signal": 9}),
        *lines(view, "trial_state", state="COMPLETED", reason="stopped by the search"),
    ]
    assert told == [
        " 0:01 trial 7    created   lr=0.01235 net.size=8",
        " 1:05 trial 7    epoch 1   loss=2 accuracy=0.25  best",
        " 0:01 trial 7    stopped   at epoch 1 by the search",
    ]


def test_an_error_that_mentions_the_search_is_no_stop_by_it() -> None:
    view = feed(HALVING)
    why = "The search needs `epochs` in the validation metrics, but the code never reported it"
    told = [
        *lines(view, "trial_state", state="ERROR", error=why),
        *lines(view, "trial_state", state="STOPPING_KILLED", reason=f"Trial 7: {why}", trial=8),
        *lines(view, "trial_state", state="CANCELED", reason=f"Trial 7: {why}", trial=8),
    ]
    assert told == [
        f" 0:01 trial 7    failed    ({why})",
        f" 0:01 trial 8    canceled  (Trial 7: {why})",
    ]


def test_a_trial_that_cleared_the_top_rung_is_completed_not_stopped() -> None:
    view = feed(HALVING)
    lines(view, "validation", steps_completed=160, metrics={"epochs": 16, "loss": 1.0})
    assert lines(
        view, "trial_state", state="STOPPING_COMPLETED", reason="reached the search's full length"
    ) == [" 0:01 trial 7    completed at epoch 16"]


def test_alerts_are_shown() -> None:
    view = feed({"name": "single"})
    data = {"title": "Loss is high", "description": "It was 9", "level": "warn", "rank": 2}
    assert lines(view, "alert", **data) == [" 0:01 alert: Loss is high: It was 9"]


def test_a_single_trial_shows_reports_of_the_chief_and_checkpoints_and_no_timings() -> None:
    view = feed({"name": "single"})
    told = [
        *lines(view, "attempt_started", number=1, slots=[0, 1]),
        *lines(view, "metrics", group="training", steps_completed=5, metrics={"loss": 0.5}),
        *lines(view, "metrics", group="profiling", steps_completed=5, metrics={"wait_s": 0.1}),
        *lines(view, "metrics", group="system", steps_completed=5, metrics={"cpu_percent": 9.0}),
        *lines(
            view, "metrics", group="training_rank_1", rank=1, steps_completed=5, metrics={"loss": 9}
        ),
        *lines(view, "metrics", group="test", rank=0, steps_completed=5, metrics={"loss": 0.7}),
        *lines(view, "metrics", group="validation", steps_completed=5, metrics={"loss": 0.5}),
        *lines(view, "validation", steps_completed=5, metrics={"loss": {"$float": "nan"}}),
        *lines(view, "checkpoint", uuid="u-1", steps_completed=5),
    ]
    assert told == [
        " 0:01 attempt 1 started on slots 0, 1",
        " 0:01 training after batch 5: loss=0.5",
        " 0:01 test after batch 5: loss=0.7",
        " 0:01 validation after batch 5: loss=nan",
        " 0:01 checkpoint u-1 after batch 5",
    ]


def test_an_attempt_on_several_nodes_has_no_slots_of_one() -> None:
    view = feed({"name": "single"})
    assert lines(view, "attempt_started", number=1, slots=[0, 1], num_nodes=2) == [
        " 0:01 attempt 1 started on 2 nodes"
    ]


def test_an_attempt_on_another_machine_names_it() -> None:
    view = feed({"name": "single"})
    assert lines(view, "attempt_started", number=1, slots=[0, 1], num_nodes=1, node="box") == [
        " 0:01 attempt 1 started on slots 0, 1 of box"
    ]


@pytest.mark.parametrize(
    ("length", "reached"),
    [
        ({"epochs": 4}, "after batch 5, 2 of 4 epochs"),
        ({"records": 100}, "after batch 5"),
        ({"batches": 8}, "after batch 5 of 8"),
        (8, "after batch 5 of 8"),
        (None, "after batch 5"),
    ],
)
def test_the_only_trial_tells_how_far_it_is(length: Any, reached: str) -> None:
    view = feed({"name": "single", "max_length": length})
    metrics = {"loss": 0.5, "epochs": 2}
    for event in ({"kind": "metrics", "group": "training"}, {"kind": "validation"}):
        told = lines(view, **event, steps_completed=5, metrics=metrics)
        assert told == [f" 0:01 {event.get('group', 'validation')} {reached}: loss=0.5 epochs=2"]


@pytest.mark.parametrize(
    ("exit_facts", "expected"),
    [
        ({"code": 1, "outcome": "error", "error": "ValueError: x"}, ["exit code 1: ValueError: x"]),
        ({"signal": 9}, ["signal 9"]),
        ({"code": 127, "detail": "not found"}, ["exit code 127: not found"]),
        ({"code": 0}, []),
        ({"code": 0, "outcome": "preempted"}, []),
        ({"signal": 6, "outcome": "completed"}, []),
    ],
)
def test_an_attempt_that_failed_says_how(exit_facts: dict[str, Any], expected: list[str]) -> None:
    told = lines(feed({"name": "random"}), "attempt_ended", number=1, exit=exit_facts)
    assert told == [f" 0:01 trial 7    attempt 1 ended with {how}" for how in expected]


def test_the_reason_of_a_failure_is_told_once() -> None:
    view = feed({"name": "random"})
    end = {"code": 1, "error": "ValueError: bad"}
    assert lines(view, "attempt_ended", number=2, exit=end) == [
        " 0:01 trial 7    attempt 2 ended with exit code 1: ValueError: bad"
    ]
    error = "exit code 1: ValueError: bad"
    assert lines(view, "trial_state", state="ERROR", error=error, reason=None) == [
        " 0:01 trial 7    failed"
    ]
    assert view.has_told(error)
    assert not view.has_told("another")


def test_an_error_of_several_lines_is_told_by_its_first() -> None:
    view = feed({"name": "random"})
    end = {"code": 1, "error": "ValueError: bad\nin shard 3"}
    assert lines(view, "attempt_ended", number=1, exit=end) == [
        " 0:01 trial 7    attempt 1 ended with exit code 1: ValueError: bad"
    ]
    assert view.has_told("The attempt failed (exit code 1: ValueError: bad\nin shard 3).")


def test_a_reopened_trial_that_fails_again_is_told_again() -> None:
    view = feed({"name": "random"})
    lines(view, "trial_state", state="ERROR", error="x", reason=None)
    assert lines(view, "trial_state", state="ACTIVE", reason="continued", error=None) == []
    assert lines(view, "trial_state", state="ERROR", error="y", reason="continued") == [
        " 0:01 trial 7    failed    (y)"
    ]


def test_a_trial_whose_code_refused_it_has_not_completed() -> None:
    view = feed({"name": "random"})
    assert lines(view, "trial_state", state="COMPLETED", reason="invalid_hp", error=None) == [
        " 0:01 trial 7    refused   by its code (InvalidHP)"
    ]


def test_a_trial_that_failed_names_its_error_and_a_restart_is_told() -> None:
    view = feed({"name": "random"})
    assert lines(view, "attempt_started", number=1, slots=[0]) == []
    assert lines(view, "attempt_started", number=2, slots=[1]) == [
        " 0:01 trial 7    attempt 2 started on slot 1"
    ]
    assert lines(view, "trial_state", state="ERROR", error="ValueError: bad", reason=None) == [
        " 0:01 trial 7    failed    (ValueError: bad)"
    ]


@pytest.mark.parametrize(
    ("smaller_is_better", "values", "best"),
    [
        (True, [3.0, 2.0, 2.5], "2 (trial 2)"),
        (False, [3.0, 2.0, 3.5], "3.5 (trial 3)"),
        (True, [{"$float": "nan"}, 4.0, {"$float": "-inf"}], "4 (trial 2)"),
        (False, [{"$float": "inf"}, 4.0], "4 (trial 2)"),
        (True, [True, "text"], None),
    ],
)
def test_the_summary_counts_trials_and_knows_the_best(
    smaller_is_better: bool, values: list[Any], best: str | None
) -> None:
    view = feed(HALVING, smaller_is_better=smaller_is_better)
    for trial, value in enumerate(values, start=1):
        lines(view, "trial_created", trial=trial, hparams={})
        lines(view, "validation", trial=trial, steps_completed=1, metrics={"loss": value})
    lines(view, "attempt_started", trial=2, number=1, slots=[0])
    lines(view, "trial_state", trial=1, state="COMPLETED", reason=None)
    lines(view, "progress", progress=0.25)
    summary = f" 25% · 1/{len(values)} ended · 1 running"
    assert view.summary() == summary + (f" · best loss {best}" if best else "")


def test_a_pause_says_how_to_go_on() -> None:
    view = feed(HALVING)
    assert lines(view, "experiment_state", state="ACTIVE", error=None) == []
    assert lines(view, "experiment_state", state="PAUSED", error=None) == [
        " 0:01 experiment paused; `paceline e activate 3` goes on"
    ]
    assert lines(view, "experiment_state", state="ACTIVE", error=None) == [
        " 0:01 experiment active again"
    ]


def test_an_unknown_kind_of_event_is_passed_over() -> None:
    assert lines(feed(HALVING), "later_invention", anything=1) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("single", " 25% · 30s left"),
        ("random", " 25% · 30s left · 0/1 ended · 1 running"),
    ],
)
def test_the_time_left_counts_from_the_first_trial(name: str, told: str) -> None:
    view = feed({"name": name})
    assert "left" not in view.summary()
    lines(view, "trial_created", hparams={})
    # It has waited for a slot until then.
    lines(view, "attempt_started", time=200.0, number=1, slots=[0])
    assert "left" not in view.summary()
    lines(view, "progress", time=210.0, progress=0.25)
    assert view.summary() == told
    lines(view, "progress", time=250.0, progress=1.0)
    assert "left" not in view.summary()
