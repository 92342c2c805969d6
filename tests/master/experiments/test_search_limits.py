"""Limits of searches in a master, trials that pause or are copied, and ends for want of memory."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline._cluster.master.experiments.experiment_edits import edit_experiment
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.searches.search_limits import SearchClock, end_reason, used_limits
from paceline._cluster.master.searches.stored_searches import Searches
from paceline._cluster.messages.states import ErrorKind
from paceline.config import ConfigError
from paceline.search import Exited, ExitReason, Reported

LONG = {"max_trials": 4, "max_concurrent_trials": 2}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves the steady clock on."""
    start, moved = time.monotonic(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: start + moved[0])

    def move(seconds: float) -> None:
        moved[0] += seconds

    return move


def used(bench: Any, experiment_id: int) -> dict[str, tuple[Any, Any]]:
    with bench.database.read() as connection:
        found = used_limits(connection, bench.experiment(experiment_id))
    return {one["name"]: (one["used"], one["left"]) for one in found}


def why(bench: Any, experiment_id: int) -> str | None:
    with bench.database.read() as connection:
        row = bench.experiment(experiment_id)
        return end_reason(row, used_limits(connection, row))


def test_slot_hours_end_a_search_however_the_clock_of_the_day_jumps(
    bench: Any, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_id = bench.create("random", searcher=LONG | {"limits": {"max_slot_hours": 0.5}})
    first = bench.start(1)
    second = bench.live_attempt(2).id
    step = SearchClock(bench.changes)
    bench.write(step)
    today = time.time()
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda jump=jump: today + jump)
        clock(400)
        bench.write(step)
    assert bench.trial_states(experiment_id) == ["ACTIVE", "ACTIVE"]
    slot_hours, left = used(bench, experiment_id)["max_slot_hours"]
    assert slot_hours == pytest.approx(1600 / 3600, abs=0.01)
    assert left == pytest.approx(0.5 - slot_hours)
    # A new master goes on from what is stored; the time of the day gives the gap, never less.
    monkeypatch.setattr(time, "time", lambda: today - 1e6)
    step = SearchClock(bench.changes)
    bench.write(step)
    clock(101)
    bench.write(step)
    assert bench.trial_states(experiment_id) == ["STOPPING_COMPLETED"] * 2
    assert "`max_slot_hours`" in bench.trial(1).stop_reason
    bench.leave(first)
    assert why(bench, experiment_id) is None
    bench.leave(second)
    assert bench.state(experiment_id) == "COMPLETED"
    assert len(bench.trials(experiment_id)) == 2
    limit = "the search has reached its limit `max_slot_hours` of 0.5, with 2 of 4 trials"
    assert why(bench, experiment_id) == limit
    bench.check_replay(experiment_id)


def test_pauses_take_no_wall_time(bench: Any, clock: Callable[[float], None]) -> None:
    experiment_id = bench.create("random", searcher=LONG | {"limits": {"max_wall_time": 100}})
    step = SearchClock(bench.changes)
    bench.write(step)
    bench.command("pause", experiment_id)
    clock(500)
    bench.write(step)
    bench.command("activate", experiment_id)
    clock(70)
    bench.write(step)
    assert bench.state(experiment_id) == "ACTIVE"
    assert used(bench, experiment_id)["max_wall_time"][0] == pytest.approx(70, abs=5)
    clock(70)
    bench.write(step)
    # No trial had begun.
    assert (bench.state(experiment_id), len(bench.trials(experiment_id))) == ("COMPLETED", 2)


def test_used_time_is_that_of_now_and_that_of_the_end_is_kept(
    bench: Any, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a search goes on much later: the time between costs nothing."""
    limits = {"max_trials": 1, "max_wall_time": 1000, "max_slot_hours": 1}
    experiment_id = bench.create("random", searcher=LONG | {"max_trials": 1, "limits": limits})
    attempt = bench.start(1)
    step = SearchClock(bench.changes)
    bench.write(step)
    today = time.time()
    move = [0.0]
    monkeypatch.setattr(time, "time", lambda: today + move[0])

    def passes(seconds: float) -> None:
        clock(seconds)
        move[0] += seconds
        bench.write(step)

    # It is told nothing in so short a time.
    passes(30)
    assert [one["type"] for one in bench.inputs(experiment_id)].count("spent") == 0
    assert used(bench, experiment_id)["max_wall_time"] == pytest.approx((30, 970), abs=3)
    assert used(bench, experiment_id)["max_slot_hours"][0] * 3600 == pytest.approx(30, abs=3)
    bench.end(attempt)
    assert bench.state(experiment_id) == "COMPLETED"
    passes(0.5)
    passes(9000)
    assert used(bench, experiment_id)["max_wall_time"] == pytest.approx((30, 970), abs=3)
    bench.command("continue_experiment", experiment_id, {}, {"max_trials": 2})
    # A new master goes on from there, too.
    step = SearchClock(bench.changes)
    bench.write(step)
    passes(100)
    assert bench.state(experiment_id) == "ACTIVE"
    assert used(bench, experiment_id)["max_wall_time"] == pytest.approx((130, 870), abs=6)
    bench.check_replay(experiment_id)


def test_a_canceled_search_that_goes_on_under_the_same_limits_pays_for_no_time_between(
    bench: Any, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_id = bench.create("random", searcher=LONG | {"limits": {"max_wall_time": 1000}})
    attempts = [bench.start(1), bench.live_attempt(2).id]
    today, moved = time.time(), [0.0]
    monkeypatch.setattr(time, "time", lambda: today + moved[0])
    step = SearchClock(bench.changes)
    for seconds in (0, 30, 9000):
        if seconds == 9000:
            bench.command("cancel", experiment_id)
            for attempt in attempts:
                bench.leave(attempt)
            assert bench.state(experiment_id) == "CANCELED"
            bench.write(step)
        clock(seconds)
        moved[0] += seconds
        bench.write(step)
    bench.command("continue_experiment", experiment_id, {})
    bench.write(SearchClock(bench.changes))
    assert bench.state(experiment_id) == "ACTIVE"
    assert used(bench, experiment_id)["max_wall_time"] == pytest.approx((30, 970), abs=3)
    bench.check_replay(experiment_id)


def edit(bench: Any, experiment_id: int, **limits: Any) -> None:
    bench.write(lambda t: edit_experiment(t, bench.changes, experiment_id, limits=limits))


def test_limits_are_changed_while_the_search_runs_as_stored_inputs(bench: Any) -> None:
    experiment_id = bench.create("random", searcher=LONG)
    edit(bench, experiment_id, max_trials=2, target=0.1)
    bench.end(bench.start(1))
    assert len(bench.trials(experiment_id)) == 2
    edit(bench, experiment_id, max_trials=6, target=None)
    assert len(bench.trials(experiment_id)) == 3
    assert [one["type"] for one in bench.inputs(experiment_id)] == [
        *("started", "limited", "exited", "limited")
    ]
    limits = bench.experiment(experiment_id).config["searcher"]["limits"]
    assert (limits["max_trials"], limits["target"]) == (6, None)
    assert used(bench, experiment_id) == {"max_trials": (3, 3)}
    bench.check_replay(experiment_id)


def test_a_method_that_compares_no_trials_ends_at_a_target(bench: Any) -> None:
    """A random search is told reports for its target, also values from before it was set."""
    aimed = bench.create("random", searcher=LONG | {"limits": {"target": 0.1}})
    bench.validate(bench.start(1), 1, loss=0.05)
    assert bench.trial_states(aimed) == ["STOPPING_COMPLETED"] * 2
    bench.check_replay(aimed)
    later = bench.create("random", searcher=LONG)
    bench.validate(bench.start(3), 1, loss=0.05)
    edit(bench, later, target=0.01)
    assert bench.trial_states(later) == ["ACTIVE", "ACTIVE"]
    edit(bench, later, target=0.1)
    assert bench.trial_states(later) == ["STOPPING_COMPLETED"] * 2
    bench.check_replay(later)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_slot_hours": -1}, {"max_slot_hours": 0}, {"max_wall_time": float("inf")},
        {"target": float("nan")}, {"max_trials": 0}, {"max_failures": 1.5}, {"max_hours": 1},
    ],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused_and_change_nothing(
    bench: Any, limits: dict[str, Any]
) -> None:
    experiment_id = bench.create("random", searcher=LONG)
    with pytest.raises(ConfigError, match="searcher.limits"):
        edit(bench, experiment_id, **limits)
    assert "limits" not in json.dumps(bench.inputs(experiment_id))
    # What the method plans is all that it has.
    assert used(bench, experiment_id) == {"max_trials": (2, 2)}


def test_so_many_failures_are_an_error_that_says_so(bench: Any) -> None:
    experiment_id = bench.create(
        "random", max_restarts=0, searcher=LONG | {"limits": {"max_failures": 1}}
    )
    attempt_id = bench.start(1)
    other = bench.live_attempt(2).id
    bench.end(attempt_id, code=1, detail="boom")
    bench.leave(other)
    assert bench.state(experiment_id) == "ERROR"
    assert "limit `max_failures`" in bench.experiment(experiment_id).error
    assert "boom" in bench.experiment(experiment_id).error


@pytest.mark.parametrize("kind", ["random", "halving", "adaptive"])
@pytest.mark.parametrize("is_canceled", [False, True])
def test_an_ended_search_goes_on_with_more_trials(bench: Any, kind: str, is_canceled: bool) -> None:
    experiment_id = bench.create(kind)
    if is_canceled:
        bench.command("cancel", experiment_id)
    for _ in range(100):
        if bench.state(experiment_id) in ("COMPLETED", "CANCELED"):
            break
        bench.schedule()
        for attempt in bench.live_attempts():
            bench.validate(attempt.id, 8, loss=0.5)
            bench.leave(attempt.id)
    before = len(bench.trials(experiment_id))
    bench.command("continue_experiment", experiment_id, {}, {"max_trials": before + 3})
    assert bench.state(experiment_id) == "ACTIVE"
    for _ in range(100):
        if bench.state(experiment_id) == "COMPLETED":
            break
        bench.schedule()
        for attempt in bench.live_attempts():
            bench.validate(attempt.id, 8, loss=0.5)
            bench.leave(attempt.id)
    assert bench.state(experiment_id) == "COMPLETED"
    assert len(bench.trials(experiment_id)) == before + 3
    bench.check_replay(experiment_id)
    with pytest.raises(RefusedError, match=r"nothing_to_continue|must have trials to go on with"):
        bench.command("continue_experiment", experiment_id, {}, {"max_trials": 1})
    assert bench.state(experiment_id) == "COMPLETED"


@pytest.mark.long
def test_a_killed_master_decides_as_stored_in_a_search_of_100_trials_with_limits(
    bench: Any,
) -> None:
    """Each step may be the last of a master: another reads all from the database."""
    experiment_id = bench.create(
        "adaptive", searcher={"max_trials": 100, "limits": {"max_slot_hours": 50}}
    )
    dice = random.Random(3)
    for step in range(400):
        searches = bench.searches if dice.random() < 0.8 else Searches()
        bench.changes.searches = bench.changes.search_operations._searches = searches
        bench.searches = searches
        live = [row for row in bench.trials(experiment_id) if row.state == "ACTIVE"]
        if not live:
            break
        if step % 50 == 20:
            edit(bench, experiment_id, max_trials=dice.randint(20, 120))
        one = dice.choice(live)
        given: Any = Reported(
            request_id=one.request_id, time=dice.choice([1.0, 4.0, 8.0]), metric=dice.random()
        )
        if dice.random() < 0.3:
            given = Exited(request_id=one.request_id, reason=ExitReason.COMPLETED)
        operations = bench.changes.search_operations
        bench.write(lambda t, given=given: operations.apply_input(t, experiment_id, given))  # noqa: B023
    bench.check_replay(experiment_id)


def test_a_trial_at_its_rung_gives_its_slot_away_until_it_is_promoted(bench: Any) -> None:
    experiment_id = bench.create(
        "halving", searcher={"max_trials": 2, "max_concurrent_trials": 1, "promotion": True}
    )
    first = bench.start(1)
    bench.validate(first, 2, loss=0.1)
    assert bench.attempt(first).preempt_reason == "it waits for the search"
    bench.checkpoint(first, 2, "at-the-rung")
    bench.leave(first)
    second = bench.start(2)
    assert [row.trial_id for row in bench.live_attempts()] == [2]
    bench.validate(second, 2, loss=0.2)
    bench.leave(second)
    # The first is the best of two, and resumes from where it paused.
    assert (bench.trial(1).is_waiting, bench.trial_states(experiment_id)) == (
        False, ["ACTIVE", "COMPLETED"],
    )  # fmt: skip
    again = bench.start(1)
    assert bench.attempt(again).resumed_from == "at-the-rung"
    bench.validate(again, 4, loss=0.1)
    bench.leave(again)
    assert bench.state(experiment_id) == "COMPLETED"
    bench.check_replay(experiment_id)


def test_a_copy_starts_from_a_checkpoint_that_retention_then_keeps(bench: Any) -> None:
    searcher = {"name": "pbt", "max_trials": 2, "max_time": 8, "interval": 2, "quantile": 0.5}
    experiment_id = bench.create("single", searcher=searcher | {"time_metric": "epochs"})
    good, bad = bench.start(1), bench.live_attempt(2).id
    bench.checkpoint(good, 2, "of-the-good-one")
    bench.validate(good, 2, loss=0.1)
    bench.validate(bad, 2, loss=0.9)
    assert bench.trial_states(experiment_id) == ["ACTIVE", "STOPPING_COMPLETED", "ACTIVE"]
    assert bench.trial(3).source_checkpoint == "of-the-good-one"
    assert bench.trial(3).target_length == 6
    bench.check_replay(experiment_id)


@pytest.mark.parametrize("has_stored", [False, True])
def test_a_trial_without_enough_memory_is_not_started_again_from_its_beginning(
    bench: Any, has_stored: bool
) -> None:
    experiment_id = bench.create("random", searcher=LONG)
    attempt_id = bench.start(1)
    if has_stored:
        bench.checkpoint(attempt_id, 2)
    bench.end(attempt_id, code=1, detail="torch.OutOfMemoryError: CUDA out of memory. Tried")
    assert bench.attempt(attempt_id).exit["kind"] == ErrorKind.MEMORY.value
    if has_stored:
        assert (bench.trial(1).state, bench.trial(1).restarts) == ("ACTIVE", 1)
        return
    assert (bench.trial(1).state, bench.trial(1).error_kind) == ("ERROR", "memory")
    assert "ran out of memory, so no restart follows" in bench.trial(1).error
    assert bench.inputs(experiment_id)[-1]["is_out_of_memory"] is True
    bench.check_replay(experiment_id)


def test_a_sampler_learns_from_ended_trials_of_another_search(bench: Any) -> None:
    earlier = bench.create("random", searcher={"max_trials": 2})
    for trial_id in (1, 2):
        attempt_id = bench.start(trial_id)
        bench.validate(attempt_id, 1, loss=trial_id / 10)
        bench.end(attempt_id)
    sampled = LONG | {"sampler": {"name": "optuna"}, "warm_start_from": [earlier]}
    pytest.importorskip("optuna")
    experiment_id = bench.create("random", searcher=sampled)
    search = bench.write(lambda t: bench.searches.peek(t, experiment_id))
    assert [(seen.loss, seen.is_earlier) for seen in search.observations()] == [
        (0.1, True), (0.2, True),
    ]  # fmt: skip
    assert "learns from 2 of 2 ended trials" in bench.experiment(experiment_id).warnings[-1]
    bench.check_replay(experiment_id)
    # Values outside of the space tell nothing, which is told.
    narrow = {"lr": {"type": "double", "minval": 5, "maxval": 6, "count": 4}}
    other = bench.create("random", searcher=sampled, hyperparameters=narrow)
    assert "learns from 0 of 2 ended trials" in bench.experiment(other).warnings[-1]
    with pytest.raises(RefusedError, match="must name experiments by their ids"):
        bench.create("random", searcher=sampled | {"warm_start_from": ["/etc/passwd"]})
    with pytest.raises(RefusedError, match="must search for the metric 'accuracy'"):
        bench.create("random", searcher=sampled | {"metric": "accuracy"})


def test_a_class_that_no_package_names_as_a_sampler_is_refused(bench: Any) -> None:
    for name in ("os:system", "paceline.search._samplers:GridSampler", "unknown"):
        with pytest.raises(RefusedError, match=f"`{name}` must be named by an entry point"):
            bench.create("random", searcher=LONG | {"sampler": {"name": name}})
