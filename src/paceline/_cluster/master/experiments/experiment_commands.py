"""Create, pause, activate, cancel, kill, continue."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.experiments.checkpoints import check_checkpoint, latest_checkpoint
from paceline._cluster.master.experiments.config_rules import (
    check_changed_config,
    check_new_config,
    fill_new_config,
)
from paceline._cluster.master.experiments.experiment_edits import (
    check_can_reopen,
    check_ended,
    continued_trial_config,
    overridden_config,
)
from paceline._cluster.master.experiments.scheduler_input import (
    check_changed_rank,
    check_own_runners,
    check_pool_rules,
    check_slots,
)
from paceline._cluster.master.experiments.state_decisions import (
    RefusedError,
    SearchEnd,
    TransitionError,
)
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.home_directory import SecretStore, text_to_store
from paceline._cluster.master.searches.proposals import add_proposal, checked_proposal
from paceline._cluster.master.searches.sampler_answers import recall_trials
from paceline._cluster.master.searches.search_limits import change_limits, tell_time_before
from paceline._cluster.master.searches.search_operations import takes_inputs
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import REPORTED, config_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import (
    check_object,
    copying_from,
    current_project,
    note_object,
)
from paceline._cluster.master.store.row_ids_and_counts import insert_row, update_experiment
from paceline._cluster.messages.runner_messages import DEFAULT_POOL
from paceline._cluster.messages.search_and_metric_models import NewProposal
from paceline._cluster.messages.states import ExperimentState, TrialState, told_state
from paceline.config._environment_and_secrets import Notify, reveal_secrets, without_secrets
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._validate_config import merge_configs, validate_config
from paceline.search._samplers import check_installed
from paceline.search._search import Search
from paceline.search._search_messages import Proposed, Started

faults.register("master.experiment.created")

_MAX_SEED = 2**31


class Commands:
    """Carry out requests; used in the writer thread, inside a transaction."""

    def __init__(
        self,
        changes: StateChanges,
        secret_store: SecretStore,
        check_notify: Callable[[Notify], None],
    ) -> None:
        self._changes = changes
        self._secret_store = secret_store
        self._check_notify = check_notify

    def create(
        self,
        transaction: Transaction,
        config: ExperimentConfig,
        *,
        submitted_config: str | None,
        context_digest: str | None,
        activate: bool,
        parent_trial_id: int | None = None,
        forked_from: int | None = None,
        secrets_from: int | None = None,
        source: dict[str, Any] | None = None,
    ) -> int:
        """Create an experiment with its first trials and return its id.

        Values that are not shown, `***` in the configuration, are the values of the experiment
        `secrets_from`.

        Raises:
            paceline.config.ConfigError: There is no such value, or a policy is not met.
            RefusedError: It needs more slots than there are, its source has no checkpoint, or its
                sampler is not installed.
            SearchMethodError: The code of its search method fails.
        """
        connection = transaction.connection
        check_new_config(connection, current_project(), config)
        check_slots(connection, config, self._changes.machines.possible_slots())
        wanted = config.resources
        check_pool_rules(connection, wanted.pool or DEFAULT_POOL, wanted.priority)
        self._check_notify(config.notify)
        try:
            check_installed(config.searcher.sampler_spec())
        except ImportError as error:
            raise RefusedError("no_sampler", str(error)) from None
        resolved = self._reveal(connection, config, secrets_from)
        values = resolved["environment"]["secrets"]
        source_trial_id = self._settle_source(connection, resolved["searcher"])
        seed = resolved["reproducibility"]["experiment_seed"]
        if seed is None:
            seed = resolved["reproducibility"]["experiment_seed"] = secrets.randbelow(_MAX_SEED)
        state = ExperimentState.ACTIVE if activate else ExperimentState.PAUSED
        experiment_id = insert_row(
            connection,
            tables.experiments,
            name=config.name,
            description=config.description,
            labels=list(config.labels),
            state=state.value,
            config=without_secrets(resolved),
            submitted_config=text_to_store(submitted_config, values),
            context_digest=context_digest,
            warnings=list(config.warnings),
            seed=seed,
            created_at=time.time(),
            parent_trial_id=parent_trial_id if source_trial_id is None else source_trial_id,
            forked_from=forked_from,
            source=source,
        )
        note_object(f"experiment {experiment_id}")
        self._secret_store.keep(transaction, experiment_id, values)
        transaction.emit("experiment_state", experiment_id, state=state.value, error=None)
        for source_id in config.searcher.warm_start_from:
            recall_trials(transaction, self._changes, experiment_id, source_id)
        if config.searcher.limits is not None:
            limited = config.searcher.limits.as_input()
            self._changes.search_operations.apply_input(transaction, experiment_id, limited)
        self._changes.search_operations.apply_input(transaction, experiment_id, Started())
        self._changes.searches.check(transaction, experiment_id)
        transaction.force()
        faults.reach("master.experiment.created")
        return experiment_id

    def propose(
        self, transaction: Transaction, experiment_id: int, proposal: dict[str, Any]
    ) -> int:
        """Store a proposal for the next trial of a search, and return its number.

        Raises:
            NotFoundError: There is no such experiment.
            RefusedError: Its search has ended, draws nothing, will have no trial for it, or has
                other hyperparameters.
        """
        row, search = self._open_search(transaction, experiment_id)
        if config_of(row).searcher.needs_counts:
            raise RefusedError(
                "nothing_drawn",
                "A proposal needs a search that draws, but a grid search tries the points of its"
                " grid. Hint: `{name: random, sampler: grid}` takes proposals.",
            )
        number = add_proposal(transaction.connection, experiment_id, search, proposal)
        # A trial may be waiting for an answer already.
        self._changes.search_operations.take_proposals(transaction, row)
        return number

    def answer_ask(
        self, transaction: Transaction, experiment_id: int, ask_id: str, given: NewProposal
    ) -> None:
        """Give a trial that waits for its hyperparameters the proposed ones.

        Raises:
            NotFoundError: There is no such experiment.
            RefusedError: Its search has ended, the trial has its hyperparameters already, or the
                search has no such hyperparameters.
        """
        _, search = self._open_search(transaction, experiment_id)
        asked = search.ask_of(ask_id)
        if asked is None:
            raise RefusedError(
                "ask_answered",
                f"An answer needs an open ask, but experiment {experiment_id} has no ask {ask_id!r}"
                " (any more). Hint: list the open ones again.",
            )
        hparams = checked_proposal(search, asked.hparams, given.hparams)
        answer = Proposed(request_id=ask_id, hparams=hparams, by=given.by, why=given.why)
        self._changes.search_operations.apply_input(transaction, experiment_id, answer)

    def _open_search(
        self, transaction: Transaction, experiment_id: int
    ) -> tuple[sa.Row[Any], Search]:
        row = self._managed(transaction, experiment_id)
        search = self._changes.searches.peek(transaction, experiment_id)
        if not takes_inputs(row) or search is None:
            raise RefusedError(
                "search_ended",
                f"A proposal needs a search that goes on, but that of experiment {experiment_id} is"
                f" {told_state(row.state)}. Hint: `paceline e fork {experiment_id}` makes a new"
                " search.",
            )
        return row, search

    def pause(self, transaction: Transaction, experiment_id: int) -> None:
        """Let running attempts checkpoint and leave, and start no others.

        Raises:
            NotFoundError: There is no such experiment.
            TransitionError: It is not active.
        """
        if self._state(transaction, experiment_id) is ExperimentState.PAUSED:
            return
        self._changes.set_experiment_state(transaction, experiment_id, ExperimentState.PAUSED)
        for trial in self._changes.live_trials(transaction.connection, experiment_id):
            attempt = self._changes.live_attempt(transaction.connection, trial.id)
            if attempt is not None:
                self._changes.preempt(transaction, attempt, "paused")

    def activate(self, transaction: Transaction, experiment_id: int) -> None:
        """Let a paused experiment run again.

        Raises:
            NotFoundError: There is no such experiment.
            TransitionError: It has ended or is stopping.
        """
        state = self._state(transaction, experiment_id)
        if state is ExperimentState.ACTIVE:
            return
        if state is not ExperimentState.PAUSED:
            raise TransitionError(
                f"Experiment {experiment_id} must be PAUSED to be activated, but is"
                f" {told_state(state.value)}."
                " Hint: `paceline experiment continue` reopens an ended one."
            )
        self._changes.set_experiment_state(transaction, experiment_id, ExperimentState.ACTIVE)

    def cancel(self, transaction: Transaction, experiment_id: int) -> None:
        """Let running attempts checkpoint and exit, then end; ignored if already ending."""
        state = self._state(transaction, experiment_id)
        if not (state.is_stopping or state.is_terminal):
            self._stop(transaction, experiment_id, ExperimentState.STOPPING_CANCELED)

    def kill(self, transaction: Transaction, experiment_id: int) -> None:
        """End an experiment at once."""
        state = self._state(transaction, experiment_id)
        harsher = (ExperimentState.STOPPING_KILLED, ExperimentState.STOPPING_ERROR)
        if not state.is_terminal and state not in harsher:
            self._stop(transaction, experiment_id, ExperimentState.STOPPING_KILLED)

    def kill_trial(self, transaction: Transaction, trial_id: int) -> None:
        """End a trial at once; the search sees a canceled trial."""
        trial = self._changes.trial(transaction.connection, trial_id)
        self._managed(transaction, trial.experiment_id)
        state = TrialState(trial.state)
        harsher = (TrialState.STOPPING_KILLED, TrialState.STOPPING_ERROR)
        if not state.is_terminal and state not in harsher:
            self._changes.stop_trial(
                transaction, trial, TrialState.STOPPING_KILLED, "killed by the user"
            )

    def stop_trial(self, transaction: Transaction, trial_id: int) -> None:
        """Let a trial store a checkpoint and end; the search sees a canceled trial."""
        trial = self._changes.trial(transaction.connection, trial_id)
        self._managed(transaction, trial.experiment_id)
        if TrialState(trial.state) in (TrialState.ACTIVE, TrialState.STOPPING_COMPLETED):
            self._changes.stop_trial(
                transaction, trial, TrialState.STOPPING_CANCELED, "stopped by the user"
            )

    def continue_trial(
        self,
        transaction: Transaction,
        trial_id: int,
        overrides: dict[str, Any],
        *,
        activate: bool,
        context_digest: str | None = None,
        source: dict[str, Any] | None = None,
    ) -> int:
        """Create a `single` experiment starting from a trial's latest checkpoint.

        It has the code of the trial, unless the digest of other code is given.

        Raises:
            NotFoundError: There is no such trial.
            RefusedError: The trial has no checkpoint.
            paceline.config.ConfigError: The overrides do not fit.
        """
        connection = transaction.connection
        check_object(connection, "trial_id", trial_id)
        trial = self._changes.trial(connection, trial_id)
        parent = self._managed(transaction, trial.experiment_id)
        merged = continued_trial_config(parent, trial, overrides)
        with copying_from(parent.project_id):
            return self.create(
                transaction,
                merged,
                submitted_config=None,
                context_digest=context_digest or parent.context_digest,
                activate=activate,
                parent_trial_id=trial_id,
                secrets_from=parent.id,
                source=parent.source if context_digest is None else source,
            )

    def fork(
        self,
        transaction: Transaction,
        experiment_id: int,
        config: dict[str, Any],
        *,
        replaces_config: bool,
        submitted_config: str | None,
        activate: bool,
        context_digest: str | None = None,
        source: dict[str, Any] | None = None,
    ) -> int:
        """Create an experiment from another experiment, and return its id.

        `config` overrides fields of the other's configuration, or replaces it. It has the other's
        code, unless the digest of other code is given.

        Raises:
            NotFoundError: There is no such experiment.
            RefusedError: It is not this master's, or `create` refuses.
            paceline.config.ConfigError: The configuration is not valid.
        """
        check_object(transaction.connection, "experiment_id", experiment_id)
        row = self._managed(transaction, experiment_id)
        with copying_from(row.project_id):
            if replaces_config:
                config = fill_new_config(transaction.connection, current_project(), config)
            else:
                config = merge_configs({**row.config, "name": f"{row.name} (fork)"}, config)
            return self.create(
                transaction,
                validate_config(config),
                submitted_config=submitted_config,
                context_digest=context_digest or row.context_digest,
                activate=activate,
                forked_from=experiment_id,
                secrets_from=experiment_id,
                source=row.source if context_digest is None else source,
            )

    def continue_experiment(
        self,
        transaction: Transaction,
        experiment_id: int,
        overrides: dict[str, Any],
        limits: dict[str, Any] | None = None,
    ) -> None:
        """Reopen an ended experiment: its trials resume from their latest checkpoints.

        With `limits`, the search of any method goes on under them, with more trials.

        A `single` experiment continues in any case, with overrides if given; `random` and `grid`
        experiments continue with the trials that did not complete, and with those that their search
        has yet to create.

        Raises:
            NotFoundError: There is no such experiment.
            RefusedError: It has not ended, or its search cannot be reopened.
            paceline.config.ConfigError: The overrides do not fit.
        """
        row = self._managed(transaction, experiment_id)
        searcher = config_of(row).searcher
        if limits:
            self._continue_search(transaction, row, overrides, limits)
            return
        check_can_reopen(row, searcher)
        if overrides:
            self._override(transaction, row, overrides)
        else:
            check_changed_config(transaction.connection, row, is_reopened=True)
        trials = tables.trials
        query = sa.select(trials).where(trials.c.experiment_id == experiment_id)
        if searcher.name != "single":
            query = query.where(trials.c.state != TrialState.COMPLETED.value)
        reopened = list(transaction.connection.execute(query.order_by(trials.c.id)))
        search = self._changes.searches.peek(transaction, experiment_id)
        # A search whose experiment was canceled has not come to its end.
        is_unfinished = search is not None and not search.is_over
        if not reopened and not is_unfinished:
            raise RefusedError(
                "nothing_to_continue",
                f"Experiment {experiment_id} must have trials that did not complete, but all did."
                " Hint: `--max-trials N` adds trials, and `paceline t continue TRIAL` trains one"
                " further, also one that a limit cut short.",
            )
        for trial in reopened:
            self._reopen_trial(transaction, trial)
        end = None if is_unfinished else SearchEnd.REOPENED
        self._reopen(transaction, experiment_id, end)
        if is_unfinished:
            self._changes.tell_missed_exits(transaction, experiment_id)
            tell_time_before(transaction, self._changes, experiment_id)

    def _reopen(self, transaction: Transaction, experiment_id: int, end: SearchEnd | None) -> None:
        update_experiment(
            transaction.connection,
            experiment_id,
            ended_at=None,
            error=None,
            progress=0.0,
            search_end=end and end.value,
            is_archived=False,
        )
        self._changes.set_experiment_state(transaction, experiment_id, ExperimentState.ACTIVE)

    def _continue_search(
        self,
        transaction: Transaction,
        row: sa.Row[Any],
        overrides: dict[str, Any],
        limits: dict[str, Any],
    ) -> None:
        check_ended(row)
        if overrides:
            raise RefusedError(
                "override_refused",
                "A search that goes on with more trials keeps its configuration, but got other"
                f" fields ({', '.join(overrides)}). Hint: fork the experiment to change them.",
            )
        self._reopen(transaction, row.id, None)
        self._changes.tell_missed_exits(transaction, row.id)
        # The last of these exits may have ended the search, which goes on now.
        row = self._changes.experiment(transaction.connection, row.id)
        if row.search_end is not None:
            update_experiment(transaction.connection, row.id, search_end=None)
        row = self._changes.experiment(transaction.connection, row.id)
        change_limits(transaction, self._changes, row, limits, is_reopened=True)
        tell_time_before(transaction, self._changes, row.id)
        search = self._changes.searches.peek(transaction, row.id)
        if search is not None and search.is_over:
            reached = search.reached_limit
            why = "its method has no more trials" if reached is None else f"`{reached}` is reached"
            raise RefusedError(
                "nothing_to_continue",
                f"The search of experiment {row.id} must have trials to go on with, but {why}."
                " Hint: raise `--max-trials`, and each limit that is reached by `--limit"
                " NAME=VALUE`.",
            )

    def _reopen_trial(self, transaction: Transaction, trial: Any) -> None:
        if TrialState(trial.state).is_terminal:
            self._changes.set_trial_state(
                transaction, trial, TrialState.ACTIVE, reason="continued", restarts=0
            )
        self._changes.update_trial(
            transaction,
            trial.id,
            ended_at=None,
            error=None,
            error_kind=None,
            operations_closed=False,
        )

    def _override(
        self,
        transaction: Transaction,
        experiment: sa.Row[Any],
        overrides: dict[str, Any],
    ) -> None:
        merged = overridden_config(experiment, overrides)
        check_changed_config(transaction.connection, experiment, config=merged, is_reopened=True)
        check_slots(transaction.connection, merged, self._changes.machines.possible_slots())
        check_changed_rank(transaction.connection, experiment, merged, experiment.priority)
        check_own_runners(transaction.connection, experiment, merged)
        self._check_notify(merged.notify)
        resolved = self._reveal(transaction.connection, merged, experiment.id)
        self._secret_store.keep(transaction, experiment.id, resolved["environment"]["secrets"])
        config = without_secrets(resolved)
        update_experiment(transaction.connection, experiment.id, config=config)
        if merged.searcher.length is not None:
            transaction.connection.execute(
                sa.update(tables.trials)
                .where(tables.trials.c.experiment_id == experiment.id)
                .values(target_length=merged.searcher.length)
            )

    def _reveal(
        self, connection: sa.Connection, config: ExperimentConfig, secrets_from: int | None
    ) -> dict[str, Any]:
        """Return a resolved configuration with all values, also those of another experiment."""
        if secrets_from is None:
            return reveal_secrets(config.to_json(), {}, {})
        source = config_of(self._changes.experiment(connection, secrets_from)).environment
        values = self._secret_store.of(secrets_from)
        return reveal_secrets(config.to_json(), source.variables, values)

    def _state(self, transaction: Transaction, experiment_id: int) -> ExperimentState:
        return ExperimentState(self._managed(transaction, experiment_id).state)

    def _managed(self, transaction: Transaction, experiment_id: int) -> sa.Row[Any]:
        """Return the row of an experiment run by this master; refuse unmanaged experiments."""
        row = self._changes.experiment(transaction.connection, experiment_id)
        if row.external_id is not None:
            run_dir = (row.external_path or "").removeprefix(REPORTED)
            raise RefusedError(
                "unmanaged",
                f"Experiment {experiment_id} must be managed by this master for that, but it only"
                f" shows the run in {run_dir!r}. Hint: stop the run's own process"
                " (SIGTERM lets it store a checkpoint), and resume it by"
                f" PACELINE_RESUME={run_dir}.",
            )
        return row

    def _stop(self, transaction: Transaction, experiment_id: int, state: ExperimentState) -> None:
        self._changes.stop_experiment(transaction, experiment_id, state)
        self._changes.end_experiment_if_done(transaction, experiment_id)

    def _settle_source(self, connection: sa.Connection, searcher: dict[str, Any]) -> int | None:
        """Replace a source trial by its latest checkpoint, and return the trial's id, or None."""
        trial_id: int | None = searcher.get("source_trial_id")
        uuid = searcher.get("source_checkpoint_uuid")
        for kind, key in (("trial_id", trial_id), ("uuid", uuid)):
            check_object(connection, kind, key)
        if trial_id is not None:
            searcher["source_checkpoint_uuid"] = self._latest_of(connection, trial_id)
            searcher["source_trial_id"] = None
        elif uuid is not None:
            check_checkpoint(connection, uuid, self._changes.being_deleted)
        return trial_id

    def _latest_of(self, connection: sa.Connection, trial_id: int) -> str:
        self._changes.trial(connection, trial_id)
        found = latest_checkpoint(connection, trial_id, self._changes.being_deleted)
        if found is None:
            raise RefusedError(
                "no_checkpoint",
                f"Trial {trial_id} must have a checkpoint to start from, but has none.",
            )
        return found[0]
