import math
from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from paceline._base.journal_records import encode_float
from paceline._cluster.master.experiments.checkpoints import check_checkpoint, latest_checkpoint
from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.attempt_times import time_shares
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_rows import read_rows
from paceline._cluster.master.store.metric_summaries import read_summary
from paceline._cluster.messages.runner_messages import Mark, RecordBatch
from paceline.journal import (
    AlertRaised,
    AttemptFinished,
    CheckpointDeleted,
    CheckpointFilesDeleted,
    EarlyExitReported,
    OperationCompleted,
    OperationsRequested,
    PreemptionAcknowledged,
    ProgressReported,
    RunMetadataSet,
    StatusReported,
    TimeSpent,
)
from paceline.search._search_messages import Proposed


@pytest.fixture
def halving(bench: Any) -> int:
    """Return the id of an experiment whose rungs are at 2 and 4 epochs, two trials at a time."""
    created: int = bench.create("halving")
    return created


def visible(bench: Any, trial_id: int, group: str = "validation") -> dict[int, dict[str, Any]]:
    with bench.database.read() as connection:
        return {row.step: row.metrics for row in read_rows(connection, trial_id, group)}


def reported(bench: Any, experiment_id: int) -> list[tuple[float, Any]]:
    """Return time and metric of the reports that the search was given."""
    return [
        (given["time"], given["metric"])
        for given in bench.inputs(experiment_id)
        if given["type"] == "reported"
    ]


def test_the_first_records_make_an_attempt_running_once(bench: Any, halving: int) -> None:
    [first, _] = bench.schedule()
    assert bench.attempt(first).state == "PENDING"
    bench.send(first)
    started = bench.attempt(first)
    assert (started.state, started.started_at is not None) == ("RUNNING", True)
    bench.send(first)
    assert bench.attempt(first).started_at == started.started_at
    assert len(bench.events("attempt_started")) == 1


def test_records_sent_twice_are_stored_and_decided_once(bench: Any, halving: int) -> None:
    attempt_id = bench.start(1)
    records = [
        bench.metrics("training", 1, x=1.0),
        bench.metrics("validation", 1, loss=0.5, epochs=2),
        bench.metrics("training", 2, x=2.0),
    ]
    bench.send_at(attempt_id, 0, *records)
    before = (bench.inputs(halving), bench.rows(tables.series), bench.rows(tables.events))
    marks = bench.send_at(attempt_id, 0, *records)
    assert marks == [Mark(0, 0, 2)]
    assert (bench.inputs(halving), bench.rows(tables.series), bench.rows(tables.events)) == before
    assert bench.send_at(attempt_id, 1, *records[1:], bench.metrics("training", 3, x=3.0)) == [
        Mark(0, 0, 3)
    ]
    assert visible(bench, 1, "training") == {1: {"x": 1.0}, 2: {"x": 2.0}, 3: {"x": 3.0}}
    assert reported(bench, halving) == [(2.0, 0.5)]


def test_journals_of_ranks_and_generations_have_marks_of_their_own(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    batches = [
        RecordBatch(generation=generation, rank=rank, records=[(number, StatusReported(
            time=1.0, status=f"{generation}.{rank}"))])
        for generation, rank, number in ((0, 0, 5), (0, 1, 7), (1, 0, 2))
    ]  # fmt: skip
    marks = bench.write(lambda t: bench.ingest.store(t, attempt_id, batches))
    assert marks == [Mark(0, 0, 5), Mark(0, 1, 7), Mark(1, 0, 2)]
    # Only the chief speaks for the trial.
    assert bench.trial(1).status == "1.0"


def test_a_report_and_its_decision_are_one_transaction(bench: Any, halving: int) -> None:
    attempt_id = bench.start(1)
    records = [(0, bench.metrics("validation", 2, loss=0.5, epochs=2))]

    def job(transaction: Transaction) -> None:
        bench.ingest.store(transaction, attempt_id, [RecordBatch(0, 0, records)])
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        bench.write(job)
    assert visible(bench, 1) == {}
    assert reported(bench, halving) == []
    assert bench.rows(tables.journal_marks) == []
    assert bench.trial(1).best_metric is None
    bench.send_at(attempt_id, 0, *[record for _, record in records])
    assert visible(bench, 1) == {2: {"loss": 0.5, "epochs": 2}}
    assert reported(bench, halving) == [(2.0, 0.5)]
    bench.check_replay(halving)


def test_the_loser_of_a_rung_is_preempted_and_another_trial_created(
    bench: Any, halving: int
) -> None:
    one, two = bench.start(1), bench.start(2)
    bench.validate(one, 2, loss=0.1)
    bench.validate(two, 2, loss=0.9)
    assert bench.trial(2).state == "STOPPING_COMPLETED"
    assert bench.attempt(two).preempt_reason == "stopped by the search"
    assert bench.attempt(one).preempt_reason is None
    assert two in bench.controls.noted
    assert len(bench.trials(halving)) == 3
    bench.check_replay(halving)


def test_reports_of_a_stopping_trial_are_kept_and_decide_nothing(bench: Any, halving: int) -> None:
    one, two = bench.start(1), bench.start(2)
    bench.validate(one, 2, loss=0.1)
    bench.validate(two, 2, loss=0.9)
    inputs = bench.rows(tables.search_inputs)
    stop = {"type": "stop", "request_id": bench.trial(2).request_id}
    assert stop in inputs[-1].operations
    bench.validate(two, 4, loss=0.0)
    assert bench.rows(tables.search_inputs) == inputs
    assert visible(bench, 2)[4]["loss"] == 0.0
    assert len(bench.trials(halving)) == 3
    bench.check_replay(halving)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"loss": 0.5}, {"epochs": 2}),
        ({"epochs": 2}, {"loss": 0.5}),
        ({"loss": 0.5, "other": 1}, {"epochs": 2, "more": "text"}),
    ],
)
@pytest.mark.parametrize("is_one_request", [True, False])
def test_metric_and_time_metric_may_come_in_two_reports_of_a_step(
    bench: Any, halving: int, first: dict[str, Any], second: dict[str, Any], is_one_request: bool
) -> None:
    attempt_id = bench.start(1)
    reports = [bench.metrics("validation", 8, **first), bench.metrics("validation", 8, **second)]
    if is_one_request:
        bench.send(attempt_id, *reports)
    else:
        for one in reports:
            bench.send(attempt_id, one)
    assert set(reported(bench, halving)) == {(2.0, 0.5)}
    assert bench.trial(1).best_metric == 0.5
    bench.check_replay(halving)


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": 0.5},
        {"epochs": 2},
        {"loss": "low", "epochs": 2},
        {"loss": 0.5, "epochs": True},
        {"loss": [0.5], "epochs": 2},
        {},
    ],
)
def test_a_report_without_a_number_for_both_decides_nothing(
    bench: Any, halving: int, metrics: dict[str, Any]
) -> None:
    attempt_id = bench.start(1)
    bench.send(attempt_id, bench.metrics("validation", 2, **metrics))
    assert reported(bench, halving) == []
    assert bench.trial(1).state == "ACTIVE"


def test_batches_are_counted_by_the_step_where_no_report_names_them(bench: Any) -> None:
    experiment_id = bench.create("halving", searcher={"time_metric": "batches", "max_time": 400})
    attempt_id = bench.start(1)
    bench.send(attempt_id, bench.metrics("validation", 200, loss=0.5))
    bench.send(attempt_id, bench.metrics("validation", 300, loss=0.25, batches=310))
    assert reported(bench, experiment_id) == [(200.0, 0.5), (310.0, 0.25)]


def test_training_reports_decide_nothing(bench: Any, halving: int) -> None:
    attempt_id = bench.start(1)
    bench.send(attempt_id, bench.metrics("training", 2, loss=0.5, epochs=2))
    assert reported(bench, halving) == []
    assert bench.trial(1).best_metric is None
    assert bench.trial(1).steps_completed == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.4375114074503293e-292])
def test_a_strange_value_reaches_the_search_and_the_trial(
    bench: Any, halving: int, value: float
) -> None:
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 2, loss=value)
    given = {"type": "reported", "metric": value if math.isfinite(value) else str(value)}
    assert bench.inputs(halving)[-1].items() >= given.items()
    trial = bench.trial(1)
    assert trial.latest_metric == encode_float(value)
    assert trial.best_metric == (value if math.isfinite(value) else None)
    assert repr(visible(bench, 1)[2]["loss"]) == repr(value)
    bench.check_replay(halving)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_strange_time_ends_no_search(bench: Any, halving: int, value: float) -> None:
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 2, loss=0.5, epochs=value)
    assert bench.state(halving) == "ACTIVE"
    assert bench.trial(1).state == "ACTIVE"
    bench.check_replay(halving)


@pytest.mark.parametrize(
    ("smaller", "values", "best", "step"),
    [
        (True, [0.5, 0.3, 0.4], 0.3, 2),
        (False, [0.5, 0.3, 0.4], 0.5, 1),
        (True, [math.nan, 0.4, math.nan], 0.4, 2),
        (True, [math.nan], None, None),
        (True, [0.5, 0.5], 0.5, 1),
        (True, [3, 2], 2.0, 2),
        (False, [-math.inf, -5.0, math.inf], -5.0, 2),
        (True, [-math.inf, 5.0, math.inf], 5.0, 2),
        (True, [-math.inf], None, None),
        (False, [math.inf], None, None),
    ],
)
def test_the_best_metric_is_that_of_the_best_step(
    bench: Any, smaller: bool, values: list[float], best: float | None, step: int | None
) -> None:
    experiment_id = bench.create("single", searcher={"smaller_is_better": smaller})
    attempt_id = bench.start(1)
    for number, value in enumerate(values, 1):
        bench.validate(attempt_id, number, loss=value)
    trial = bench.trial(1)
    assert (trial.best_metric, trial.best_step) == (best, step)
    experiment = bench.experiment(experiment_id)
    assert experiment.best_metric == best
    assert experiment.best_trial_id == (None if best is None else 1)


def test_running_attempts_hear_of_a_new_best_of_the_experiment(bench: Any, halving: int) -> None:
    one, two = bench.start(1), bench.start(2)
    versions = {row.id: row.control_version for row in bench.live_attempts()}
    bench.validate(one, 1, loss=0.5)
    assert {row.id: row.control_version > versions[row.id] for row in bench.live_attempts()} == {
        one: True, two: True,
    }  # fmt: skip
    versions = {row.id: row.control_version for row in bench.live_attempts()}
    bench.validate(two, 1, loss=0.7)
    assert {row.id: row.control_version for row in bench.live_attempts()} == versions


def restart(bench: Any, attempt_id: int, trial_id: int) -> int:
    """Let an attempt fail and the next one start."""
    bench.end(attempt_id, code=1)
    started: int = bench.start(trial_id)
    return started


def test_a_restart_takes_back_the_best_of_superseded_steps(bench: Any) -> None:
    experiment_id = bench.create("single")
    first = bench.start(1)
    bench.validate(first, 1, loss=0.5)
    bench.checkpoint(first, 1)
    bench.validate(first, 2, loss=0.1)
    assert bench.experiment(experiment_id).best_metric == 0.1
    restart(bench, first, 1)
    trial = bench.trial(1)
    assert (trial.best_metric, trial.best_step, trial.latest_metric) == (0.5, 1, 0.5)
    assert bench.experiment(experiment_id).best_metric == 0.5


def test_a_repeated_report_after_a_restart_is_not_decided_again(bench: Any, halving: int) -> None:
    first = bench.start(1)
    bench.validate(first, 2, loss=0.5)
    second = restart(bench, first, 1)
    bench.validate(second, 2, loss=0.4)
    bench.check_replay(halving)
    with bench.database.read() as connection:
        from paceline._cluster.master.searches.stored_searches import load_search

        search = load_search(connection, halving).search
        assert search is not None
    lowest = [e for e in search.rungs()[0].rungs[0].entries if e.metric is not None]
    assert [(e.request_id, e.metric) for e in lowest] == [(bench.trial(1).request_id, 0.5)]


def test_where_attempts_disagree_on_an_old_step_the_earlier_value_counts(
    bench: Any, halving: int
) -> None:
    """For the rows, the best metric and the search alike."""
    first = bench.start(1)
    bench.validate(first, 1, loss=0.5)
    bench.checkpoint(first, 1)
    second = restart(bench, first, 1)
    bench.validate(second, 1, loss=0.1)
    assert visible(bench, 1) == {1: {"loss": 0.5, "epochs": 1}}
    trial = bench.trial(1)
    assert (trial.best_metric, trial.latest_metric) == (0.5, 0.5)
    assert bench.experiment(halving).best_metric == 0.5
    assert {metric for _, metric in reported(bench, halving)} == {0.5}
    assert "`loss` at step 1 was reported as 0.5" in bench.notes(1)


def test_records_that_come_after_the_end_are_refused(bench: Any, halving: int) -> None:
    """They come from a runner that has lost the attempt."""
    attempt_id = bench.start(1)
    bench.end(attempt_id, code=1)
    with pytest.raises(RefusedError, match=f"Attempt {attempt_id} has ended"):
        bench.validate(attempt_id, 2, loss=0.5)
    assert visible(bench, 1) == {}
    assert reported(bench, halving) == []
    assert bench.attempt(attempt_id).state == "ENDED"


def test_records_of_an_unknown_attempt_are_refused(bench: Any) -> None:
    with pytest.raises(NotFoundError, match="no attempt 17"):
        bench.send(17)


def test_a_checkpoint_is_stored_once_and_marked_when_deleted(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    uuid = bench.checkpoint(attempt_id, 5)
    bench.checkpoint(attempt_id, 5)
    row = bench.row(tables.checkpoints)
    assert (row.uuid, row.steps_completed, row.state, row.size) == (uuid, 5, "COMPLETED", 3)
    assert bench.trial(1).steps_completed == 5
    bench.send(attempt_id, CheckpointFilesDeleted(time=1.0, uuid=uuid, resources={"a": 1}))
    row = bench.row(tables.checkpoints)
    assert (row.state, row.resources, row.size) == ("PARTIALLY_DELETED", {"a": 1}, 1)
    with bench.database.read() as connection:
        assert latest_checkpoint(connection, 1) is None
        check_checkpoint(connection, uuid, ())
    bench.send(attempt_id, CheckpointDeleted(time=1.0, uuid=uuid))
    assert bench.row(tables.checkpoints).state == "DELETED"
    bench.send(attempt_id, CheckpointFilesDeleted(time=1.0, uuid=uuid, resources={"a": 1}))
    assert bench.row(tables.checkpoints).state == "DELETED"


def test_an_alert_of_any_rank_is_a_line_of_the_log_and_an_event(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    alert = AlertRaised(time=1.0, title="Loss is high", description="It was 9", level="warn")
    bench.send(attempt_id, alert, rank=2)
    assert "Alert of rank 2: Loss is high: It was 9" in bench.notes(1)
    data = {"title": "Loss is high", "description": "It was 9", "level": "warn", "rank": 2}
    told = data | {"raised_at": 1.0}
    assert bench.events("alert") == [told]
    for number in range(20):
        alert = AlertRaised(time=2.0, title=f"{number}", description="", level="info")
        bench.send(attempt_id, alert, rank=2)
    kept = bench.trial(1).alerts
    assert [alert["title"] for alert in kept] == [f"{number}" for number in range(20)]
    assert kept[0] == {"time": 2.0, "title": "0", "description": "", "level": "info", "rank": 2}


def test_metadata_of_a_trial_is_the_chiefs_and_handed_to_later_attempts(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    assert bench.trial(1).metadata is None
    bench.send(attempt_id, RunMetadataSet(time=1.0, metadata={"data": "v1"}))
    bench.send(attempt_id, RunMetadataSet(time=1.0, metadata={"data": "v2"}), rank=2)
    assert bench.trial(1).metadata == {"data": "v1"}


@pytest.mark.parametrize(
    ("record", "table", "column", "value"),
    [
        (StatusReported(time=1.0, status="validating"), "trials", "status", "validating"),
        (ProgressReported(time=1.0, progress=0.25), "trials", "progress", 0.25),
        (OperationsRequested(time=1.0), "trials", "uses_operations", True),
        (PreemptionAcknowledged(time=1.0), "attempts", "preempt_acknowledged", True),
        (
            EarlyExitReported(time=1.0, reason="user_requested_stop"),
            "attempts",
            "early_exit",
            "user_requested_stop",
        ),
        (AttemptFinished(time=1.0, outcome="completed"), "attempts", "outcome", "completed"),
    ],
)
def test_the_chief_alone_speaks_for_the_trial(
    bench: Any, record: Any, table: str, column: str, value: Any
) -> None:
    bench.create("single")
    attempt_id = bench.start(1)

    def found() -> Any:
        return getattr(bench.row(getattr(tables, table)), column)

    before = found()
    bench.send(attempt_id, record, rank=1)
    assert found() == before != value
    bench.send(attempt_id, record)
    assert found() == value


@pytest.mark.parametrize("is_chief_first", [True, False])
def test_any_rank_can_refuse_the_hyperparameters(bench: Any, is_chief_first: bool) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    sent = [
        (EarlyExitReported(time=1.0, reason="invalid_hp"), 2),
        (AttemptFinished(time=1.0, outcome="error", error="connection closed"), 0),
    ]
    for record, rank in reversed(sent) if is_chief_first else sent:
        bench.send(attempt_id, record, rank=rank)
    attempt = bench.row(tables.attempts)
    assert (attempt.early_exit, attempt.outcome) == ("invalid_hp", "invalid_hp")


def test_progress_moves_the_experiment_and_is_no_input(bench: Any) -> None:
    searcher = {"max_trials": 1000, "max_concurrent_trials": 2}
    experiment_id = bench.create("random", searcher=searcher)
    one, two = bench.start(1), bench.start(2)
    bench.send(one, ProgressReported(time=1.0, progress=0.5))
    bench.send(two, ProgressReported(time=1.0, progress=1.0))
    assert bench.experiment(experiment_id).progress == pytest.approx(1.5 / 1000)
    assert len(bench.inputs(experiment_id)) == 1


@pytest.mark.parametrize("search", ["halving", "adaptive"])
def test_reports_in_one_request_leave_what_they_leave_one_by_one(
    make_bench: Any, search: str
) -> None:
    """All but the events of progress, which is told once a request."""
    kept = []
    for is_together in (True, False):
        bench = make_bench(2)
        experiment_id = bench.create(search, searcher={"max_time": 64})
        [one, two] = bench.schedule()
        for attempt_id, better in ((one, 1.0), (two, 2.0)):
            report = partial(bench.metrics, "validation")
            records = [
                *(report(step, loss=better / step, epochs=step) for step in range(1, 10)),
                report(10, loss=better, epochs=10),
                report(11, loss=math.nan, epochs=11),
                bench.metrics("training", 11, loss=0.1),
                report(12, other=1.0, epochs=12),
                ProgressReported(time=1.0, progress=0.2),
                *(report(step, loss=better / step, epochs=step) for step in range(13, 40)),
                # Halves of a step, in either order.
                *(report(40, loss=better / 40), report(40, epochs=40)),
                *(report(41, epochs=41), report(41, loss=better / 41)),
            ]
            for part in [records] if is_together else [[record] for record in records]:
                bench.send(attempt_id, *part)
        bench.check_replay(experiment_id)
        experiment, trials = bench.experiment(experiment_id), bench.trials(experiment_id)
        assert 0 < experiment.progress < 1
        names = ("state", "progress", "best_metric", "best_step", "latest_metric", "stop_reason")
        kept.append(
            (
                bench.inputs(experiment_id),
                [row.operations for row in bench.rows(tables.search_inputs)],
                (experiment.progress, experiment.best_metric, experiment.best_trial_id),
                [[getattr(trial, name) for name in names] for trial in trials],
                bench.events("validation"),
                bench.events("progress")[-1],
            )
        )
    assert kept[0] == kept[1]


def test_the_progress_of_a_request_is_told_once(bench: Any, halving: int) -> None:
    reports = [bench.metrics("validation", n, loss=1.0, epochs=n / 100) for n in range(1, 150)]
    bench.send(bench.start(1), *reports)
    expected = 1.49 / 4 / 6
    assert [event["progress"] for event in bench.events("progress")] == [pytest.approx(expected)]
    assert bench.experiment(halving).progress == pytest.approx(expected)


def test_validations_move_the_experiment_where_the_search_knows_the_length(
    bench: Any, halving: int
) -> None:
    attempt_id = bench.start(1)
    bench.send(attempt_id, bench.metrics("validation", 10, loss=0.5, epochs=1))
    searcher = bench.experiment(halving).config["searcher"]
    expected = 1 / searcher["max_time"] / searcher["max_trials"]
    assert bench.experiment(halving).progress == pytest.approx(expected)


def test_in_operations_mode_completed_operations_are_the_searchs_input(
    bench: Any, halving: int
) -> None:
    one, two = bench.start(1), bench.start(2)
    for attempt_id in (one, two):
        bench.send(attempt_id, OperationsRequested(time=1.0))
    assert bench.trial(1).target_length == 2
    bench.validate(one, 2, loss=0.0)
    assert reported(bench, halving) == []
    bench.send(one, OperationCompleted(time=1.0, length=2, metric=0.3))
    assert reported(bench, halving) == [(2.0, 0.3)]
    assert bench.trial(1).target_length == 4
    assert not bench.trial(1).operations_closed
    bench.send(two, OperationCompleted(time=1.0, length=2, metric=encode_float(math.nan)))
    assert bench.trial(2).operations_closed
    assert bench.trial(2).state == "STOPPING_COMPLETED"
    bench.send(one, OperationCompleted(time=1.0, length=4, metric=0.2))
    assert bench.trial(1).operations_closed
    bench.check_replay(halving)


@pytest.mark.parametrize("kind", ["single", "random", "grid", "random with a sampler"])
def test_without_rungs_one_operation_is_all_there_is(bench: Any, kind: str) -> None:
    """A sampler is told the value of the operation, which is the only one all the same."""
    kind, _, sampled = kind.partition(" ")
    more = {"points_to_evaluate": [{"lr": 0.5}]} if sampled else {}
    experiment_id = bench.create(kind, searcher={"max_length": {"batches": 100}} | more)
    take = bench.changes.search_operations.apply_input
    for ask in bench.write(lambda t: bench.searches.peek(t, experiment_id)).asks:
        given = Proposed(request_id=ask.request_id, hparams={"lr": 0.5}, by="somebody")
        bench.write(lambda t, given=given: take(t, experiment_id, given))
    attempt_id = bench.start(1)
    assert bench.trial(1).target_length == 100
    version = bench.attempt(attempt_id).control_version
    bench.send(
        attempt_id,
        OperationsRequested(time=1.0),
        OperationCompleted(time=1.0, length=100, metric=0.5),
    )
    assert bench.trial(1).operations_closed
    assert bench.trial(1).state == "ACTIVE"
    assert bench.attempt(attempt_id).control_version > version
    assert reported(bench, experiment_id) == ([(100.0, 0.5)] if sampled else [])


def test_a_large_report_is_left_out_of_its_event(bench: Any) -> None:
    bench.create("single")
    bench.validate(bench.start(1), 1, loss=0.5, confusion=[list(range(40))] * 40)
    assert bench.events("validation")[-1] == {"steps_completed": 1, "metrics": {}}


def test_each_group_tells_of_its_newest_report_and_of_the_one_before_a_validation(
    bench: Any,
) -> None:
    bench.create("single")
    attempt = bench.start(1)
    report = bench.metrics
    bench.send(
        attempt,
        report("training", 1, loss=4.0),
        report("training", 2, loss=3.0),
        report("profiling", 2, wait=0.1),
        report("validation", 2, loss=3.5),
        report("training", 3, loss=2.0),
        report("training", 4, loss=1.0),
        report("profiling", 4, wait=0.2),
    )
    told = bench.events("metrics")
    assert [(event["group"], event["steps_completed"], event["count"]) for event in told] == [
        ("training", 2, 2), ("profiling", 2, 1), ("training", 4, 2), ("profiling", 4, 1),
    ]  # fmt: skip
    assert told[2]["metrics"] == {"loss": 1.0}
    told_in_order = [event.kind for event in bench.rows(tables.events)]
    kinds = [kind for kind in told_in_order if kind in ("metrics", "validation")]
    assert kinds == ["metrics", "metrics", "validation", "metrics", "metrics"]


def test_reports_of_other_ranks_name_their_rank(bench: Any) -> None:
    bench.create("single")
    bench.send(bench.start(1), bench.metrics("training_rank_2", 1, loss=1.0), rank=2)
    assert [event["rank"] for event in bench.events("metrics")] == [2]


# ---- where the time goes -----------------------------------------------------------------------


def test_the_time_of_a_trial_is_divided_over_its_attempts(bench: Any) -> None:
    """Many reports leave one row; those a restart may go on from stay."""
    bench.create()
    created = bench.trial(1).created_at

    def spent(after_s: float, event: Any, step: int, **seconds: float) -> TimeSpent:
        return TimeSpent(time=created + after_s, event=event, steps_completed=step, seconds=seconds)

    first = bench.start(1)
    bench.send(first, spent(20.0, "start", 0))
    bench.send(first, *(spent(20.0 + n, "report", n) for n in range(1, 10)))
    bench.send(first, spent(30.0, "checkpoint", 10, checkpoint=2.0))
    bench.send(first, *(spent(30.0 + n, "report", 10 + n, checkpoint=2.0) for n in range(1, 21)))
    # Another rank has a clock of its own, and no say.
    bench.send(first, spent(99.0, "start", 7), rank=2)
    bench.end(first, code=1)
    second = bench.start(1)
    bench.send(second, spent(75.0, "start", 10), spent(85.0, "end", 20))
    bench.end(second)

    def settle(transaction: Transaction) -> None:
        for attempt_id, begin_s, end_s in ((first, 10.0, 60.0), (second, 70.0, 86.0)):
            times = {"created_at": created + begin_s, "ended_at": created + end_s}
            is_it = tables.attempts.c.id == attempt_id
            transaction.connection.execute(update(tables.attempts).where(is_it).values(**times))
        transaction.connection.execute(update(tables.trials).values(ended_at=created + 86.0))

    bench.write(settle)
    with bench.database.read() as connection:
        shares, until = time_shares(connection, bench.trial(1))
    assert until == created + 86.0
    assert {name: round(seconds, 6) for name, seconds in shares.seconds().items() if seconds} == {
        "waiting_s": 20.0, "start_s": 15.0, "training_s": 18.0, "checkpoint_s": 2.0,
        "lost_s": 30.0, "other_s": 1.0,
    }  # fmt: skip
    events = [(row.attempt_id, row.event) for row in bench.rows(tables.time_marks)]
    assert events == [
        (first, "start"), (first, "checkpoint"), (first, "report"),
        (second, "start"), (second, "end"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("validation", "judged"), [(True, 0.9), ({"loss": 0.2, "epochs": 2}, 0.2), (False, None)]
)
def test_a_train_functions_report_counts_as_validation_as_far_as_it_says_so(
    bench: Any, halving: int, validation: Any, judged: float | None
) -> None:
    """The report has `loss` too, which counts only where nothing was evaluated apart from it."""
    attempt_id = bench.start(1)
    report = bench.metrics("training", 2, loss=0.9, epochs=2)
    told = msgspec.structs.replace(report, validation=validation)
    for rank in (2, 0):
        bench.send(attempt_id, told, rank=rank)
    given = [each for each in bench.inputs(halving) if each["type"] == "reported"]
    assert [each["metric"] for each in given] == ([] if judged is None else [judged])
    assert bench.trial(1).best_metric == judged
    with bench.database.read() as connection:
        groups = read_summary(connection, 1)
    assert groups["training"]["loss"].last == 0.9
    assert ("validation" in groups) == (judged is not None)
    kinds = [*bench.events("metrics"), *bench.events("validation")]
    assert len(kinds) == (3 if isinstance(validation, dict) else 2)
    bench.check_replay(halving)


def test_what_a_train_function_reports_without_the_searched_metric_is_judged_by_none(
    bench: Any, halving: int
) -> None:
    attempt_id = bench.start(1)
    report = bench.metrics("training", 1, train_loss=0.9)
    bench.send(attempt_id, msgspec.structs.replace(report, validation=True))
    assert bench.events("validation") == []
    assert [event["group"] for event in bench.events("metrics")] == ["training"]
    assert bench.inputs(halving)[-1]["type"] == "started"
