"""Inputs of searches, and the operations that follow: create, train on and stop trials."""

import logging
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, insert, select, update

from paceline import faults
from paceline.config import Searcher
from paceline.master.experiments._searched_metric_checks import is_never_finite
from paceline.master.experiments._state_transitions import SearchEnd
from paceline.master.experiments._stored_searches import Searches
from paceline.master.store import Transaction, config_of, new_id, tables
from paceline.messages.states import (
    FULLY_TRAINED,
    STOPPED_BY_SEARCH,
    ExperimentState,
    TrialState,
)
from paceline.search import (
    Create,
    Input,
    Operation,
    Progressed,
    Reported,
    SearchMethodError,
    Shutdown,
    Started,
    Stop,
    Train,
)

if TYPE_CHECKING:
    from paceline.master.experiments._state_changes import StateChanges

logger = logging.getLogger(__name__)

faults.register("master.trial.created")


class SearchOperations:
    """Give inputs to the searches of experiments, and carry out what they decide.

    All methods run in the writer thread, inside the transaction they are given.

    Args:
        changes: Sets the states of experiments and trials.
        searches: The searches' states.
    """

    def __init__(self, changes: "StateChanges", searches: Searches) -> None:
        self._changes = changes
        self._searches = searches

    def apply_input(self, transaction: Transaction, experiment_id: int, given: Input) -> None:
        """Give an input to the search and carry out what it decides.

        Once the experiment is stopping or its search has ended, inputs are ignored. If the search's
        method fails, the experiment does; what trials have reported is stored all the same.

        Raises:
            SearchMethodError: The method fails to start.
        """
        row = self._changes.experiment(transaction.connection, experiment_id)
        if not _takes_inputs(row):
            return
        try:
            operations = self._searches.apply(transaction, experiment_id, given)
        except SearchMethodError as error:
            if isinstance(given, Started):
                raise
            self._fail_search(transaction, experiment_id, error)
            return
        for operation in operations:
            self._carry_out(transaction, row, operation, given)
        self.update_progress(transaction, experiment_id)

    def catch_up(self, transaction: Transaction, experiment_id: int) -> None:
        """Carry out what a search decides on what came while its method was missing."""
        row = self._changes.experiment(transaction.connection, experiment_id)
        if not _takes_inputs(row):
            return
        try:
            # All of it is decided before anything is carried out, which may lead to more inputs.
            decided = self._searches.catch_up(transaction, experiment_id)
        except SearchMethodError as error:
            self._fail_search(transaction, experiment_id, error)
            return
        for given, operations in decided:
            for operation in operations:
                self._carry_out(transaction, row, operation, given)
        self.update_progress(transaction, experiment_id)

    def _fail_search(
        self, transaction: Transaction, experiment_id: int, error: SearchMethodError
    ) -> None:
        logger.error("The search of experiment %d failed.", experiment_id, exc_info=error)
        # It may be half changed.
        self._searches.forget(experiment_id)
        self._changes.fail_experiment(transaction, experiment_id, str(error))

    def note_progress(self, transaction: Transaction, trial: Row[Any], progress: float) -> None:
        """Record how far a trial says it is; progress decides nothing and is not logged."""
        self._changes.update_trial(transaction, trial.id, progress=progress)
        row = self._changes.experiment(transaction.connection, trial.experiment_id)
        if _takes_inputs(row):
            told = Progressed(request_id=trial.request_id, progress=progress)
            self._searches.note_progress(transaction, trial.experiment_id, told)
            self.update_progress(transaction, trial.experiment_id)

    def update_progress(self, transaction: Transaction, experiment_id: int) -> None:
        """Store the experiment's progress if it changed visibly."""
        connection = transaction.connection
        row = self._changes.experiment(connection, experiment_id)
        if not _takes_inputs(row):
            return
        try:
            search = self._searches.peek(transaction, experiment_id)
            progress = None if search is None else search.progress()
        except SearchMethodError as error:
            self._fail_search(transaction, experiment_id, error)
            return
        if progress is None or abs(progress - row.progress) < 0.001:
            return
        connection.execute(
            update(tables.experiments)
            .where(tables.experiments.c.id == experiment_id)
            .values(progress=progress)
        )
        transaction.emit("progress", experiment_id, progress=progress)

    def _carry_out(
        self, transaction: Transaction, experiment: Row[Any], operation: Operation, given: Input
    ) -> None:
        experiment_id = experiment.id
        if isinstance(operation, Create):
            self._create_trial(transaction, experiment_id, operation)
        elif isinstance(operation, Train):
            trial = self._trial_of(transaction, experiment_id, operation.request_id)
            self._changes.update_trial(transaction, trial.id, target_length=operation.length)
            self._tell_attempt(transaction, trial.id)
        elif isinstance(operation, Stop):
            trial = self._trial_of(transaction, experiment_id, operation.request_id)
            self._changes.update_trial(transaction, trial.id, operations_closed=True)
            self._tell_attempt(transaction, trial.id)
            if TrialState(trial.state) is TrialState.ACTIVE:
                reason = _stop_reason(config_of(experiment).searcher, given)
                self._changes.stop_trial(transaction, trial, TrialState.STOPPING_COMPLETED, reason)
        elif isinstance(operation, Shutdown):
            end = SearchEnd.COMPLETED
            if operation.failure:
                end = SearchEnd.FAILED
            elif operation.cancel:
                end = SearchEnd.CANCELED
            elif is_never_finite(transaction.connection, experiment_id):
                end = SearchEnd.UNMEASURED
            self._changes.end_search(transaction, experiment_id, end)

    def _create_trial(
        self, transaction: Transaction, experiment_id: int, operation: Create
    ) -> None:
        experiment = self._changes.experiment(transaction.connection, experiment_id)
        result = transaction.connection.execute(
            insert(tables.trials).values(
                id=new_id(transaction.connection, tables.trials),
                experiment_id=experiment_id,
                request_id=operation.request_id,
                state=TrialState.ACTIVE.value,
                hparams=operation.hparams,
                seed=operation.trial_seed,
                created_at=time.time(),
                source_checkpoint=config_of(experiment).searcher.source_checkpoint_uuid,
            )
        )
        assert result.inserted_primary_key is not None
        trial_id = result.inserted_primary_key[0]
        transaction.emit("trial_created", experiment_id, trial_id, hparams=operation.hparams)
        transaction.after_commit(self._changes.wake)
        faults.reach("master.trial.created")

    def _tell_attempt(self, transaction: Transaction, trial_id: int) -> None:
        attempt = self._changes.live_attempt(transaction.connection, trial_id)
        if attempt is not None:
            self._changes.change_attempt(transaction, attempt.id)

    @staticmethod
    def _trial_of(transaction: Transaction, experiment_id: int, request_id: str) -> Row[Any]:
        trials = tables.trials
        return transaction.connection.execute(
            select(trials).where(
                trials.c.experiment_id == experiment_id, trials.c.request_id == request_id
            )
        ).one()


def _takes_inputs(experiment: Row[Any]) -> bool:
    state = ExperimentState(experiment.state)
    return not (state.is_stopping or state.is_terminal) and experiment.search_end is None


def _stop_reason(searcher: Searcher, given: Input) -> str:
    longest = float("inf") if searcher.length is None else searcher.length
    if searcher.wants_reports and isinstance(given, Reported) and given.time >= longest:
        return FULLY_TRAINED
    return STOPPED_BY_SEARCH
