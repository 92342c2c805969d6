"""Search inputs and the resulting operations: create, train and stop trials; metric checks."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.experiments.state_decisions import SearchEnd
from paceline._cluster.master.searches.proposals import take_proposal
from paceline._cluster.master.searches.stored_searches import Searches
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_summaries import read_summary
from paceline._cluster.master.store.row_ids_and_counts import new_id
from paceline._cluster.messages.states import (
    FULLY_TRAINED,
    STOPPED_BY_SEARCH,
    ExperimentState,
    TrialState,
)
from paceline.config._searcher_registry import MissingSearcher, SingleSearcher
from paceline.config._searcher_section import Searcher
from paceline.search import _search_messages as messages
from paceline.search._search_method import SearchMethodError

if TYPE_CHECKING:
    from paceline._cluster.master.experiments.state_writer import StateChanges

logger = logging.getLogger(__name__)

_GROUP = "validation"


def describe_nan_metric(
    transaction: Transaction, trial: sa.Row[Any], experiment: sa.Row[Any]
) -> str | None:
    """Return a warning if the searched metric was reported but never finite, else None."""
    if trial.best_metric is not None or trial.latest_metric is None:
        return None
    metric = config_of(experiment).searcher.metric
    summary = read_summary(transaction.connection, trial.id).get("validation", {}).get(metric)
    if summary is None:
        return None
    reports = "the only report" if summary.count == 1 else f"all {summary.count} reports"
    return (
        f"The searched metric `{metric}` was NaN or infinite in {reports}. Hint: look for a"
        " learning rate that is too high, or a division by zero."
    )


def describe_missing_metric(
    transaction: Transaction, trial: sa.Row[Any], experiment: sa.Row[Any]
) -> str | None:
    """Return a warning naming the missing metrics of a completed trial, or None."""
    searcher = config_of(experiment).searcher
    if isinstance(searcher, MissingSearcher):
        return None
    judged = searcher.judged_metrics
    if trial.uses_operations and judged is not None:
        return None
    reported = read_summary(transaction.connection, trial.id).get("validation", {})
    if not reported and judged is None:
        # A script that does not validate is welcome to any search that needs nothing.
        return None
    missing = [name for name in judged or searcher.metrics if name not in reported]
    if not missing:
        return None
    named = " and ".join(f"`{name}`" for name in missing)
    found = ", ".join(sorted(reported)) or "none"
    return (
        f"The search needs {named} in the validation metrics, but the code never reported it"
        f" (reported: {found}). Hint: report it, or set `searcher.metric` and"
        " `searcher.time_metric` to what is reported."
    )


def describe_untrained(
    transaction: Transaction, trial: sa.Row[Any], experiment: sa.Row[Any]
) -> str | None:
    """Return the error of a continued trial that ended without any training; None otherwise."""
    is_continued = experiment.parent_trial_id is not None and trial.source_checkpoint is not None
    # A search over continued trials says itself what is missing.
    if not is_continued or not is_single(experiment):
        return None
    connection = transaction.connection
    if trial.steps_completed or read_summary(connection, trial.id):
        return None
    # A script that reports nothing at all is no less trained now.
    if not read_summary(connection, experiment.parent_trial_id):
        return None
    return (
        f"A continued trial must train further than trial {experiment.parent_trial_id}, but it has"
        " reported nothing. Hint: continue it with a larger `searcher.max_length`, and let the"
        " script go by it, or raise the script's own end: `paceline trial continue ID DIRECTORY`"
        " takes changed code."
    )


def is_single(experiment: sa.Row[Any]) -> bool:
    """Return whether the searcher is `single`: a lone trial needs no metric for a choice."""
    return isinstance(config_of(experiment).searcher, SingleSearcher)


def others_have_reported(
    transaction: Transaction, trial: sa.Row[Any], experiment: sa.Row[Any]
) -> bool:
    """Return whether trials of the search reported all metrics missing from this trial."""
    searcher = config_of(experiment).searcher
    reported = read_summary(transaction.connection, trial.id).get(_GROUP, {})
    names = [name for name in searcher.judged_metrics or [searcher.metric] if name not in reported]
    series, trials = tables.series.c, tables.trials.c
    found = (
        sa.select(series.id)
        .join_from(tables.series, tables.trials, trials.id == series.trial_id)
        .where(trials.experiment_id == experiment.id, series.group == _GROUP)
        .limit(1)
    )
    connection = transaction.connection
    return all(connection.scalar(found.where(series.key == name)) is not None for name in names)


def num_validations(connection: sa.Connection, trial_id: int) -> tuple[int, int | None]:
    """Return the number of validations of a trial, and the step of the first or None."""
    series = tables.series.c
    row = connection.execute(
        sa.select(sa.func.max(series.num_points), sa.func.min(series.first_step)).where(
            series.trial_id == trial_id, series.group == _GROUP
        )
    ).one()
    return row[0] or 0, row[1]


def is_never_finite(connection: sa.Connection, experiment_id: int) -> bool:
    """Return whether the searched metric was reported, but never with a finite value."""
    experiments, trials = tables.experiments, tables.trials.c
    experiment = connection.execute(
        sa.select(experiments).where(experiments.c.id == experiment_id)
    ).one()
    if experiment.best_metric is not None or is_single(experiment):
        return False
    reported = sa.select(trials.id).where(
        trials.experiment_id == experiment_id, trials.latest_metric.is_not(None)
    )
    return connection.execute(reported.limit(1)).first() is not None


def describe_unmeasured(connection: sa.Connection, experiment_id: int) -> str:
    """Return the error for a search without any finite value of its metric."""
    experiments = tables.experiments
    experiment = connection.execute(
        sa.select(experiments).where(experiments.c.id == experiment_id)
    ).one()
    return (
        f"A trial must report a finite value of the searched metric"
        f" `{config_of(experiment).searcher.metric}`, but all values were NaN or infinite. Hint:"
        " look for a learning rate that is too high, or a division by zero."
    )


faults.register("master.trial.created")


class SearchOperations:
    """Feed inputs to the searches of experiments, and carry out the resulting operations.

    All methods run in the writer thread, inside the transaction they are given.

    Args:
        changes: Sets the states of experiments and trials.
        searches: The searches' states.
    """

    def __init__(self, changes: "StateChanges", searches: Searches) -> None:
        self._changes = changes
        self._searches = searches

    def apply_input(
        self,
        transaction: Transaction,
        experiment_id: int,
        given: messages.Input,
        row: sa.Row[Any] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> bool:
        """Feed an input to the search and carry out the resulting operations.

        Once the experiment is stopping or its search has ended, inputs are ignored. If the search's
        method fails, the experiment does; the trials' reports are stored all the same.

        Args:
            transaction: The transaction.
            experiment_id: The experiment.
            given: The input.
            row: The experiment's row, if it is at hand.
            settle: Called before anything but the input itself is written. Who gives it calls
                `update_progress` after the last input that changes no rows.

        Returns:
            Whether the rows of the experiment and its trials are still the same.

        Raises:
            SearchMethodError: The method fails to start, or with other limits.
            ValueError: The search cannot have as many trials as its new limit.
        """
        row = row or self._changes.experiment(transaction.connection, experiment_id)
        if not takes_inputs(row):
            return True
        try:
            operations = self._searches.apply(transaction, row.id, given)
            search = self._searches.peek(transaction, row.id)
            has_asks = search is not None and search.num_asks > 0
            may_pause = (
                isinstance(given, messages.Reported) and config_of(row).searcher.waits_at_targets
            )
            is_quiet = not (operations or has_asks or may_pause)
            if is_quiet and settle is not None:
                return True
            if settle is not None:
                settle()
            for operation in operations:
                self._carry_out(transaction, row, operation, given)
            self.take_proposals(transaction, row)
        except SearchMethodError as error:
            # Inputs of a request: the caller refuses it, so the error is raised.
            if isinstance(given, messages.Started | messages.Limited | messages.Recalled):
                raise
            if settle is not None:
                settle()
            self._fail_search(transaction, experiment_id, error)
            return False
        if isinstance(given, messages.Reported) and may_pause:
            self._pause_at_target(transaction, experiment_id, given)
        known = row if is_quiet else None
        return self.update_progress(transaction, experiment_id, known) and is_quiet

    def _pause_at_target(
        self, transaction: Transaction, experiment_id: int, given: messages.Reported
    ) -> None:
        trial = self._trial_of(transaction, experiment_id, given.request_id)
        is_there = trial.target_length is not None and given.time >= trial.target_length
        if not is_there or trial.is_waiting or trial.state != TrialState.ACTIVE.value:
            return
        self._changes.update_trial(transaction, trial.id, is_waiting=True)
        attempt = self._changes.live_attempt(transaction.connection, trial.id)
        if attempt is not None:
            self._changes.preempt(transaction, attempt, "it waits for the search")

    def take_proposals(self, transaction: Transaction, experiment: sa.Row[Any]) -> None:
        """Answer open asks of a search by waiting proposals."""
        search = self._searches.peek(transaction, experiment.id)
        while search is not None and search.num_asks:
            answer = take_proposal(transaction.connection, experiment, search, search.first_ask())
            if answer is None:
                return
            for operation in self._searches.apply(transaction, experiment.id, answer):
                self._carry_out(transaction, experiment, operation, answer)

    def catch_up(self, transaction: Transaction, experiment_id: int) -> None:
        """Apply the inputs stored while the method was missing, and carry out the results."""
        row = self._changes.experiment(transaction.connection, experiment_id)
        if not takes_inputs(row):
            return
        try:
            # All operations are decided before any is carried out, which may lead to more inputs.
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
        # Search object dropped: the failed method may have left a half-changed state.
        self._searches.forget(experiment_id)
        self._changes.fail_experiment(transaction, experiment_id, str(error))

    def note_progress(self, transaction: Transaction, trial: sa.Row[Any], progress: float) -> None:
        """Record a trial's progress; no decision follows, and nothing is logged."""
        self._changes.update_trial(transaction, trial.id, progress=progress)
        row = self._changes.experiment(transaction.connection, trial.experiment_id)
        if takes_inputs(row):
            told = messages.Progressed(request_id=trial.request_id, progress=progress)
            self._searches.note_progress(transaction, trial.experiment_id, told)
            self.update_progress(transaction, trial.experiment_id)

    def update_progress(
        self, transaction: Transaction, experiment_id: int, row: sa.Row[Any] | None = None
    ) -> bool:
        """Store the progress of the experiment after a visible change; return whether none was."""
        connection = transaction.connection
        row = row or self._changes.experiment(connection, experiment_id)
        if not takes_inputs(row):
            return True
        try:
            search = self._searches.peek(transaction, experiment_id)
            progress = None if search is None else search.progress()
        except SearchMethodError as error:
            self._fail_search(transaction, experiment_id, error)
            return False
        # Smaller changes are not worth a write.
        if progress is None or abs(progress - row.progress) < 0.001:
            return True
        connection.execute(
            sa.update(tables.experiments)
            .where(tables.experiments.c.id == experiment_id)
            .values(progress=progress)
        )
        transaction.emit("progress", experiment_id, progress=progress)
        return False

    def _carry_out(
        self,
        transaction: Transaction,
        experiment: sa.Row[Any],
        operation: messages.Operation,
        given: messages.Input,
    ) -> None:
        experiment_id = experiment.id
        if isinstance(operation, messages.Create):
            self._create_trial(transaction, experiment_id, operation)
        elif isinstance(operation, messages.Train):
            trial = self._trial_of(transaction, experiment_id, operation.request_id)
            self._changes.update_trial(
                transaction, trial.id, target_length=operation.length, is_waiting=False
            )
            self._tell_attempt(transaction, trial.id)
            transaction.after_commit(self._changes.wakeups.wake)
        elif isinstance(operation, messages.Stop):
            trial = self._trial_of(transaction, experiment_id, operation.request_id)
            self._changes.update_trial(transaction, trial.id, operations_closed=True)
            self._tell_attempt(transaction, trial.id)
            if TrialState(trial.state) is TrialState.ACTIVE:
                search = self._searches.peek(transaction, experiment_id)
                limit = search and search.stopping_limit(operation.request_id)
                reason = _stop_reason(config_of(experiment).searcher, given)
                if limit is not None:
                    reason = f"the search has reached its limit `{limit}`"
                self._changes.stop_trial(transaction, trial, TrialState.STOPPING_COMPLETED, reason)
        elif isinstance(operation, messages.Shutdown):
            end = SearchEnd.COMPLETED
            if operation.failure:
                end = SearchEnd.FAILED
            elif operation.cancel:
                end = SearchEnd.CANCELED
            elif is_never_finite(transaction.connection, experiment_id):
                end = SearchEnd.UNMEASURED
            self._changes.end_search(transaction, experiment_id, end)

    def _create_trial(
        self, transaction: Transaction, experiment_id: int, operation: messages.Create
    ) -> None:
        experiment = self._changes.experiment(transaction.connection, experiment_id)
        source = config_of(experiment).searcher.source_checkpoint_uuid
        parent = None
        if operation.parent is not None:
            # Its module imports this one.
            from paceline._cluster.master.experiments.checkpoints import latest_checkpoint

            parent = self._trial_of(transaction, experiment_id, operation.parent)
            # From now on retention keeps it: it is the start of a trial.
            found = latest_checkpoint(
                transaction.connection, parent.id, self._changes.being_deleted
            )
            source = None if found is None else found[0]
        hparams = operation.hparams
        search = self._searches.peek(transaction, experiment_id)
        # A search that draws by itself asks nobody, and needs no answer: it is stored beside.
        is_asking = config_of(experiment).searcher.is_asking
        if search is not None and parent is None and not is_asking:
            answer = take_proposal(transaction.connection, experiment, search, operation)
            if answer is not None:
                self._searches.apply(transaction, experiment_id, answer)
                hparams = answer.hparams or hparams
        result = transaction.connection.execute(
            sa.insert(tables.trials).values(
                id=new_id(transaction.connection, tables.trials),
                experiment_id=experiment_id,
                request_id=operation.request_id,
                state=TrialState.ACTIVE.value,
                hparams=hparams,
                seed=operation.trial_seed,
                created_at=time.time(),
                source_checkpoint=source,
            )
        )
        assert result.inserted_primary_key is not None
        trial_id = result.inserted_primary_key[0]
        if parent is not None:
            told = f"It starts from checkpoint {source} of trial {parent.id}."
            if source is None:
                told = f"Trial {parent.id} has no checkpoint to start from: it starts anew."
            level = "INFO" if source else "WARNING"
            self._changes.note(transaction, trial_id, 1, level, told)
        transaction.emit("trial_created", experiment_id, trial_id, hparams=hparams)
        transaction.after_commit(self._changes.wakeups.wake)
        faults.reach("master.trial.created")

    def _tell_attempt(self, transaction: Transaction, trial_id: int) -> None:
        attempt = self._changes.live_attempt(transaction.connection, trial_id)
        if attempt is not None:
            self._changes.change_attempt(transaction, attempt.id)

    @staticmethod
    def _trial_of(transaction: Transaction, experiment_id: int, request_id: str) -> sa.Row[Any]:
        trials = tables.trials
        return transaction.connection.execute(
            sa.select(trials).where(
                trials.c.experiment_id == experiment_id, trials.c.request_id == request_id
            )
        ).one()


_DECIDING = {one.value for one in ExperimentState if not (one.is_stopping or one.is_terminal)}


def takes_inputs(experiment: sa.Row[Any]) -> bool:
    """Return whether the search of an experiment still decides."""
    return experiment.search_end is None and experiment.state in _DECIDING


def _stop_reason(searcher: Searcher, given: messages.Input) -> str:
    longest = float("inf") if searcher.length is None else searcher.length
    if searcher.wants_reports and isinstance(given, messages.Reported) and given.time >= longest:
        return FULLY_TRAINED
    return STOPPED_BY_SEARCH
