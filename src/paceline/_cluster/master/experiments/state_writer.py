"""State changes of experiments and trials, and ingest of validation reports, in transactions."""

import time
from typing import Any

import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.executors import Machines
from paceline._cluster.master.experiments.failing_stores import FailingStores
from paceline._cluster.master.experiments.failure_causes import (
    FailingNodes,
    counted_trial_states,
    describe_failure,
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
from paceline._cluster.master.experiments.storage_calls import StorageCalls
from paceline._cluster.master.searches.search_operations import (
    SearchOperations,
    describe_unmeasured,
)
from paceline._cluster.master.searches.stored_searches import Searches, store_search_view
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
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
from paceline.search._search_messages import Exited, ExitReason

faults.register("master.trial.ended")

_LIVE_EXPERIMENTS = [s.value for s in ExperimentState if not s.is_terminal]
# Made once, as most requests need them.
_EXPERIMENT = sa.select(tables.experiments).where(tables.experiments.c.id == sa.bindparam("wanted"))
_TRIAL = sa.select(tables.trials).where(tables.trials.c.id == sa.bindparam("wanted"))
# Columns that a job makes large, and that few records need.
_LARGE = {"hparams", "status", "metadata", "alerts"}
_BRIEF_TRIAL = sa.select(*(each for each in tables.trials.c if each.name not in _LARGE)).where(
    tables.trials.c.id == sa.bindparam("wanted")
)

_TRIAL_CHANGE = sa.update(tables.trials).where(tables.trials.c.id == sa.bindparam("wanted"))
_CONTROL_CHANGE = (
    sa.update(tables.attempts)
    .where(tables.attempts.c.id == sa.bindparam("wanted"))
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
    def experiment(connection: sa.Connection, experiment_id: int) -> sa.Row[Any]:
        """Return an experiment's row.

        Raises:
            NotFoundError: There is none.
        """
        row = connection.execute(_EXPERIMENT, {"wanted": experiment_id}).first()
        if row is None:
            raise NotFoundError(f"There is no experiment {experiment_id}.")
        return row

    @staticmethod
    def trial(connection: sa.Connection, trial_id: int) -> sa.Row[Any]:
        """Return a trial's row.

        Raises:
            NotFoundError: There is none.
        """
        row = connection.execute(_TRIAL, {"wanted": trial_id}).first()
        if row is None:
            raise NotFoundError(f"There is no trial {trial_id}.")
        return row

    @staticmethod
    def brief_trial(connection: sa.Connection, trial_id: int) -> sa.Row[Any]:
        """Return a trial's row without its large columns, for each record of a job."""
        return connection.execute(_BRIEF_TRIAL, {"wanted": trial_id}).one()

    @staticmethod
    def live_trials(connection: sa.Connection, experiment_id: int) -> list[sa.Row[Any]]:
        """Return the trials of an experiment in a live state."""
        trials = tables.trials
        return list(
            connection.execute(
                sa.select(trials)
                .where(trials.c.experiment_id == experiment_id, trials.c.state.in_(LIVE_TRIALS))
                .order_by(trials.c.id)
            )
        )

    @staticmethod
    def live_attempt(connection: sa.Connection, trial_id: int) -> sa.Row[Any] | None:
        """Return the attempt of a trial not yet ended, or None."""
        attempts = tables.attempts
        return connection.execute(
            sa.select(attempts).where(
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
        query = sa.select(tables.trials).where(
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
    def _has_live_trials(connection: sa.Connection, experiment_id: int) -> bool:
        trials = tables.trials
        query = sa.select(trials.c.id).where(
            trials.c.experiment_id == experiment_id, trials.c.state.in_(LIVE_TRIALS)
        )
        return connection.execute(query.limit(1)).first() is not None

    # ---- trials --------------------------------------------------------------------------

    def set_trial_state(
        self,
        transaction: Transaction,
        trial: sa.Row[Any],
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
        self, transaction: Transaction, trial: sa.Row[Any], state: TrialState, reason: str
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
        trial: sa.Row[Any],
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

    def preempt(self, transaction: Transaction, attempt: sa.Row[Any], reason: str) -> None:
        """Ask an attempt to checkpoint and leave."""
        if attempt.preempt_reason is None:
            self.change_attempt(transaction, attempt.id, preempt_reason=reason)


def experiments_without_live_trials(connection: sa.Connection) -> list[int]:
    """Return the live managed experiments without live trials."""
    experiments, trials = tables.experiments, tables.trials
    has_live_trials = (
        sa.select(trials.c.id)
        .where(trials.c.experiment_id == experiments.c.id, trials.c.state.in_(LIVE_TRIALS))
        .exists()
    )
    query = sa.select(experiments.c.id).where(
        experiments.c.state.in_(_LIVE_EXPERIMENTS),
        experiments.c.external_id.is_(None),
        ~has_live_trials,
    )
    return list(connection.execute(query).scalars())
