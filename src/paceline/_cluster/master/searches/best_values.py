"""Validation reports: best values, and what the search decides on them."""

from math import isfinite
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from paceline._base.journal_records import (
    AnyRecord,
    MetricsReported,
    OperationCompleted,
    decode_value,
    encode_float,
)
from paceline._cluster.master.experiments.state_decisions import SearchEnd
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.searches.search_operations import (
    describe_missing_metric,
    is_single,
    num_validations,
    others_have_reported,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_rows import measure_checkpoints, read_rows, read_series
from paceline._cluster.messages.states import AttemptState, TrialState
from paceline.config._searcher_section import BATCHES, Searcher
from paceline.search._search_messages import Reported

_BEST = sa.update(tables.experiments).where(tables.experiments.c.id == sa.bindparam("wanted"))
_RUNNING = sa.select(tables.attempts.c.id).where(
    tables.attempts.c.experiment_id == sa.bindparam("wanted"),
    tables.attempts.c.state == AttemptState.RUNNING.value,
)

# Limit of validations of a trial without the searched metric: the search then ends,
# unless some trial has reported the metric.
_MOST_UNMEASURED = 3


class Validations:
    """Validation reports of an attempt that follow each other, without other records between.

    The rows of the trial and its experiment are read once for all reports after which they are the
    same, and what nobody reads meanwhile is written once, by `settle`.

    Args:
        changes: Changes the states.
        transaction: The transaction.
        attempt: The attempt that reports.
    """

    def __init__(
        self, changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any]
    ) -> None:
        self._changes, self._transaction, self._attempt = changes, transaction, attempt
        self._rows: tuple[sa.Row[Any], sa.Row[Any], Searcher] | None = None
        self._is_deciding = self._is_progress_due = False
        self._best: float | None = None
        self._best_of_all: tuple[float | None, int | None] = (None, None)
        # Values to write, and the steps at which there were any.
        self._values: dict[str, Any] = {}
        self._steps: set[int] = set()
        self._merged_steps: set[int] = set()

    def take(self, report: MetricsReported) -> None:
        """Take in a report: for those who follow, the best values, and the search."""
        trial, experiment, searcher = self._rows or self._read_rows()
        if report.validation is True and searcher.metric not in report.metrics:
            # A train function may report much besides the searched metric.
            return
        step = report.steps_completed
        self._transaction.emit(
            "validation",
            experiment.id,
            trial.id,
            steps_completed=step,
            metrics=small_metrics(report.metrics),
        )
        metrics = decode_value(report.metrics)
        if self._attempt.number > 1 and step <= self._attempt.resumed_steps:
            # An earlier attempt's value stands, for the search as for the rows.
            metrics = self._standing_metrics(step) or metrics
        value = _number(metrics.get(searcher.metric))
        if value is not None:
            self._take_value(value, step, is_smaller_better=searcher.smaller_is_better)
        values, reached = _values_of(searcher, metrics), _time_of(searcher, metrics, step)
        is_whole = values is not None and reached is not None
        if not is_whole and (values is None or searcher.judged_metrics is not None):
            self._write()
            _check_metric(self._changes, self._transaction, self._attempt, report)
            # It may have ended the search.
            experiment = self._read_rows()[1]
        if not self._is_deciding or step in self._merged_steps:
            return
        if not is_whole:
            # Two reports of one step are merged: the other half may have come before.
            metrics = self._standing_metrics(step) or metrics
            values, reached = _values_of(searcher, metrics), _time_of(searcher, metrics, step)
            if values is not None and reached is not None:
                # The rows of a request are stored before: a half may have seen the later one.
                self._merged_steps.add(step)
        if values is not None and reached is not None:
            first, *others = values
            given = Reported(
                request_id=trial.request_id, time=reached, metric=first, others=tuple(others)
            )
            apply = self._changes.search_operations.apply_input
            self._is_progress_due = True
            if not apply(self._transaction, experiment.id, given, experiment, self._write):
                # The decision has updated the progress already.
                self._is_progress_due = False
                self._write()

    def _read_rows(self) -> tuple[sa.Row[Any], sa.Row[Any], Searcher]:
        connection = self._transaction.connection
        trial = self._changes.brief_trial(connection, self._attempt.trial_id)
        experiment = self._changes.experiment(connection, self._attempt.experiment_id)
        self._best = trial.best_metric
        self._best_of_all = experiment.best_metric, experiment.best_trial_id
        searcher = config_of(experiment).searcher
        # Reports of a stopped trial decide nothing. Their number depends on timing,
        # so they stay out of the search's log too.
        is_active = trial.state == TrialState.ACTIVE.value
        self._is_deciding = is_active and searcher.takes_reports and not trial.uses_operations
        self._rows = trial, experiment, searcher
        return self._rows

    def _take_value(self, value: float, step: int, *, is_smaller_better: bool) -> None:
        self._steps.add(step)
        self._values["latest_metric"] = encode_float(value)
        if not _is_better(value, self._best, is_smaller_better):
            return
        self._best = value
        self._values |= {"best_metric": value, "best_step": step}
        best, best_trial_id = self._best_of_all
        trial_id = self._attempt.trial_id
        is_earlier = value == best and trial_id < (best_trial_id or 0)
        # A better value of a trial never makes another one the best.
        if is_earlier or _is_better(value, best, is_smaller_better):
            self._best_of_all = value, trial_id

    def settle(self) -> None:
        """Write what is left, with the search's progress; the next report reads the rows anew."""
        self._write()
        if self._is_progress_due:
            self._is_progress_due = False
            operations = self._changes.search_operations
            operations.update_progress(self._transaction, self._attempt.experiment_id)

    def _write(self) -> None:
        if self._steps and self._rows is not None:
            trial, experiment, searcher = self._rows
            self._changes.update_trial(self._transaction, trial.id, **self._values)
            value, trial_id = self._best_of_all
            if (value, trial_id) != (experiment.best_metric, experiment.best_trial_id):
                _set_best(self._changes, self._transaction, experiment.id, trial_id, value)
            measure_checkpoints(
                self._transaction.connection,
                trial.id,
                searcher.metric,
                least=min(self._steps),
                most=max(self._steps),
            )
        self._rows, self._values, self._steps = None, {}, set()

    def _standing_metrics(self, step: int) -> dict[str, Any]:
        """Return the stored validation metrics at a step, or an empty dict."""
        connection, trial_id = self._transaction.connection, self._attempt.trial_id
        rows = read_rows(connection, trial_id, "validation", after_step=step - 1, limit=1)
        return rows[0].metrics if rows and rows[0].step == step else {}


def recompute_best(changes: StateChanges, transaction: Transaction, trial: sa.Row[Any]) -> None:
    """Work the best out anew after a restart superseded some reports."""
    experiment = changes.experiment(transaction.connection, trial.experiment_id)
    searcher = config_of(experiment).searcher
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
        sa.select(trials.c.id, trials.c.best_metric)
        .where(trials.c.experiment_id == experiment_id, trials.c.best_metric.is_not(None))
        .order_by(order, trials.c.id)
        .limit(1)
    ).first()
    present = changes.experiment(connection, experiment_id)
    found = (None, None) if best is None else (best.id, best.best_metric)
    if found != (present.best_trial_id, present.best_metric):
        _set_best(changes, transaction, experiment_id, *found)


def _set_best(
    changes: StateChanges,
    transaction: Transaction,
    experiment_id: int,
    trial_id: int | None,
    value: float | None,
) -> None:
    connection, found = transaction.connection, {"wanted": experiment_id}
    connection.execute(_BEST, found | {"best_trial_id": trial_id, "best_metric": value})
    for attempt_id in connection.execute(_RUNNING, found).scalars().all():
        changes.change_attempt(transaction, attempt_id)


def _is_better(value: float, best: float | None, is_smaller_better: bool) -> bool:
    if not isfinite(value):
        return False
    if best is None:
        return True
    return value < best if is_smaller_better else value > best


def _check_metric(
    changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any], report: MetricsReported
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
    changes: StateChanges, transaction: Transaction, trial: sa.Row[Any], problem: str
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
    changes: StateChanges,
    transaction: Transaction,
    attempt: sa.Row[Any],
    record: OperationCompleted,
) -> None:
    connection = transaction.connection
    trial = changes.brief_trial(connection, attempt.trial_id)
    searcher = config_of(changes.experiment(connection, attempt.experiment_id)).searcher
    if trial.state != TrialState.ACTIVE.value:
        return
    # An operation has one metric, which says too little of several objectives.
    if searcher.takes_reports and not searcher.objectives:
        metric = float(decode_value(record.metric))
        given = Reported(request_id=trial.request_id, time=float(record.length), metric=metric)
        changes.search_operations.apply_input(transaction, attempt.experiment_id, given)
    if not searcher.wants_reports:
        changes.update_trial(transaction, trial.id, operations_closed=True)
        changes.change_attempt(transaction, attempt.id)


def _time_of(searcher: Searcher, metrics: dict[str, Any], step: int) -> float | None:
    reached = _number(metrics.get(searcher.time_name))
    if reached is not None and isfinite(reached):
        return reached
    return float(step) if searcher.time_name == BATCHES else None


def _values_of(searcher: Searcher, metrics: dict[str, Any]) -> list[float] | None:
    """Return the values of all objectives; None without all of them."""
    values = [_number(metrics.get(name)) for name in searcher.metrics]
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def small_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave large reports out of events; whoever follows reads them from the trial."""
    return metrics if len(msgspec.json.encode(metrics)) <= 2000 else {}


CHIEF = 0


def with_validations(
    connection: sa.Connection, attempt: sa.Row[Any], rank: int, records: list[AnyRecord]
) -> list[AnyRecord]:
    """Return the records, with a validation added for each train function report so marked.

    Other ranks than the chief are not judged, and a run without this master has no search: their
    reports stay unchanged. A report whose `validation` is still True is shown as the validation
    beside it.
    """
    if not any(isinstance(each, MetricsReported) and each.validation for each in records):
        return records
    experiment = StateChanges.experiment(connection, attempt.experiment_id)
    is_judged = rank == CHIEF and experiment.external_id is None
    metric = config_of(experiment).searcher.metric
    found: list[AnyRecord] = []
    for record in records:
        if not isinstance(record, MetricsReported) or not record.validation:
            found.append(record)
            continue
        is_whole = record.validation is True
        judged = record.metrics if record.validation is True else record.validation
        found.append(replace(record, validation=is_judged and is_whole and metric in judged))
        if is_judged:
            found.append(replace(record, group="validation", metrics=judged, validation=is_whole))
    return found
