import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from paceline._cluster.master.experiments import failure_causes as _pauses
from paceline._cluster.master.experiments.failure_causes import start_delay_after
from paceline._cluster.master.experiments.state_decisions import (
    MAX_SHORTAGES,
    MAX_STORE_FAILURES,
    NotFoundError,
)
from paceline._cluster.master.store import tables
from paceline._cluster.messages.states import ErrorKind, ExitReason
from paceline.journal import AttemptFinished, EarlyExitReported, OperationsRequested, StoreChecked


def invalid(bench: Any, attempt_id: int) -> None:
    """Refuse the hyperparameters, as `core.init()` does for `InvalidHP`."""
    bench.send(
        attempt_id,
        EarlyExitReported(time=1.0, reason="invalid_hp"),
        AttemptFinished(time=1.0, outcome="invalid_hp", error="InvalidHP: odd"),
    )
    bench.end(attempt_id, code=1)


def test_a_trial_that_exits_with_0_completes_its_single_search(bench: Any) -> None:
    experiment_id = bench.create("single")
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 1, loss=0.5)
    bench.end(attempt_id)
    assert bench.trial_states(experiment_id) == ["COMPLETED"]
    experiment = bench.experiment(experiment_id)
    assert (experiment.state, experiment.progress) == ("COMPLETED", 1.0)
    assert experiment.ended_at is not None
    assert bench.trial(1).ended_at is not None
    bench.check_replay(experiment_id)


def test_a_second_end_changes_nothing(bench: Any) -> None:
    bench.create("random")
    attempt_id = bench.start(1)
    bench.end(attempt_id, code=1)
    before = [bench.rows(table) for table in (tables.attempts, tables.trials, tables.events)]
    bench.end(attempt_id, code=0)
    after = [bench.rows(table) for table in (tables.attempts, tables.trials, tables.events)]
    assert after == before


def test_the_end_of_an_unknown_attempt_is_refused(bench: Any) -> None:
    with pytest.raises(NotFoundError, match="no attempt 17"):
        bench.end(17)


def test_a_failing_trial_restarts_from_its_latest_checkpoint_until_it_may_no_more(
    bench: Any,
) -> None:
    experiment_id = bench.create("single")
    resumed = []
    for number in range(1, 4):
        attempt_id = bench.start(1)
        row = bench.attempt(attempt_id)
        resumed.append((row.number, row.resumed_from, row.resumed_steps))
        bench.checkpoint(attempt_id, number * 10, f"c{number}")
        bench.checkpoint(attempt_id, number * 10 - 5, f"older{number}")
        bench.send(attempt_id, AttemptFinished(time=1.0, outcome="error", error="ValueError: no"))
        bench.end(attempt_id, code=1)
        assert bench.trial(1).restarts == min(number, 2)
    assert resumed == [(1, None, 0), (2, "c1", 10), (3, "c2", 20)]
    trial = bench.trial(1)
    assert trial.state == "ERROR"
    assert trial.error == "The attempt failed (exit code 1: ValueError: no) and max_restarts is 2."
    assert bench.schedule() == []
    experiment = bench.experiment(experiment_id)
    assert experiment.state == "ERROR"
    assert experiment.error.startswith("All trials failed. Trial 1: The attempt failed")
    assert "restart 1 of 2" in bench.notes(1)


def test_the_log_repeats_the_first_line_of_an_error_alone(bench: Any) -> None:
    bench.create("single")
    text = "ValueError: no\nsuch data"
    for _ in range(3):
        attempt_id = bench.start(1)
        bench.checkpoint(attempt_id, 10 * attempt_id, f"c{attempt_id}")
        bench.send(attempt_id, AttemptFinished(time=1.0, outcome="error", error=text))
        bench.end(attempt_id, code=1)
    assert (
        bench.trial(1).error == f"The attempt failed (exit code 1: {text}) and max_restarts is 2."
    )
    assert "such data" not in bench.notes(1)
    assert "(exit code 1: ValueError: no); restart 1 of 2" in bench.notes(1)
    assert "(exit code 1: ValueError: no) and max_restarts is 2." in bench.notes(1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("OSError: [Errno 28] No space left on device: '/data/x'", "transient"),
        ("CheckpointWriteError: [Errno 122] Checkpoint 1 cannot be written", "transient"),
        ("OSError: [Errno 2] No such file or directory: '/data/x'", "user"),
        ("ValueError: 28", "user"),
    ],
)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_full_disk_is_not_the_users_error(
    bench: Any, error: str, kind: str, is_told: bool
) -> None:
    """The code told of it by the journal, or a launcher by its own words."""
    bench.create("single")
    attempt_id = bench.start(1)
    if is_told:
        bench.send(attempt_id, AttemptFinished(time=1.0, outcome="error", error=error))
    bench.end(attempt_id, code=1, detail=None if is_told else f"Rank 1 failed: {error}")
    assert bench.attempt(attempt_id).exit["kind"] == kind
    assert bench.trial(1).restarts == 1


def lack(bench: Any, attempt_id: int, ago_s: float) -> None:
    """End an attempt that could not start for want of something, some seconds ago."""
    detail = "[Errno 28] No space left on device"
    bench.end(attempt_id, code=None, reason=ExitReason.SHORTAGE, detail=detail, ago_s=ago_s)


def test_pauses_grow_to_the_longest() -> None:
    pauses = [start_delay_after(number) for number in (0, 1, 2, 3, 7, 8, 1000)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 60.0, 60.0, 60.0]


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first pause as long as the longest, as a second may pass between two lines."""
    monkeypatch.setattr(_pauses, "_FIRST_PAUSE_S", 60.0)


@pytest.mark.usefixtures("long_pauses")
def test_after_a_shortage_nothing_starts_for_a_while(bench: Any) -> None:
    """Another trial would lack the same, so it waits as well."""
    bench.create("single")
    for number in range(1, 8):
        [attempt_id] = bench.schedule()
        lack(bench, attempt_id, ago_s=0.0)
        assert bench.schedule() == []
        bench.create("single", activate=number == 7)
        assert bench.schedule() == []
        past = time.time() - start_delay_after(number)
        bench.write(lambda t, past=past: t.connection.execute(
            update(tables.attempts).values(ended_at=past)))  # fmt: skip
    assert len(bench.schedule()) == 2
    assert (bench.trial(1).restarts, bench.trial(1).state) == (0, "ACTIVE")
    assert "No space left on device" in bench.notes(1)


@pytest.mark.usefixtures("long_pauses")
def test_a_start_that_works_ends_the_wait_for_all(bench: Any) -> None:
    bench.create("single")
    bench.create("single")
    one, other = bench.schedule()
    lack(bench, one, ago_s=0.0)
    assert bench.schedule() == []
    bench.send(other)
    assert len(bench.schedule()) == 1


def test_a_shortage_that_lasts_fails_the_trial(bench: Any) -> None:
    experiment_id = bench.create("single")
    for _ in range(MAX_SHORTAGES + 1):
        assert bench.state(experiment_id) == "ACTIVE"
        [attempt_id] = bench.schedule()
        lack(bench, attempt_id, ago_s=1000.0)
    assert bench.trial(1).state == bench.state(experiment_id) == "ERROR"
    assert "No space left on device" in bench.trial(1).error


def test_a_deleted_checkpoint_is_not_resumed_from(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    bench.checkpoint(attempt_id, 10, "old")
    bench.checkpoint(attempt_id, 20, "new")
    checkpoints = tables.checkpoints
    bench.write(
        lambda t: t.connection.execute(
            checkpoints.update().where(checkpoints.c.uuid == "new").values(state="DELETED")
        )
    )
    bench.end(attempt_id, code=1)
    row = bench.attempt(bench.start(1))
    assert (row.resumed_from, row.resumed_steps) == ("old", 10)


def test_a_storage_that_hangs_holds_no_transaction(bench: Any, hanging_disk: Path) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    bench.checkpoint(attempt_id, 10, "old")
    place = {"storage": str(hanging_disk)}
    bench.write(lambda t: t.connection.execute(tables.checkpoints.update().values(**place)))
    bench.end(attempt_id, code=1)
    assert bench.attempt(bench.start(1)).resumed_from == "old"


@pytest.mark.parametrize(("has_others", "resumed"), [(True, ("old", 10)), (False, ("new", 20))])
def test_a_checkpoint_whose_files_are_gone_is_not_resumed_from(
    bench: Any, tmp_path: Path, has_others: bool, resumed: tuple[str, int]
) -> None:
    """A power cut can take it. An empty directory may be one that is not mounted."""
    bench.create("single")
    attempt_id = bench.start(1)
    bench.checkpoint(attempt_id, 10, "old")
    bench.checkpoint(attempt_id, 20, "new")
    place = tmp_path / "storage"
    place.mkdir()
    checkpoints = tables.checkpoints
    bench.write(lambda t: t.connection.execute(checkpoints.update().values(storage=str(place))))
    if has_others:
        (place / "old").mkdir()
        (place / "old" / "manifest.json").write_text("{}")
    bench.end(attempt_id, code=1)
    row = bench.attempt(bench.start(1))
    assert (row.resumed_from, row.resumed_steps) == resumed
    states = {row.uuid: row.state for row in bench.rows(checkpoints)}
    assert states == {"old": "COMPLETED", "new": "DELETED" if has_others else "COMPLETED"}
    assert ("The files of checkpoint new (step 20) are gone" in bench.notes(1)) is has_others


@pytest.mark.parametrize("outcome", ["completed", "preempted"])
@pytest.mark.parametrize(("code", "signum"), [(None, signal.SIGABRT), (134, None), (134, 6)])
def test_an_abort_after_the_work_was_done_is_no_failure(
    bench: Any, outcome: str, code: int | None, signum: int | None
) -> None:
    experiment_id = bench.create("single", max_restarts=0)
    attempt_id = bench.start(1)
    bench.send(attempt_id, AttemptFinished(time=1.0, outcome=outcome))
    bench.end(attempt_id, code=code, signal=signum)
    assert bench.state(experiment_id) == "COMPLETED"


@pytest.mark.parametrize(
    ("outcome", "code", "signum"),
    [(None, 134, 6), ("error", 134, 6), ("completed", 139, 11), ("completed", 1, None)],
)
def test_any_other_abnormal_end_is_a_failure(
    bench: Any, outcome: str | None, code: int, signum: int | None
) -> None:
    experiment_id = bench.create("single", max_restarts=0)
    attempt_id = bench.start(1)
    if outcome is not None:
        bench.send(attempt_id, AttemptFinished(time=1.0, outcome=outcome))
    bench.end(attempt_id, code=code, signal=signum)
    assert bench.state(experiment_id) == "ERROR"


@pytest.mark.parametrize("reason", [ExitReason.RUNNER_LOST, ExitReason.PREEMPTION_TIMEOUT])
def test_what_is_not_the_codes_fault_costs_no_restart(bench: Any, reason: ExitReason) -> None:
    experiment_id = bench.create("single", max_restarts=0)
    bench.end(bench.start(1), code=None, reason=reason)
    assert (bench.state(experiment_id), bench.trial(1).restarts) == ("ACTIVE", 0)
    assert bench.attempt(bench.start(1)).number == 2


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (ExitReason.RUNNER_LOST, "The attempt was lost 6 times in a row: the runner died"),
        (ExitReason.NOT_FORMED, "did not come together 6 times in a row: not formed"),
    ],
)
def test_a_trial_whose_runners_keep_dying_or_never_meet_ends_in_error(
    bench: Any, reason: ExitReason, text: str
) -> None:
    experiment_id = bench.create("single")
    for _ in range(6):
        assert bench.state(experiment_id) == "ACTIVE"
        bench.end(bench.start(1), code=None, reason=reason, ago_s=1000.0)
    assert bench.state(experiment_id) == "ERROR"
    assert text in bench.experiment(experiment_id).error


def test_a_trial_that_stores_checkpoints_may_lose_any_number_of_runners(bench: Any) -> None:
    experiment_id = bench.create("single")
    for number in range(1, 9):
        attempt_id = bench.start(1)
        bench.checkpoint(attempt_id, number, f"c{number}")
        bench.end(attempt_id, code=None, reason=ExitReason.RUNNER_LOST)
    assert bench.state(experiment_id) == "ACTIVE"


@pytest.mark.parametrize(
    ("errors", "codes", "num_attempts"),
    [
        pytest.param(["ValueError: no"] * 4, [1] * 4, 2, id="same"),
        pytest.param([None] * 4, [2] * 4, 2, id="same code alone"),
        pytest.param(["a", "b", "a", "b"], [1] * 4, 4, id="other errors"),
        pytest.param([None] * 4, [1, 2, 1, 2], 4, id="other codes"),
        pytest.param(["a", "b", "b"], [1] * 3, 3, id="same later"),
        pytest.param([None] * 4, [137] * 4, 4, id="killed below a shell"),
        pytest.param([None] * 4, [None] * 4, 4, id="killed"),
    ],
)
def test_a_trial_that_fails_the_same_way_twice_is_not_started_again(
    bench: Any, errors: list[str | None], codes: list[int | None], num_attempts: int
) -> None:
    bench.create("single", max_restarts=3)
    for error, code in zip(errors, codes, strict=True):
        [attempt_id] = bench.schedule()
        if error is not None:
            bench.send(attempt_id, AttemptFinished(time=1.0, outcome="error", error=error))
        bench.end(attempt_id, code=code, signal=9 if code is None else None)
        if bench.trial(1).state == "ERROR":
            break
    assert bench.trial(1).state == "ERROR"
    assert len(bench.rows(tables.attempts, trial_id=1)) == num_attempts
    is_told = "the same way as the one before" in bench.trial(1).error
    assert is_told == (num_attempts < 4)


def test_a_checkpoint_in_between_makes_the_same_failure_another_one(bench: Any) -> None:
    bench.create("single", max_restarts=3)
    for number in range(1, 4):
        attempt_id = bench.start(1)
        bench.checkpoint(attempt_id, number, f"c{number}")
        bench.end(attempt_id, code=1)
    assert (bench.trial(1).state, bench.trial(1).restarts) == ("ACTIVE", 3)


def test_runners_that_die_now_and_then_never_end_a_trial(bench: Any) -> None:
    experiment_id = bench.create("single", max_restarts=10)
    for _ in range(4):
        for _ in range(3):
            bench.end(bench.start(1), code=None, reason=ExitReason.RUNNER_LOST, ago_s=1000.0)
        bench.end(bench.start(1), code=1)
    assert bench.state(experiment_id) == "ACTIVE"
    assert bench.trial(1).restarts == 4


@pytest.mark.usefixtures("long_pauses")
def test_a_trial_whose_runner_died_twice_waits_and_others_do_not(bench: Any) -> None:
    bench.create("single")
    bench.end(bench.start(1), code=None, reason=ExitReason.RUNNER_LOST)
    bench.end(bench.start(1), code=None, reason=ExitReason.RUNNER_LOST)
    assert bench.schedule() == []
    bench.create("single")
    assert len(bench.schedule()) == 1
    assert bench.live_attempt(2).number == 1
    past = time.time() - 61.0
    ended = update(tables.attempts).where(tables.attempts.c.trial_id == 1)
    bench.write(lambda t: t.connection.execute(ended.values(ended_at=past)))
    bench.schedule()
    assert bench.live_attempt(1).number == 3


def test_a_start_that_a_file_server_disturbed_is_tried_again_and_counted(bench: Any) -> None:
    bench.create("single", max_restarts=0)
    for number in (1, 2):
        [attempt_id] = bench.schedule()
        bench.end(
            attempt_id, code=None, reason=ExitReason.START_FAILED, kind=ErrorKind.TRANSIENT,
            detail="[Errno 116] Stale file handle", ago_s=1000.0,
        )  # fmt: skip
        trial = bench.trial(1)
        assert (trial.state, trial.restarts, trial.retries) == ("ACTIVE", 0, number)
        assert bench.attempt(attempt_id).exit["kind"] == "transient"
    assert "Stale file handle" in bench.notes(1)
    # A trial that is continued counts from the beginning.
    bench.end(bench.start(1), code=1)
    assert (bench.trial(1).error_kind, bench.trial(1).retries) == ("user", 2)
    bench.command("continue_experiment", 1, {})
    assert (bench.trial(1).error_kind, bench.trial(1).retries) == (None, 0)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ({"code": 1}, "user"),
        ({"code": None, "signal": 9}, "user"),
        ({"code": None, "reason": ExitReason.START_FAILED}, "permanent"),
        ({"code": None, "reason": ExitReason.START_FAILED, "kind": ErrorKind.USER}, "user"),
        ({"code": 1, "kind": ErrorKind.PERMANENT}, "permanent"),
    ],
)
def test_the_kind_of_an_error_is_stored_with_the_attempt_and_the_trial(
    bench: Any, end: dict[str, Any], kind: str
) -> None:
    bench.create("single", max_restarts=0)
    attempt_id = bench.start(1)
    bench.end(attempt_id, **end)
    assert bench.trial(1).state == "ERROR"
    assert (bench.trial(1).error_kind, bench.attempt(attempt_id).exit["kind"]) == (kind, kind)


def test_what_went_well_or_was_refused_has_no_kind_of_error(bench: Any) -> None:
    bench.create("random", max_restarts=0)
    well, refused = bench.start(1), bench.start(2)
    bench.end(well)
    invalid(bench, refused)
    for attempt_id in (well, refused):
        assert bench.attempt(attempt_id).exit["kind"] is None
        assert bench.trial(bench.attempt(attempt_id).trial_id).error_kind is None


def test_an_attempt_that_cannot_start_ends_its_trial_with_the_reason(bench: Any) -> None:
    experiment_id = bench.create("single")
    [attempt_id] = bench.schedule()
    bench.end(attempt_id, code=None, reason=ExitReason.START_FAILED, detail="no such directory")
    assert bench.trial(1).state == "ERROR"
    assert "could not start" in bench.trial(1).error
    assert "no such directory" in bench.trial(1).error
    assert bench.state(experiment_id) == "ERROR"


def test_one_good_trial_is_enough_to_complete_a_search(bench: Any) -> None:
    experiment_id = bench.create("random", max_restarts=0)
    for trial_id, code in ((1, 1), (2, 0), (3, 1)):
        bench.end(bench.start(trial_id), code=code)
    assert bench.trial_states(experiment_id) == ["ERROR", "COMPLETED", "ERROR"]
    assert bench.state(experiment_id) == "COMPLETED"
    bench.check_replay(experiment_id)


def test_random_trials_that_refuse_their_hyperparameters_are_replaced(bench: Any) -> None:
    experiment_id = bench.create("random", max_restarts=0)
    invalid(bench, bench.start(1))
    assert (bench.trial(1).state, bench.trial(1).stop_reason) == ("COMPLETED", "invalid_hp")
    for trial_id in (2, 3, 4):
        bench.end(bench.start(trial_id))
    assert len(bench.trials(experiment_id)) == 4
    assert bench.state(experiment_id) == "COMPLETED"
    assert "InvalidHP" in bench.notes(1)
    bench.check_replay(experiment_id)


def test_a_trial_that_has_diverged_is_not_started_again_and_the_search_goes_on(bench: Any) -> None:
    experiment_id = bench.create("random", max_restarts=5)
    attempt_id = bench.start(1)
    bench.send(
        attempt_id,
        EarlyExitReported(time=1.0, reason="diverged"),
        AttemptFinished(time=1.0, outcome="error", error="NonFiniteError: at batch 6"),
    )
    bench.end(attempt_id, code=1)
    trial = bench.trial(1)
    assert (trial.state, trial.stop_reason, trial.restarts) == ("ERROR", "diverged", 0)
    assert "diverged" in trial.error
    assert "at batch 6" in trial.error
    assert bench.state(experiment_id) != "ERROR"
    bench.check_replay(experiment_id)


def test_a_grid_whose_points_are_all_refused_fails_with_the_reason(bench: Any) -> None:
    experiment_id = bench.create("grid")
    for trial_id in (1, 2, 3, 4):
        invalid(bench, bench.start(trial_id))
    experiment = bench.experiment(experiment_id)
    assert len(bench.trials(experiment_id)) == 4
    assert experiment.state == "ERROR"
    assert "All trials refused their hyperparameters. Trial 1: InvalidHP: odd" in experiment.error
    bench.check_replay(experiment_id)


@pytest.mark.parametrize("is_chief_last", [False, True])
def test_the_reason_of_another_rank_that_refused_is_told(bench: Any, is_chief_last: bool) -> None:
    experiment_id = bench.create("single")
    attempt_id = bench.start(1)
    errors = {2: "InvalidHP: odd", 0: None}
    for rank in (2, 0) if is_chief_last else (0, 2):
        bench.send(
            attempt_id,
            EarlyExitReported(time=1.0, reason="invalid_hp"),
            AttemptFinished(time=1.0, outcome="invalid_hp", error=errors[rank]),
            rank=rank,
        )
    bench.end(attempt_id)
    assert "Trial 1: InvalidHP: odd" in bench.experiment(experiment_id).error


def test_grid_points_that_are_refused_are_no_failure_of_the_others(bench: Any) -> None:
    experiment_id = bench.create("grid")
    for trial_id in (1, 2, 3):
        invalid(bench, bench.start(trial_id))
    bench.end(bench.start(4))
    assert bench.state(experiment_id) == "COMPLETED"
    bench.check_replay(experiment_id)


def test_a_search_of_refused_and_failed_trials_tells_the_failure(bench: Any) -> None:
    experiment_id = bench.create("grid", max_restarts=0)
    for trial_id in (1, 2, 3):
        invalid(bench, bench.start(trial_id))
    bench.end(bench.start(4), code=7)
    experiment = bench.experiment(experiment_id)
    assert experiment.state == "ERROR"
    assert "All trials failed. Trial 4: " in experiment.error


def test_a_reopened_single_trial_that_is_refused_again_fails(bench: Any) -> None:
    experiment_id = bench.create("single")
    for _ in range(2):
        invalid(bench, bench.start(1))
        experiment = bench.experiment(experiment_id)
        assert experiment.state == "ERROR"
        assert "Trial 1: InvalidHP: odd" in experiment.error
        bench.command("continue_experiment", experiment_id, {})
    bench.end(bench.start(1))
    assert bench.state(experiment_id) == "COMPLETED"
    assert bench.experiment(experiment_id).error is None


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.inf, 1.0)])
def test_a_metric_that_is_nan_only_sometimes_is_no_warning(
    bench: Any, values: tuple[float, float]
) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    for step, value in enumerate(values, start=1):
        bench.validate(attempt_id, step, loss=value)
    bench.end(attempt_id)
    assert "NaN" not in bench.notes(1)


def test_halving_replaces_a_refused_trial(bench: Any) -> None:
    experiment_id = bench.create("halving")
    invalid(bench, bench.start(1))
    assert len(bench.trials(experiment_id)) == 3
    assert bench.state(experiment_id) == "ACTIVE"
    bench.check_replay(experiment_id)


def test_a_trial_stopped_by_the_search_completes_even_if_it_fails_on_the_way_out(
    bench: Any,
) -> None:
    experiment_id = bench.create("halving", max_restarts=0)
    one, two = bench.start(1), bench.start(2)
    bench.validate(one, 2, loss=0.1)
    bench.validate(two, 2, loss=0.9)
    bench.end(two, code=1)
    trial = bench.trial(2)
    assert (trial.state, trial.stop_reason) == ("COMPLETED", "stopped by the search")
    assert trial.error == "exit code 1"
    assert bench.state(experiment_id) == "ACTIVE"


def test_a_halving_search_fails_if_the_metric_is_never_reported(bench: Any) -> None:
    experiment_id = bench.create("halving")
    one, two = bench.start(1), bench.start(2)
    bench.validate(one, 2, accuracy=0.5)
    bench.end(one)
    assert bench.trial(1).state == "ERROR"
    assert bench.state(experiment_id) == "STOPPING_ERROR"
    assert bench.attempt(two).should_kill
    bench.end(two, code=137, signal=9, reason=ExitReason.KILLED)
    experiment = bench.experiment(experiment_id)
    assert experiment.state == "ERROR"
    assert "`loss` in the validation metrics" in experiment.error
    assert "reported: accuracy, epochs" in experiment.error
    assert bench.schedule() == []


def test_a_halving_search_fails_if_the_time_metric_is_never_reported(bench: Any) -> None:
    experiment_id = bench.create("halving", searcher={"max_trials": 1})
    attempt_id = bench.start(1)
    bench.send(attempt_id, bench.metrics("validation", 2, loss=0.5))
    bench.end(attempt_id)
    assert bench.state(experiment_id) == "ERROR"
    assert "needs `epochs`" in bench.experiment(experiment_id).error


def test_with_operations_no_validation_report_is_needed(bench: Any) -> None:
    experiment_id = bench.create("halving")
    attempt_id = bench.start(1)
    bench.send(attempt_id, OperationsRequested(time=1.0))
    bench.end(attempt_id)
    assert bench.trial(1).state == "COMPLETED"
    assert bench.state(experiment_id) == "ACTIVE"


@pytest.mark.parametrize("search", ["single", "random", "grid"])
@pytest.mark.parametrize(
    ("group", "metrics", "is_missing"),
    [
        ("validation", {"accuracy": 0.5}, True),
        ("training", {"accuracy": 0.5}, False),
        ("validation", {"loss": 0.5}, False),
        ("validation", {"loss": math.nan}, False),
        ("validation", {}, False),
    ],
)
def test_a_metric_that_is_never_reported_is_an_error_in_every_search_but_a_single_trial(
    bench: Any, search: str, group: str, metrics: dict[str, Any], is_missing: bool
) -> None:
    """A script that does not validate is welcome, as in the first steps of a guide."""
    experiment_id = bench.create(search)
    attempt_id = bench.start(1)
    if metrics:
        bench.send(attempt_id, bench.metrics(group, 1, **metrics))
    bench.end(attempt_id)
    is_error = is_missing and search != "single"
    assert bench.trial(1).state == ("ERROR" if is_error else "COMPLETED")
    assert ("the code never reported it" in bench.notes(1)) == is_missing
    if is_error:
        assert bench.state(experiment_id) in ("ERROR", "STOPPING_ERROR")
        assert "`loss` in the validation metrics" in bench.experiment(experiment_id).error
        assert bench.experiment(experiment_id).search_end == "unmeasured"
    is_nan = math.nan in metrics.values()
    assert ("`loss` was NaN or infinite in the only report" in bench.notes(1)) == is_nan


def test_a_single_trial_is_warned_at_its_first_validation_and_completes(bench: Any) -> None:
    experiment_id = bench.create("single")
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 1, accuracy=0.5)
    assert "(reported: accuracy, epochs)" in bench.notes(1)
    for step in range(2, 6):
        bench.validate(attempt_id, step, accuracy=0.5)
    assert bench.notes(1).count("the code never reported it") == 1
    bench.end(attempt_id)
    assert bench.state(experiment_id) == "COMPLETED"


@pytest.mark.parametrize("search", ["random", "grid", "halving", "adaptive"])
def test_a_search_ends_at_the_third_validation_of_a_trial_if_none_has_reported_the_metric(
    bench: Any, search: str
) -> None:
    experiment_id = bench.create(search)
    one, two = bench.start(1), bench.start(2)
    for attempt_id, step in ((one, 1), (two, 1), (one, 2), (two, 2)):
        bench.validate(attempt_id, step, accuracy=0.5)
    assert bench.state(experiment_id) == "ACTIVE"
    bench.validate(one, 3, accuracy=0.5)
    assert bench.state(experiment_id) == "STOPPING_ERROR"
    for attempt_id in (one, two, *[a.id for a in bench.live_attempts() if a.id not in (one, two)]):
        bench.end(attempt_id, code=1, reason=ExitReason.KILLED)
    assert bench.state(experiment_id) == "ERROR"
    experiment = bench.experiment(experiment_id)
    assert experiment.error.startswith("Trial 1: The search needs `loss`")
    assert experiment.search_end == "unmeasured"
    bench.check_replay(experiment_id)


@pytest.mark.parametrize("search", ["random", "grid", "halving", "adaptive"])
@pytest.mark.parametrize("reporter", [1, 2])
def test_once_a_trial_has_reported_the_metric_one_without_it_fails_alone(
    bench: Any, search: str, reporter: int
) -> None:
    experiment_id = bench.create(search)
    attempts = {1: bench.start(1), 2: bench.start(2)}
    lacking = 3 - reporter
    bench.validate(attempts[reporter], 1, loss=0.5)
    for step in range(1, 6):
        bench.validate(attempts[lacking], step, accuracy=0.5)
    assert bench.state(experiment_id) == "ACTIVE"
    bench.end(attempts[lacking])
    assert bench.trial(lacking).state == "ERROR"
    assert "`loss` in the validation metrics" in bench.trial(lacking).error
    assert bench.trial(reporter).state == "ACTIVE"
    assert bench.state(experiment_id) == "ACTIVE"
    exited = [each for each in bench.inputs(experiment_id) if each["type"] == "exited"]
    assert [each["reason"] for each in exited] == ["error"]
    assert len(bench.trials(experiment_id)) > 2
    bench.check_replay(experiment_id)


def test_a_metric_that_only_a_superseded_attempt_reported_counts_as_missing(bench: Any) -> None:
    experiment_id = bench.create("halving", searcher={"max_trials": 1})
    first = bench.start(1)
    bench.validate(first, 1, loss=0.5)
    bench.end(first, code=1)
    second = bench.start(1)
    bench.end(second)
    assert bench.trial(1).state == "ERROR"
    assert bench.state(experiment_id) == "ERROR"


def test_a_searched_metric_that_is_always_nan_ends_the_search_with_an_error(bench: Any) -> None:
    experiment_id = bench.create("halving")
    for _ in range(40):
        bench.schedule()
        live = bench.live_attempts()
        if not live:
            break
        attempt = live[0]
        bench.send(attempt.id)
        bench.validate(attempt.id, 2, loss=math.nan)
        assert bench.attempt(attempt.id).preempt_reason is not None
        bench.leave(attempt.id)
    experiment = bench.experiment(experiment_id)
    assert (experiment.state, experiment.search_end) == ("ERROR", "unmeasured")
    assert "must report a finite value of the searched metric `loss`" in experiment.error
    assert experiment.best_metric is None
    assert len(bench.trials(experiment_id)) == 6
    assert {row.steps_completed for row in bench.trials(experiment_id)} == {2}
    assert all("`loss` was NaN or infinite in the only" in bench.notes(n) for n in range(1, 7))
    bench.check_replay(experiment_id)


def test_a_halving_search_runs_to_its_end(bench: Any) -> None:
    experiment_id = bench.create("halving")
    for _ in range(40):
        bench.schedule()
        live = bench.live_attempts()
        if not live:
            break
        for attempt in live:
            bench.send(attempt.id)
            trial = bench.trial(attempt.trial_id)
            for epoch in (1, 2, 3, 4):
                if bench.attempt(attempt.id).preempt_reason is None:
                    bench.validate(attempt.id, epoch, loss=trial.hparams["lr"] + 1 / epoch)
            bench.leave(attempt.id)
    assert bench.state(experiment_id) == "COMPLETED"
    assert bench.trial_states(experiment_id) == ["COMPLETED"] * 6
    best = min(
        (t.best_metric, t.id) for t in bench.trials(experiment_id) if t.best_metric is not None
    )
    experiment = bench.experiment(experiment_id)
    assert (experiment.best_metric, experiment.best_trial_id) == best
    assert bench.searches._loaded == {}
    bench.check_replay(experiment_id)


def failing_stores(bench: Any) -> list[str]:
    """Return what the status of the master says of stores."""
    with bench.database.read() as connection:
        described: list[str] = bench.changes.failing_stores.describe(connection, lambda *_: True)
    return described


@pytest.mark.long
def test_a_store_that_does_not_answer_costs_no_restart_until_it_has_not_for_very_long(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pauses, "_FIRST_PAUSE_S", 0.0)
    bench.create("single")
    why = {"detail": "CheckpointError: no answer", "store": "s3://b/x"}
    for number in range(MAX_STORE_FAILURES):
        bench.end(bench.start(1), code=1, kind=ErrorKind.TRANSIENT, **why)
        trial = bench.trial(1)
        assert (trial.state, trial.restarts, trial.retries) == ("ACTIVE", 0, number + 1)
    [named] = failing_stores(bench)
    assert named.startswith(
        "Experiment 1 waits for its store s3://b/x, which does not answer trial"
    )
    assert "CheckpointError: no answer" in named
    # Once a checkpoint was stored, the store was there.
    attempt_id = bench.start(1)
    bench.checkpoint(attempt_id, 10, "c1")
    for number in range(MAX_STORE_FAILURES + 1):
        assert bench.trial(1).state == "ACTIVE"
        bench.end(attempt_id if number == 0 else bench.start(1), code=1,
                  kind=ErrorKind.TRANSIENT, **why)  # fmt: skip
    trial = bench.trial(1)
    assert (trial.state, trial.restarts, trial.error_kind) == ("ERROR", 0, "transient")
    assert "The store s3://b/x did not answer 31 attempts in a row" in trial.error


def test_a_store_that_does_not_answer_is_named_while_code_waits_for_it(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    for rank in (0, 2):
        bench.send(attempt_id, StoreChecked(time=1.0, storage="s3://b/x", reason="no"), rank=rank)
    assert len(failing_stores(bench)) == 1
    bench.send(attempt_id, StoreChecked(time=2.0, storage="s3://b/x", reason=None), rank=0)
    assert len(failing_stores(bench)) == 1
    bench.end(attempt_id)
    assert failing_stores(bench) == []
