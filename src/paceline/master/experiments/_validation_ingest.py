"""Ingest of validation reports: the best metric, and what the search is told."""

import json
from math import isfinite
from typing import Any

from sqlalchemy import Connection, Row

from paceline.config import BATCHES, Searcher
from paceline.journal import MetricsReported, OperationCompleted, decode_value
from paceline.master.experiments._best_metric import update_best
from paceline.master.experiments._searched_metric_checks import (
    describe_missing_metric,
    is_single,
    num_validations,
    others_have_reported,
)
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import SearchEnd
from paceline.master.store import Transaction, config_of, measure_checkpoints, read_rows
from paceline.messages.states import TrialState
from paceline.search import Reported

# So many validations of a trial without the searched metric end a search that has never got it.
_MOST_UNMEASURED = 3


def take_validation(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], report: MetricsReported
) -> None:
    connection = transaction.connection
    trial = changes.trial(connection, attempt.trial_id)
    searcher = config_of(changes.experiment(connection, attempt.experiment_id)).searcher
    if report.validation is True and searcher.metric not in report.metrics:
        # A train function may report much besides what is searched for.
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
    # What a stopped trial still reports decides nothing. How much that is depends on chance,
    # so it stays out of the search's log too.
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
    """Warn of a validation without the searched metric, or end a search that never gets it.

    The first validation of a single trial is warned of. A search ends at the third one of a trial
    if no trial has reported the metric.
    """
    connection = transaction.connection
    trial = changes.trial(connection, attempt.trial_id)
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
    """End a search for whose metric no trial has reported a value.

    Args:
        changes: Changes the states.
        transaction: The transaction.
        trial: The trial at which that was seen.
        problem: What is missing.
    """
    changes.end_search(transaction, trial.experiment_id, SearchEnd.UNMEASURED)
    changes.fail_experiment(transaction, trial.experiment_id, f"Trial {trial.id}: {problem}")
    changes.end_experiment_if_done(transaction, trial.experiment_id)


def take_operation(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], record: OperationCompleted
) -> None:
    connection = transaction.connection
    trial = changes.trial(connection, attempt.trial_id)
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
    """Return what the validation rows say at a step."""
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
