from collections.abc import Callable
from typing import Any

import pytest

from paceline._cluster.master.experiments.state_decisions import (
    NotFoundError,
    RefusedError,
    TransitionError,
)
from paceline._cluster.master.store import tables
from paceline._cluster.messages.states import ExitReason
from paceline.config import ConfigError
from paceline.journal import EarlyExitReported

# How to bring a `random` experiment of three trials, two at a time, into each state.
STATES = [
    "ACTIVE", "PAUSED", "STOPPING_COMPLETED", "STOPPING_CANCELED", "STOPPING_KILLED",
    "STOPPING_ERROR", "COMPLETED", "CANCELED", "ERROR",
]  # fmt: skip


@pytest.fixture
def in_state(bench: Any) -> Callable[[str], int]:
    """Return a function that makes an experiment in a state; a stopping one has an attempt."""

    def bring(state: str) -> int:
        experiment_id: int = bench.create("random", max_restarts=0)
        if state == "ACTIVE":
            bench.start(1)
        elif state == "PAUSED":
            bench.start(1)
            bench.command("pause", experiment_id)
        elif state in ("STOPPING_CANCELED", "STOPPING_KILLED"):
            bench.start(1)
            name = "cancel" if state == "STOPPING_CANCELED" else "kill"
            bench.command(name, experiment_id)
        elif state in ("STOPPING_COMPLETED", "STOPPING_ERROR"):
            from paceline._cluster.messages.states import ExperimentState

            bench.start(1)
            wanted = ExperimentState(state)
            bench.write(lambda t: bench.changes.stop_experiment(t, experiment_id, wanted))
        elif state == "CANCELED":
            bench.command("kill", experiment_id)
        else:
            for trial_id in (1, 2, 3):
                bench.end(bench.start(trial_id), code=0 if state == "COMPLETED" else 1)
        assert bench.state(experiment_id) == state
        return experiment_id

    return bring


REFUSED = "refused"


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [
        (
            "pause",
            ["PAUSED", "PAUSED", REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED],
        ),
        (
            "activate",
            ["ACTIVE", "ACTIVE", REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED],
        ),
        (
            "cancel",
            ["STOPPING_CANCELED", "STOPPING_CANCELED", "STOPPING_COMPLETED", "STOPPING_CANCELED",
             "STOPPING_KILLED", "STOPPING_ERROR", "COMPLETED", "CANCELED", "ERROR"],
        ),
        (
            "kill",
            ["STOPPING_KILLED", "STOPPING_KILLED", "STOPPING_KILLED", "STOPPING_KILLED",
             "STOPPING_KILLED", "STOPPING_ERROR", "COMPLETED", "CANCELED", "ERROR"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("state", STATES)
def test_each_command_does_in_each_state_what_the_table_says(
    bench: Any, in_state: Callable[[str], int], name: str, outcomes: list[str], state: str
) -> None:
    experiment_id = in_state(state)
    expected = outcomes[STATES.index(state)]
    before = bench.trial_states(experiment_id)
    if expected == REFUSED:
        with pytest.raises(TransitionError, match=f"Experiment {experiment_id} must"):
            bench.command(name, experiment_id)
        assert bench.state(experiment_id) == state
        assert bench.trial_states(experiment_id) == before
    else:
        bench.command(name, experiment_id)
        assert bench.state(experiment_id) == expected


@pytest.mark.parametrize("name", ["pause", "activate", "cancel", "kill", "continue_experiment"])
def test_an_unknown_experiment_is_refused(bench: Any, name: str) -> None:
    arguments = [{}] if name == "continue_experiment" else []
    with pytest.raises(NotFoundError, match="no experiment 7"):
        bench.command(name, 7, *arguments)


def test_a_paused_experiment_lets_attempts_leave_and_starts_none(bench: Any) -> None:
    experiment_id = bench.create("random")
    one = bench.start(1)
    two = bench.live_attempt(2).id
    bench.command("pause", experiment_id)
    assert [row.preempt_reason for row in bench.rows(tables.attempts)] == ["paused"] * 2
    assert {one, two} <= set(bench.controls.noted)
    bench.checkpoint(one, 5, "saved")
    bench.leave(one)
    bench.leave(two)
    assert bench.trial_states(experiment_id) == ["ACTIVE", "ACTIVE"]
    assert bench.schedule() == []
    bench.command("activate", experiment_id)
    assert len(bench.schedule()) == 2
    again = bench.live_attempt(1)
    assert (again.number, again.resumed_from, again.resumed_steps) == (2, "saved", 5)
    assert bench.trial(1).restarts == 0


def test_a_trial_that_completes_while_paused_has_ended_and_the_next_waits(bench: Any) -> None:
    experiment_id = bench.create("random", searcher={"max_concurrent_trials": 1})
    attempt_id = bench.start(1)
    bench.command("pause", experiment_id)
    bench.end(attempt_id)
    assert bench.trial_states(experiment_id) == ["COMPLETED", "ACTIVE"]
    assert bench.schedule() == []


def test_an_experiment_created_paused_starts_when_activated(bench: Any) -> None:
    experiment_id = bench.create("single", activate=False)
    assert bench.state(experiment_id) == "PAUSED"
    assert bench.schedule() == []
    bench.command("activate", experiment_id)
    assert len(bench.schedule()) == 1


def test_cancel_lets_attempts_save_and_then_ends(bench: Any) -> None:
    experiment_id = bench.create("random")
    attempt_id = bench.start(1)
    bench.send(bench.live_attempt(2).id)
    bench.command("cancel", experiment_id)
    rows = bench.rows(tables.attempts)
    assert [(row.preempt_reason, row.should_kill) for row in rows] == [("canceled", False)] * 2
    for row in rows:
        bench.leave(row.id)
    assert bench.trial_states(experiment_id) == ["CANCELED", "CANCELED"]
    assert bench.state(experiment_id) == "CANCELED"
    assert len(bench.inputs(experiment_id)) == 1
    assert bench.attempt(attempt_id).state == "ENDED"
    bench.check_replay(experiment_id)


def test_cancel_without_attempts_ends_at_once(bench: Any) -> None:
    experiment_id = bench.create("adaptive")
    bench.command("cancel", experiment_id)
    assert bench.state(experiment_id) == "CANCELED"
    assert set(bench.trial_states(experiment_id)) == {"CANCELED"}


def test_kill_after_cancel_kills_what_does_not_leave(bench: Any) -> None:
    experiment_id = bench.create("single")
    attempt_id = bench.start(1)
    bench.command("cancel", experiment_id)
    assert not bench.attempt(attempt_id).should_kill
    bench.command("kill", experiment_id)
    assert bench.attempt(attempt_id).should_kill
    bench.end(attempt_id, code=137, signal=9, reason=ExitReason.KILLED)
    assert bench.state(experiment_id) == "CANCELED"
    assert bench.trial(1).error is None


def test_killing_one_trial_is_told_to_the_search_which_goes_on(bench: Any) -> None:
    experiment_id = bench.create("random")
    attempt_id = bench.start(1)
    bench.command("kill_trial", 1)
    assert bench.trial(1).state == "STOPPING_KILLED"
    bench.end(attempt_id, code=137, signal=9, reason=ExitReason.KILLED)
    assert (bench.trial(1).state, bench.trial(1).stop_reason) == ("CANCELED", "killed by the user")
    assert bench.inputs(experiment_id)[-1]["reason"] == "canceled"
    assert len(bench.trials(experiment_id)) == 3
    assert bench.state(experiment_id) == "ACTIVE"
    bench.check_replay(experiment_id)


def test_killing_a_waiting_trial_ends_it_at_once_and_killing_it_again_does_nothing(
    bench: Any,
) -> None:
    experiment_id = bench.create("single")
    bench.command("kill_trial", 1)
    assert bench.trial(1).state == "CANCELED"
    assert bench.state(experiment_id) == "CANCELED"
    bench.command("kill_trial", 1)
    assert bench.trial(1).state == "CANCELED"
    with pytest.raises(NotFoundError, match="no trial 7"):
        bench.command("kill_trial", 7)


def test_killing_the_last_trial_of_a_paused_experiment_ends_it(bench: Any) -> None:
    experiment_id = bench.create("single", activate=False)
    bench.command("kill_trial", 1)
    assert bench.state(experiment_id) == "CANCELED"


def test_too_many_slots_are_refused_with_the_number_there_is(bench: Any) -> None:
    with pytest.raises(RefusedError, match="at most 4, the slots of this master, but got 5") as e:
        bench.create("single", resources={"slots_per_trial": 5})
    assert e.value.code == "not_enough_slots"
    assert bench.rows(tables.experiments) == []


def test_a_seed_is_drawn_and_stored_unless_given(bench: Any) -> None:
    given = bench.create("single", reproducibility={"experiment_seed": 12})
    drawn = [bench.create("single", reproducibility={}) for _ in range(3)]
    assert bench.experiment(given).seed == 12
    seeds = [bench.experiment(experiment_id).seed for experiment_id in drawn]
    assert len(set(seeds)) > 1
    for experiment_id in drawn:
        row = bench.experiment(experiment_id)
        assert row.config["reproducibility"]["experiment_seed"] == row.seed
        bench.check_replay(experiment_id)


# ---- continuing a trial ----------------------------------------------------------------------


def finished_trial(bench: Any, search: str = "random") -> tuple[int, str]:
    """Return an experiment whose first trial has a checkpoint at step 3."""
    space = {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "net": {"width": {"type": "int", "minval": 1, "maxval": 64}, "kind": "mlp"},
    }
    experiment_id = bench.create(search, hyperparameters=space)
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 3, loss=0.5)
    return experiment_id, bench.checkpoint(attempt_id, 3)


def test_a_continued_trial_is_a_single_experiment_from_its_latest_checkpoint(bench: Any) -> None:
    _, uuid = finished_trial(bench)
    created = bench.command("continue_trial", 1, {"max_restarts": 9}, activate=True)
    row = bench.experiment(created)
    assert (row.config["searcher"]["name"], row.parent_trial_id) == ("single", 1)
    assert row.config["searcher"]["metric"] == "loss"
    assert row.config["max_restarts"] == 9
    [trial] = bench.trials(created)
    assert trial.hparams == bench.trial(1).hparams
    attempt_id = bench.start(trial.id)
    attempt = bench.attempt(attempt_id)
    # A warm start brings weights, not steps.
    assert (attempt.resumed_from, attempt.resumed_steps) == (uuid, 0)
    bench.check_replay(created)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [({}, {"epochs": 4}), ({"searcher": {"max_length": {"batches": 9}}}, {"batches": 9})],
)
def test_a_continued_trial_has_the_length_of_its_search_unless_it_gets_another(
    bench: Any, overrides: dict[str, Any], length: dict[str, int]
) -> None:
    finished_trial(bench, "halving")
    created = bench.command("continue_trial", 1, overrides, activate=True)
    assert bench.experiment(created).config["searcher"]["max_length"] == length


def test_a_continued_trial_may_change_single_hyperparameters(bench: Any) -> None:
    finished_trial(bench)
    overrides = {"hyperparameters": {"net": {"kind": "cnn"}}}
    created = bench.command("continue_trial", 1, overrides, activate=False)
    assert bench.state(created) == "PAUSED"
    [trial] = bench.trials(created)
    old = bench.trial(1).hparams
    assert trial.hparams == old | {"net": old["net"] | {"kind": "cnn"}}


@pytest.mark.parametrize(
    ("is_reported", "is_trained", "state"),
    [(True, False, "ERROR"), (True, True, "COMPLETED"), (False, False, "COMPLETED")],
)
def test_a_continued_trial_must_train_further_where_its_source_has_reported(
    bench: Any, is_reported: bool, is_trained: bool, state: str
) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    if is_reported:
        bench.validate(attempt_id, 3, loss=0.5)
    bench.checkpoint(attempt_id, 3)
    bench.end(attempt_id)
    created = bench.command("continue_trial", 1, {}, activate=True)
    attempt_id = bench.start(2)
    if is_trained:
        bench.validate(attempt_id, 4, loss=0.4)
    bench.end(attempt_id)
    row = bench.experiment(created)
    assert (row.state, "must train further than trial 1" in (row.error or "")) == (
        state,
        state == "ERROR",
    )
    bench.check_replay(created)


def test_a_search_over_another_trial_that_reports_nothing_ends_at_its_first_trial(
    bench: Any,
) -> None:
    finished_trial(bench, "single")
    bench.end(bench.rows(tables.attempts)[0].id)
    created = bench.create("halving", searcher={"source_trial_id": 1})
    first = bench.trials(created)[0]
    bench.end(bench.start(first.id))
    row = bench.experiment(created)
    # What a search needs is its metric: without any, further trials would be as useless.
    assert f"Trial {first.id}: " in (row.error or "")
    assert "must train further" not in row.error
    assert row.state in ("ERROR", "STOPPING_ERROR")
    bench.check_replay(created)


def test_a_trial_without_a_checkpoint_cannot_be_continued(bench: Any) -> None:
    bench.create("single")
    with pytest.raises(RefusedError, match="Trial 1 must have a checkpoint") as e:
        bench.command("continue_trial", 1, {}, activate=True)
    assert e.value.code == "no_checkpoint"
    with pytest.raises(NotFoundError, match="no trial 9"):
        bench.command("continue_trial", 9, {}, activate=True)


def test_overrides_that_do_not_fit_are_refused_and_create_nothing(bench: Any) -> None:
    finished_trial(bench)
    with pytest.raises(ConfigError, match="max_restarts"):
        bench.command("continue_trial", 1, {"max_restarts": -1}, activate=True)
    assert len(bench.rows(tables.experiments)) == 1


@pytest.mark.parametrize(
    ("uuid", "pattern"), [("nowhere", "'nowhere' is unknown"), ("gone", "'gone' was deleted")]
)
def test_a_source_checkpoint_must_be_there(bench: Any, uuid: str, pattern: str) -> None:
    bench.create("single")
    bench.checkpoint(bench.start(1), 1, "gone")
    bench.write(lambda t: t.connection.execute(tables.checkpoints.update().values(state="DELETED")))
    with pytest.raises(RefusedError, match=pattern):
        bench.create("single", searcher={"source_checkpoint_uuid": uuid})


def test_all_trials_of_a_search_may_start_from_another_trial(bench: Any) -> None:
    _, uuid = finished_trial(bench, "single")
    created = bench.create("random", searcher={"source_trial_id": 1})
    assert {row.source_checkpoint for row in bench.trials(created)} == {uuid}
    assert bench.experiment(created).parent_trial_id == 1


# ---- continuing an experiment ----------------------------------------------------------------


def test_a_failed_single_search_that_is_continued_ends_as_its_trial_does(bench: Any) -> None:
    experiment_id = bench.create("single", max_restarts=0)
    attempt_id = bench.start(1)
    bench.checkpoint(attempt_id, 4, "saved")
    bench.end(attempt_id, code=1)
    assert bench.state(experiment_id) == "ERROR"
    bench.command("continue_experiment", experiment_id, {})
    row = bench.experiment(experiment_id)
    assert (row.state, row.error, row.ended_at, row.progress) == ("ACTIVE", None, None, 0.0)
    trial = bench.trial(1)
    assert (trial.state, trial.restarts, trial.error) == ("ACTIVE", 0, None)
    again = bench.start(1)
    assert (bench.attempt(again).number, bench.attempt(again).resumed_from) == (2, "saved")
    bench.end(again)
    assert (bench.state(experiment_id), bench.trial(1).state) == ("COMPLETED", "COMPLETED")
    assert bench.experiment(experiment_id).error is None


def test_a_completed_single_search_that_is_continued_and_fails_is_an_error(bench: Any) -> None:
    experiment_id = bench.create("single", max_restarts=0)
    bench.end(bench.start(1))
    bench.command("continue_experiment", experiment_id, {})
    bench.end(bench.start(1), code=1)
    assert bench.state(experiment_id) == "ERROR"
    assert "All trials failed. Trial 1" in bench.experiment(experiment_id).error


def test_a_canceled_single_search_goes_on_where_it_was(bench: Any) -> None:
    experiment_id = bench.create("single")
    attempt_id = bench.start(1)
    bench.command("cancel", experiment_id)
    bench.checkpoint(attempt_id, 4, "saved")
    bench.leave(attempt_id)
    assert bench.state(experiment_id) == "CANCELED"
    bench.command("continue_experiment", experiment_id, {})
    again = bench.start(1)
    assert bench.attempt(again).resumed_from == "saved"
    bench.end(again)
    assert bench.state(experiment_id) == "COMPLETED"


def test_a_single_search_takes_overrides_when_continued(bench: Any) -> None:
    experiment_id = bench.create("single", searcher={"max_length": {"epochs": 2}})
    bench.end(bench.start(1))
    overrides = {"searcher": {"max_length": {"epochs": 5}}, "max_restarts": 1}
    bench.command("continue_experiment", experiment_id, overrides)
    assert bench.trial(1).target_length == 5
    assert bench.experiment(experiment_id).config["max_restarts"] == 1
    assert not bench.trial(1).operations_closed


@pytest.mark.parametrize("kind", ["random", "grid"])
def test_only_the_trials_that_did_not_complete_go_on(bench: Any, kind: str) -> None:
    experiment_id = bench.create(kind, max_restarts=0)
    codes = [0, 1, 1] if kind == "random" else [0, 1, 1, 0]
    for trial_id, code in enumerate(codes, 1):
        bench.end(bench.start(trial_id), code=code)
    bench.command("continue_experiment", experiment_id, {})
    states = {0: "COMPLETED", 1: "ACTIVE"}
    assert bench.trial_states(experiment_id) == [states[code] for code in codes]
    inputs = bench.inputs(experiment_id)
    for trial_id in (2, 3):
        bench.end(bench.start(trial_id))
    assert bench.trial_states(experiment_id) == ["COMPLETED"] * len(codes)
    assert bench.state(experiment_id) == "COMPLETED"
    # The search has ended and is asked no more.
    assert bench.inputs(experiment_id) == inputs


def fail_all(bench: Any, kind: str, code: int) -> int:
    experiment_id: int = bench.create(kind, max_restarts=0)
    while bench.schedule() or bench.live_attempts():
        for attempt in bench.live_attempts():
            bench.send(attempt.id)
            bench.validate(attempt.id, 1, loss=0.5)
            bench.end(attempt.id, code=code)
    return experiment_id


@pytest.mark.parametrize(
    ("kind", "code", "overrides", "expected"),
    [
        ("random", 0, {}, "nothing_to_continue"),
        ("random", 1, {"max_restarts": 3}, "override_refused"),
        ("halving", 0, {}, "search_cannot_reopen"),
        ("adaptive", 1, {}, "search_cannot_reopen"),
        (
            "single", 0, {"searcher": {"name": "random", "max_trials": 4}}, "override_refused",
        ),
        ("single", 0, {"hyperparameters": {"lr": 0.5}}, "override_refused"),
        ("single", 0, {"checkpoint_storage": "/tmp/elsewhere"}, "override_refused"),
        ("single", 0, {"resources": {"slots_per_trial": 99}}, "not_enough_slots"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_and_left_as_it_is(
    bench: Any, kind: str, code: int, overrides: dict[str, Any], expected: str
) -> None:
    experiment_id = fail_all(bench, kind, code)
    before = (bench.experiment(experiment_id), bench.trials(experiment_id))
    with pytest.raises(RefusedError) as e:
        bench.command("continue_experiment", experiment_id, overrides)
    assert e.value.code == expected
    assert (bench.experiment(experiment_id), bench.trials(experiment_id)) == before


@pytest.mark.parametrize("state", STATES[:6])
def test_an_experiment_that_has_not_ended_cannot_be_continued(
    bench: Any, in_state: Callable[[str], int], state: str
) -> None:
    experiment_id = in_state(state)
    shown = {"ACTIVE": "QUEUED or RUNNING", "PAUSED": "PAUSED"}.get(state, "STOPPING")
    with pytest.raises(RefusedError, match=f"must have ended, but is {shown}\\."):
        bench.command("continue_experiment", experiment_id, {})


# ---- scheduling ------------------------------------------------------------------------------


def test_attempts_get_slots_of_their_own_and_no_more_than_there_are(
    make_bench: Callable[[int], Any],
) -> None:
    bench = make_bench(3)
    bench.create("random", searcher={"max_trials": 9, "max_concurrent_trials": 9})
    assert len(bench.schedule()) == 3
    assert bench.schedule() == []
    assert sorted(slot for row in bench.live_attempts() for slot in row.slots) == [0, 1, 2]
    bench.end(bench.rows(tables.attempts)[1].id)
    [fresh] = bench.schedule()
    assert bench.attempt(fresh).slots == [1]


def test_a_trial_has_one_attempt_at_a_time(bench: Any) -> None:
    bench.create("single")
    assert len(bench.schedule()) == 1
    assert bench.schedule() == []
    bench.end(bench.start(1), code=1)
    assert len(bench.schedule()) == 1
    assert [row.number for row in bench.rows(tables.attempts)] == [1, 2]


def test_an_experiment_takes_no_more_slots_than_it_may(bench: Any) -> None:
    bench.create(
        "random",
        searcher={"max_trials": 9, "max_concurrent_trials": 9},
        resources={"max_slots": 2},
    )
    other = bench.create("single")
    bench.schedule()
    assert [row.experiment_id for row in bench.live_attempts()] == [1, 1, other]


def test_a_new_experiment_wakes_the_reconciler_and_the_retention(bench: Any) -> None:
    woken = [bench.reconciler._wakeup, bench.retention._wakeup]
    assert not any(event.is_set() for event in woken)
    bench.create("single")
    assert all(event.is_set() for event in woken)


def test_what_a_smaller_master_cannot_run_waits_and_holds_nobody_up(
    make_bench: Callable[[int], Any],
) -> None:
    bench = make_bench(2)
    large = bench.create("single", resources={"slots_per_trial": 2}, activate=False)
    small = bench.create("single")
    bench.machines.devices = ("cpu",)
    bench.command("activate", large)
    bench.schedule()
    assert [row.experiment_id for row in bench.live_attempts()] == [small]


@pytest.mark.parametrize(("kind", "changes"), [("random", {"max_trials": 6}), ("grid", {})])
def test_a_canceled_search_that_is_continued_creates_the_other_trials_too(
    bench: Any, kind: str, changes: dict[str, Any]
) -> None:
    experiment_id = bench.create(kind, searcher=changes)
    num_trials = 6 if kind == "random" else 4
    bench.end(bench.start(1))
    attempts = [bench.start(2), bench.start(3)]
    bench.command("cancel", experiment_id)
    for attempt_id in attempts:
        bench.leave(attempt_id)
    assert bench.state(experiment_id) == "CANCELED"
    bench.command("continue_experiment", experiment_id, {})
    assert bench.trial_states(experiment_id) == ["COMPLETED", "ACTIVE", "ACTIVE"]
    for trial_id in range(2, num_trials + 1):
        assert bench.state(experiment_id) == "ACTIVE"
        bench.end(bench.start(trial_id))
    assert bench.trial_states(experiment_id) == ["COMPLETED"] * num_trials
    assert bench.state(experiment_id) == "COMPLETED"
    assert bench.experiment(experiment_id).progress == 1.0
    bench.check_replay(experiment_id)


def test_a_canceled_search_that_is_continued_knows_what_ended_while_it_was_stopping(
    bench: Any,
) -> None:
    """The second trial is killed by itself before the cancellation, so the search replaced it."""
    experiment_id = bench.create("random", searcher={"max_trials": 4})
    one, two = bench.start(1), bench.start(2)
    bench.send(two, EarlyExitReported(time=1.0, reason="invalid_hp"))
    bench.end(two)
    assert len(bench.trials(experiment_id)) == 3
    three = bench.start(3)
    bench.command("cancel", experiment_id)
    bench.end(one)
    bench.leave(three)
    for _ in range(2):
        # A second cancellation and continuation changes nothing.
        bench.command("continue_experiment", experiment_id, {})
        bench.command("cancel", experiment_id)
    bench.command("continue_experiment", experiment_id, {})
    while bench.schedule() or bench.live_attempts():
        for attempt in bench.live_attempts():
            bench.send(attempt.id)
            bench.end(attempt.id)
    assert bench.state(experiment_id) == "COMPLETED"
    assert len(bench.trials(experiment_id)) == 5
    bench.check_replay(experiment_id)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_trials_run_at_once_than_the_search_may(bench: Any, limit: int) -> None:
    """There are more brackets than that, and a trial that was stopped has not left yet."""
    experiment_id = bench.create("adaptive", searcher={"max_concurrent_trials": limit})
    assert bench.trial_states(experiment_id) == ["ACTIVE"] * 3
    other = bench.create("single")
    seen: set[int] = set()
    for _ in range(60):
        bench.schedule()
        live = [row for row in bench.live_attempts() if row.experiment_id == experiment_id]
        assert len(live) <= limit
        if not live:
            break
        seen.update(row.trial_id for row in live)
        attempt = live[0]
        bench.send(attempt.id)
        for epoch in (1, 2, 4, 8):
            if bench.attempt(attempt.id).preempt_reason is None:
                bench.validate(attempt.id, epoch, loss=bench.trial(attempt.trial_id).hparams["lr"])
        # The stopped trial keeps its slot, and the next one waits.
        assert not [row for row in bench.schedule() if bench.attempt(row).trial_id in seen]
        live = [row for row in bench.live_attempts() if row.experiment_id == experiment_id]
        assert len(live) <= limit
        bench.leave(attempt.id)
    assert bench.state(experiment_id) == "COMPLETED"
    assert len(seen) == 8
    # Others get the slots that are free meanwhile.
    assert [row.experiment_id for row in bench.live_attempts()] == [other]


def test_no_more_trials_of_a_continued_search_run_at_once_than_it_may(bench: Any) -> None:
    experiment_id = bench.create(
        "random", searcher={"max_trials": 4, "max_concurrent_trials": 1}, max_restarts=0
    )
    for trial_id in range(1, 5):
        bench.end(bench.start(trial_id), code=1)
    bench.command("continue_experiment", experiment_id, {})
    assert bench.trial_states(experiment_id) == ["ACTIVE"] * 4
    for trial_id in range(1, 5):
        attempt_id = bench.start(trial_id)
        assert len(bench.live_attempts()) == 1
        bench.end(attempt_id)
    assert bench.state(experiment_id) == "COMPLETED"
