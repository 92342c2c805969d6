"""Ingest of validation reports: the best metric, and inputs of the search."""

import json
from math import isfinite
from typing import Any

from sqlalchemy import Connection, Row, select, update

from paceline._base.journal_records import (
    MetricsReported,
    OperationCompleted,
    decode_value,
    encode_float,
)
from paceline._cluster.master.experiments.search_operations import (
    describe_missing_metric,
    is_single,
    num_validations,
    others_have_reported,
)
from paceline._cluster.master.experiments.state_decisions import SearchEnd
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_rows_and_times import (
    measure_checkpoints,
    read_rows,
    read_series,
)
from paceline._cluster.messages.states import AttemptState, TrialState
from paceline.config._searcher_section import BATCHES, Searcher
from paceline.search._search_method import Reported


def update_best(
    changes: StateChanges, transaction: Transaction, trial: Row[Any], step: int, value: float
) -> None:
    """Take a new value of the searched metric into the trial's and the experiment's best."""
    searcher = _metric_searcher(changes, transaction, trial)
    values: dict[str, Any] = {"latest_metric": encode_float(value)}
    is_best = _is_better(value, trial.best_metric, searcher.smaller_is_better)
    if is_best:
        values |= {"best_metric": value, "best_step": step}
    changes.update_trial(transaction, trial.id, **values)
    if is_best:
        _update_experiment(changes, transaction, trial.experiment_id, searcher)


def recompute_best(changes: StateChanges, transaction: Transaction, trial: Row[Any]) -> None:
    """Work the best out anew after a restart superseded some reports."""
    searcher = _metric_searcher(changes, transaction, trial)
    best: float | None = None
    values: dict[str, Any] = {"best_step": None, "latest_metric": None}
    for step, value in read_series(transaction.connection, trial.id, "validation", searcher.metric):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        values["latest_metric"] = encode_float(float(value))
        if _is_better(float(value), best, searcher.smaller_is_better):
            best, values["best_step"] = float(value), step
    changes.update_trial(transaction, trial.id, best_metric=best, **values)
    _update_experiment(changes, transaction, trial.experiment_id, searcher)


def _metric_searcher(changes: StateChanges, transaction: Transaction, trial: Row[Any]) -> Searcher:
    experiment = changes.experiment(transaction.connection, trial.experiment_id)
    return config_of(experiment).searcher


def _update_experiment(
    changes: StateChanges,
    transaction: Transaction,
    experiment_id: int,
    searcher: Searcher,
) -> None:
    trials, connection = tables.trials, transaction.connection
    value = trials.c.best_metric
    order = value if searcher.smaller_is_better else value.desc()
    best = connection.execute(
        select(trials.c.id, trials.c.best_metric)
        .where(trials.c.experiment_id == experiment_id, trials.c.best_metric.is_not(None))
        .order_by(order, trials.c.id)
        .limit(1)
    ).first()
    present = changes.experiment(connection, experiment_id)
    found = (None, None) if best is None else (best.id, best.best_metric)
    if found == (present.best_trial_id, present.best_metric):
        return
    connection.execute(
        update(tables.experiments)
        .where(tables.experiments.c.id == experiment_id)
        .values(best_trial_id=found[0], best_metric=found[1])
    )
    attempts = tables.attempts
    running = select(attempts.c.id).where(
        attempts.c.experiment_id == experiment_id,
        attempts.c.state == AttemptState.RUNNING.value,
    )
    for attempt_id in connection.execute(running).scalars().all():
        changes.change_attempt(transaction, attempt_id)


def _is_better(value: float, best: float | None, is_smaller_better: bool) -> bool:
    if not isfinite(value):
        return False
    if best is None:
        return True
    return value < best if is_smaller_better else value > best


# Limit of validations of a trial without the searched metric: the search then ends,
# unless some trial has reported the metric.
_MOST_UNMEASURED = 3


def take_validation(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], report: MetricsReported
) -> None:
    connection = transaction.connection
    trial = changes.brief_trial(connection, attempt.trial_id)
    searcher = config_of(changes.experiment(connection, attempt.experiment_id)).searcher
    if report.validation is True and searcher.metric not in report.metrics:
        # A train function may report much besides the searched metric.
        return
    transaction.emit(
        "validation",
        attempt.experiment_id,
        trial.id,
        steps_completed=report.steps_completed,
        metrics=small_metrics(report.metrics),
    )
    step = report.steps_completed
    metrics = decode_value(report.metrics)
    if attempt.number > 1 and step <= attempt.resumed_steps:
        # An earlier attempt's value stands, for the search as for the rows.
        metrics = _standing_metrics(connection, trial.id, step) or metrics
    value = _number(metrics.get(searcher.metric))
    if value is not None:
        update_best(changes, transaction, trial, step, value)
        measure_checkpoints(connection, trial.id, searcher.metric, step=step)
    is_judged = searcher.judged_metrics is not None
    if value is None or (is_judged and _time_of(searcher, metrics, step) is None):
        _check_metric(changes, transaction, attempt, report)
    if searcher.judged_metrics is None or trial.uses_operations:
        return
    # Reports of a stopped trial decide nothing. Their number depends on timing,
    # so they stay out of the search's log too.
    if trial.state != TrialState.ACTIVE.value:
        return
    if value is None or _time_of(searcher, metrics, step) is None:
        # Two reports of one step are merged: the other half may have come before.
        metrics = _standing_metrics(connection, trial.id, step) or metrics
        value = _number(metrics.get(searcher.metric))
    reached = _time_of(searcher, metrics, step)
    if value is not None and reached is not None:
        given = Reported(request_id=trial.request_id, time=reached, metric=value)
        changes.search_operations.apply_input(transaction, attempt.experiment_id, given)


def _check_metric(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], report: MetricsReported
) -> None:
    """Warn about validations without the searched metric, or end a search without any value.

    The first validation of a single trial is warned of. A search ends at the third one of a trial
    if no trial has reported the metric.
    """
    connection = transaction.connection
    trial = changes.brief_trial(connection, attempt.trial_id)
    experiment = changes.experiment(connection, attempt.experiment_id)
    if trial.state != TrialState.ACTIVE.value or trial.uses_operations:
        return
    number, first_step = num_validations(connection, trial.id)
    if not is_single(experiment) and number < _MOST_UNMEASURED:
        return
    problem = describe_missing_metric(transaction, trial, experiment)
    if problem is None:
        return
    if not is_single(experiment):
        if not others_have_reported(transaction, trial, experiment):
            changes.note(transaction, trial.id, attempt.number, "ERROR", problem)
            end_unmeasured(changes, transaction, trial, problem)
    elif first_step == report.steps_completed and attempt.number == 1:
        changes.note(transaction, trial.id, attempt.number, "WARNING", problem)


def end_unmeasured(
    changes: StateChanges, transaction: Transaction, trial: Row[Any], problem: str
) -> None:
    """End a search without any value of its metric, and fail the experiment.

    Args:
        changes: Changes the states.
        transaction: The transaction.
        trial: The trial at which that was seen.
        problem: The missing part.
    """
    changes.end_search(transaction, trial.experiment_id, SearchEnd.UNMEASURED)
    changes.fail_experiment(transaction, trial.experiment_id, f"Trial {trial.id}: {problem}")
    changes.end_experiment_if_done(transaction, trial.experiment_id)


def take_operation(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], record: OperationCompleted
) -> None:
    connection = transaction.connection
    trial = changes.brief_trial(connection, attempt.trial_id)
    searcher = config_of(changes.experiment(connection, attempt.experiment_id)).searcher
    if trial.state != TrialState.ACTIVE.value:
        return
    if searcher.judged_metrics is not None:
        metric = float(decode_value(record.metric))
        given = Reported(request_id=trial.request_id, time=float(record.length), metric=metric)
        changes.search_operations.apply_input(transaction, attempt.experiment_id, given)
    else:
        changes.update_trial(transaction, trial.id, operations_closed=True)
        changes.change_attempt(transaction, attempt.id)


def _standing_metrics(connection: Connection, trial_id: int, step: int) -> dict[str, Any]:
    """Return the stored validation metrics at a step, or an empty dict."""
    rows = read_rows(connection, trial_id, "validation", after_step=step - 1, limit=1)
    return rows[0].metrics if rows and rows[0].step == step else {}


def _time_of(searcher: Searcher, metrics: dict[str, Any], step: int) -> float | None:
    reached = _number(metrics.get(searcher.time_name))
    if reached is not None and isfinite(reached):
        return reached
    return float(step) if searcher.time_name == BATCHES else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def small_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave large reports out of events; whoever follows reads them from the trial."""
    return metrics if len(json.dumps(metrics)) <= 2000 else {}
