"""State changes of experiments and trials, and ingest of validation reports, in transactions."""

import json
import time
from math import isfinite
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, update

from paceline import faults
from paceline._base.journal_records import (
    MetricsReported,
    OperationCompleted,
    decode_value,
    encode_float,
)
from paceline._cluster.master.executors import Machines
from paceline._cluster.master.experiments.failures import (
    FailingNodes,
    counted_trial_states,
    describe_failure,
)
from paceline._cluster.master.experiments.search_operations import (
    SearchOperations,
    describe_missing_metric,
    describe_unmeasured,
    is_single,
    num_validations,
    others_have_reported,
)
from paceline._cluster.master.experiments.state_decisions import (
    EXPERIMENT_TRANSITIONS,
    INVALID_HP,
    TRIAL_TRANSITIONS,
    NotFoundError,
    SearchEnd,
    check_transition,
    experiment_end,
    search_exit,
    stopping_state,
    trial_end,
)
from paceline._cluster.master.experiments.storage_calls import FailingStores, StorageCalls
from paceline._cluster.master.experiments.stored_searches import Searches, store_search_view
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_rows_and_times import (
    measure_checkpoints,
    read_rows,
    read_series,
)
from paceline._cluster.master.store.row_ids_and_counts import update_experiment
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.master.waiting import WaitingRequests, Wakeups
from paceline._cluster.messages.states import (
    LIVE_TRIALS,
    AttemptState,
    ErrorKind,
    ExperimentState,
    TrialState,
)
from paceline.config._searcher_section import BATCHES, Searcher
from paceline.search._search_method import Exited, ExitReason, Reported

faults.register("master.trial.ended")

_LIVE_EXPERIMENTS = [s.value for s in ExperimentState if not s.is_terminal]
# Made once, as most requests need them.
_EXPERIMENT = select(tables.experiments).where(tables.experiments.c.id == bindparam("wanted"))
_TRIAL = select(tables.trials).where(tables.trials.c.id == bindparam("wanted"))
# Columns that a job makes large, and that few records need.
_LARGE = {"hparams", "status", "metadata", "alerts"}
_BRIEF_TRIAL = select(*(each for each in tables.trials.c if each.name not in _LARGE)).where(
    tables.trials.c.id == bindparam("wanted")
)

_TRIAL_CHANGE = update(tables.trials).where(tables.trials.c.id == bindparam("wanted"))
_BEST = update(tables.experiments).where(tables.experiments.c.id == bindparam("wanted"))
_RUNNING = select(tables.attempts.c.id).where(
    tables.attempts.c.experiment_id == bindparam("wanted"),
    tables.attempts.c.state == AttemptState.RUNNING.value,
)
_CONTROL_CHANGE = (
    update(tables.attempts)
    .where(tables.attempts.c.id == bindparam("wanted"))
    .values(control_version=tables.attempts.c.control_version + 1)
)


class StateChanges:
    """Set states, and wake whoever waits for the outcome.

    All methods run in the writer thread, inside the transaction they are given.

    Args:
        searches: The searches' states.
        logs: Where notes for a trial's reader go.
        machines: Where attempts run.
        wakeups: Wakes the reconciler after a commit that it should look at.
        controls: The requests that wait for a change of an attempt's control, by its id.
        default_storage: Where the checkpoints of experiments go that name no storage.
    """

    def __init__(
        self,
        searches: Searches,
        logs: LogStore,
        machines: Machines | None = None,
        wakeups: Wakeups | None = None,
        controls: WaitingRequests | None = None,
        default_storage: str = "",
    ) -> None:
        self.default_storage = default_storage
        # When this master began, in seconds since the epoch.
        self.since_s = time.time()
        self.searches = searches
        self.search_operations = SearchOperations(self, searches)
        self._logs = logs
        self.machines = machines or Machines()
        self.wakeups = wakeups or Wakeups()
        self._controls = controls or WaitingRequests()
        # Checkpoints whose files are being deleted. Transactions add to it, as they come one after
        # the other: then no trial may start from these any more. After a crash, they are deleted
        # again, or their files are gone.
        self.being_deleted: set[str] = set()
        self.storage_calls = StorageCalls()
        self.failing_stores = FailingStores()
        self.failing_nodes = FailingNodes()

    # ---- reading -------------------------------------------------------------------------

    @staticmethod
    def experiment(connection: Connection, experiment_id: int) -> Row[Any]:
        """Return an experiment's row.

        Raises:
            NotFoundError: There is none.
        """
        row = connection.execute(_EXPERIMENT, {"wanted": experiment_id}).first()
        if row is None:
            raise NotFoundError(f"There is no experiment {experiment_id}.")
        return row

    @staticmethod
    def trial(connection: Connection, trial_id: int) -> Row[Any]:
        """Return a trial's row.

        Raises:
            NotFoundError: There is none.
        """
        row = connection.execute(_TRIAL, {"wanted": trial_id}).first()
        if row is None:
            raise NotFoundError(f"There is no trial {trial_id}.")
        return row

    @staticmethod
    def brief_trial(connection: Connection, trial_id: int) -> Row[Any]:
        """Return a trial's row without its large columns, for each record of a job."""
        return connection.execute(_BRIEF_TRIAL, {"wanted": trial_id}).one()

    @staticmethod
    def live_trials(connection: Connection, experiment_id: int) -> list[Row[Any]]:
        """Return the trials of an experiment in a live state."""
        trials = tables.trials
        return list(
            connection.execute(
                select(trials)
                .where(trials.c.experiment_id == experiment_id, trials.c.state.in_(LIVE_TRIALS))
                .order_by(trials.c.id)
            )
        )

    @staticmethod
    def live_attempt(connection: Connection, trial_id: int) -> Row[Any] | None:
        """Return the attempt of a trial not yet ended, or None."""
        attempts = tables.attempts
        return connection.execute(
            select(attempts).where(
                attempts.c.trial_id == trial_id, attempts.c.state != AttemptState.ENDED.value
            )
        ).first()

    # ---- experiments ---------------------------------------------------------------------

    def set_experiment_state(
        self,
        transaction: Transaction,
        experiment_id: int,
        state: ExperimentState,
        *,
        error: str | None = None,
    ) -> None:
        """Move an experiment to another state.

        Raises:
            TransitionError: The state may not follow the present one.
        """
        row = self.experiment(transaction.connection, experiment_id)
        present = ExperimentState(row.state)
        check_transition(present, state, EXPERIMENT_TRANSITIONS, f"Experiment {experiment_id}")
        values: dict[str, Any] = {"state": state.value}
        if state.is_terminal:
            values["ended_at"] = time.time()
            values["retention_done"] = False
            if state is ExperimentState.COMPLETED:
                values["progress"] = 1.0
        # First error wins: later errors are mostly consequences.
        if error is not None and row.error is None:
            values["error"] = error
        update_experiment(transaction.connection, experiment_id, **values)
        transaction.emit(
            "experiment_state", experiment_id, state=state.value, error=error or row.error
        )
        transaction.after_commit(self.wakeups.wake)
        transaction.after_commit(lambda: self.searches.on_state(experiment_id))

    def stop_experiment(
        self,
        transaction: Transaction,
        experiment_id: int,
        state: ExperimentState,
        *,
        error: str | None = None,
    ) -> None:
        """Bring an experiment and all its live trials to a stopping state."""
        self.set_experiment_state(transaction, experiment_id, state, error=error)
        wanted = {
            ExperimentState.STOPPING_COMPLETED: TrialState.STOPPING_COMPLETED,
            ExperimentState.STOPPING_CANCELED: TrialState.STOPPING_CANCELED,
            ExperimentState.STOPPING_KILLED: TrialState.STOPPING_KILLED,
            ExperimentState.STOPPING_ERROR: TrialState.STOPPING_KILLED,
        }[state]
        reason = error or state.value.removeprefix("STOPPING_").lower()
        for trial in self.live_trials(transaction.connection, experiment_id):
            if wanted in TRIAL_TRANSITIONS[TrialState(trial.state)]:
                self.stop_trial(transaction, trial, wanted, reason)

    def tell_missed_exits(self, transaction: Transaction, experiment_id: int) -> None:
        """Report to a search the trials ended while the experiment was stopping."""
        search = self.searches.peek(transaction, experiment_id)
        assert search is not None
        running = {view.request_id for view in search.trials() if view.exit_reason is None}
        trials = tables.trials.c
        query = select(tables.trials).where(
            trials.experiment_id == experiment_id, trials.state.not_in(LIVE_TRIALS)
        )
        for trial in transaction.connection.execute(query.order_by(trials.id)).all():
            if trial.request_id in running:
                is_invalid = trial.stop_reason == INVALID_HP
                reason = search_exit(TrialState(trial.state))
                given = Exited(
                    request_id=trial.request_id,
                    reason=ExitReason.INVALID_HP if is_invalid else reason,
                )
                self.search_operations.apply_input(transaction, experiment_id, given)

    def end_search(self, transaction: Transaction, experiment_id: int, end: SearchEnd) -> None:
        """Store the end of an experiment's search; further inputs are ignored."""
        update_experiment(transaction.connection, experiment_id, search_end=end.value)

    def fail_experiment(self, transaction: Transaction, experiment_id: int, message: str) -> None:
        """Stop an experiment after an error no further attempt could fix."""
        row = self.experiment(transaction.connection, experiment_id)
        if ExperimentState.STOPPING_ERROR in EXPERIMENT_TRANSITIONS[ExperimentState(row.state)]:
            self.stop_experiment(
                transaction, experiment_id, ExperimentState.STOPPING_ERROR, error=message
            )

    def end_experiment_if_done(self, transaction: Transaction, experiment_id: int) -> None:
        """End an experiment without live trials, once stopping or with an ended search."""
        row = self.experiment(transaction.connection, experiment_id)
        state = ExperimentState(row.state)
        if state.is_terminal or self._has_live_trials(transaction.connection, experiment_id):
            return
        if not state.is_stopping:
            if row.search_end is None:
                return
            connection = transaction.connection
            stopping = stopping_state(
                SearchEnd(row.search_end), counted_trial_states(connection, experiment_id)
            )
            error = None
            if row.search_end == SearchEnd.UNMEASURED.value:
                error = describe_unmeasured(connection, experiment_id)
            elif stopping is ExperimentState.STOPPING_ERROR:
                error = describe_failure(connection, experiment_id)
            self.set_experiment_state(transaction, experiment_id, stopping, error=error)
            state = stopping
        store_search_view(transaction, self.searches, experiment_id)
        self.set_experiment_state(transaction, experiment_id, experiment_end(state))
        transaction.after_commit(lambda: self.searches.forget(experiment_id))

    @staticmethod
    def _has_live_trials(connection: Connection, experiment_id: int) -> bool:
        trials = tables.trials
        query = select(trials.c.id).where(
            trials.c.experiment_id == experiment_id, trials.c.state.in_(LIVE_TRIALS)
        )
        return connection.execute(query.limit(1)).first() is not None

    # ---- trials --------------------------------------------------------------------------

    def set_trial_state(
        self,
        transaction: Transaction,
        trial: Row[Any],
        state: TrialState,
        *,
        reason: str | None = None,
        error: str | None = None,
        kind: ErrorKind | None = None,
        restarts: int | None = None,
    ) -> None:
        """Move a trial to another state; `kind` is the kind of `error`.

        Raises:
            TransitionError: The state may not follow the present one.
        """
        check_transition(TrialState(trial.state), state, TRIAL_TRANSITIONS, f"Trial {trial.id}")
        values: dict[str, Any] = {"state": state.value}
        if reason is not None:
            values["stop_reason"] = reason
        if error is not None:
            values |= {"error": error, "error_kind": kind and kind.value}
        if restarts is not None:
            values |= {"restarts": restarts, "retries": 0}
        if state.is_terminal:
            values["ended_at"] = time.time()
        self.update_trial(transaction, trial.id, **values)
        transaction.emit(
            "trial_state",
            trial.experiment_id,
            trial.id,
            state=state.value,
            reason=reason or trial.stop_reason,
            error=error,
            error_kind=kind and kind.value,
        )
        transaction.after_commit(self.wakeups.wake)

    @staticmethod
    def update_trial(transaction: Transaction, trial_id: int, **values: Any) -> None:
        """Set columns of a trial."""
        transaction.connection.execute(_TRIAL_CHANGE, {"wanted": trial_id, **values})

    def stop_trial(
        self, transaction: Transaction, trial: Row[Any], state: TrialState, reason: str
    ) -> None:
        """Move a trial to a stopping state; without an attempt the trial ends at once."""
        self.set_trial_state(transaction, trial, state, reason=reason)
        attempt = self.live_attempt(transaction.connection, trial.id)
        if attempt is None:
            stopped = self.trial(transaction.connection, trial.id)
            self.end_trial(transaction, stopped, trial_end(state))
        elif state in (TrialState.STOPPING_KILLED, TrialState.STOPPING_ERROR):
            self.change_attempt(transaction, attempt.id, should_kill=True)
        else:
            self.preempt(transaction, attempt, reason)

    def end_trial(
        self,
        transaction: Transaction,
        trial: Row[Any],
        state: TrialState,
        *,
        exit_reason: ExitReason | None = None,
        reason: str | None = None,
        error: str | None = None,
        kind: ErrorKind | None = None,
    ) -> None:
        """Move a trial to a terminal state and inform the search; `kind` is the kind of `error`."""
        self.set_trial_state(transaction, trial, state, reason=reason, error=error, kind=kind)
        faults.reach("master.trial.ended")
        given = Exited(
            request_id=trial.request_id,
            reason=exit_reason or search_exit(state),
            is_out_of_memory=state is TrialState.ERROR and kind is ErrorKind.MEMORY,
        )
        self.search_operations.apply_input(transaction, trial.experiment_id, given)
        self.end_experiment_if_done(transaction, trial.experiment_id)

    def note(
        self, transaction: Transaction, trial_id: int, attempt: int, level: str, text: str
    ) -> None:
        """Add a line to a trial's log once the transaction is committed."""
        transaction.after_commit(
            lambda: self._logs.append_note(trial_id, max(attempt, 1), level, text)
        )

    # ---- attempts ------------------------------------------------------------------------

    def change_attempt(self, transaction: Transaction, attempt_id: int, **values: Any) -> None:
        """Set columns of an attempt and notify its runner through a new control version."""
        transaction.connection.execute(_CONTROL_CHANGE, {"wanted": attempt_id, **values})
        transaction.after_commit(lambda: self._controls.notify(attempt_id))

    def preempt(self, transaction: Transaction, attempt: Row[Any], reason: str) -> None:
        """Ask an attempt to checkpoint and leave."""
        if attempt.preempt_reason is None:
            self.change_attempt(transaction, attempt.id, preempt_reason=reason)


def experiments_without_live_trials(connection: Connection) -> list[int]:
    """Return the live managed experiments without live trials."""
    experiments, trials = tables.experiments, tables.trials
    has_live_trials = (
        select(trials.c.id)
        .where(trials.c.experiment_id == experiments.c.id, trials.c.state.in_(LIVE_TRIALS))
        .exists()
    )
    query = select(experiments.c.id).where(
        experiments.c.state.in_(_LIVE_EXPERIMENTS),
        experiments.c.external_id.is_(None),
        ~has_live_trials,
    )
    return list(connection.execute(query).scalars())


def update_best(
    changes: StateChanges,
    transaction: Transaction,
    trial: Row[Any],
    step: int,
    value: float,
    experiment: Row[Any],
) -> None:
    """Take a new value of the searched metric into the trial's and the experiment's best."""
    searcher = config_of(experiment).searcher
    values: dict[str, Any] = {"latest_metric": encode_float(value)}
    is_best = _is_better(value, trial.best_metric, searcher.smaller_is_better)
    if is_best:
        values |= {"best_metric": value, "best_step": step}
    changes.update_trial(transaction, trial.id, **values)
    best = (experiment.best_metric, experiment.best_trial_id)
    is_first = value == best[0] and trial.id < (best[1] or 0)
    # A better value of a trial never makes another one the best.
    if is_best and (is_first or _is_better(value, best[0], searcher.smaller_is_better)):
        _set_best(changes, transaction, trial.experiment_id, trial.id, value)


def recompute_best(changes: StateChanges, transaction: Transaction, trial: Row[Any]) -> None:
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
        select(trials.c.id, trials.c.best_metric)
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


# Limit of validations of a trial without the searched metric: the search then ends,
# unless some trial has reported the metric.
_MOST_UNMEASURED = 3


def take_validation(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], report: MetricsReported
) -> None:
    connection = transaction.connection
    trial = changes.brief_trial(connection, attempt.trial_id)
    experiment = changes.experiment(connection, attempt.experiment_id)
    searcher = config_of(experiment).searcher
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
        update_best(changes, transaction, trial, step, value, experiment)
        measure_checkpoints(connection, trial.id, searcher.metric, step=step)
    is_judged = searcher.judged_metrics is not None
    values = _values_of(searcher, metrics)
    if values is None or (is_judged and _time_of(searcher, metrics, step) is None):
        _check_metric(changes, transaction, attempt, report)
        # It may have ended the search.
        experiment = changes.experiment(connection, attempt.experiment_id)
    if not searcher.takes_reports or trial.uses_operations:
        return
    # Reports of a stopped trial decide nothing. Their number depends on timing,
    # so they stay out of the search's log too.
    if trial.state != TrialState.ACTIVE.value:
        return
    if values is None or _time_of(searcher, metrics, step) is None:
        # Two reports of one step are merged: the other half may have come before.
        metrics = _standing_metrics(connection, trial.id, step) or metrics
        values = _values_of(searcher, metrics)
    reached = _time_of(searcher, metrics, step)
    if values is not None and reached is not None:
        first, *others = values
        given = Reported(
            request_id=trial.request_id, time=reached, metric=first, others=tuple(others)
        )
        changes.search_operations.apply_input(transaction, attempt.experiment_id, given, experiment)


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
    # An operation has one metric, which says too little of several objectives.
    if searcher.takes_reports and not searcher.objectives:
        metric = float(decode_value(record.metric))
        given = Reported(request_id=trial.request_id, time=float(record.length), metric=metric)
        changes.search_operations.apply_input(transaction, attempt.experiment_id, given)
    if not searcher.wants_reports:
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
    return metrics if len(json.dumps(metrics)) <= 2000 else {}
