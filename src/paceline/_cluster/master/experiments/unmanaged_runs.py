"""Runs made without a master, shown as experiments.

A run is an experiment with one trial. Each start of its script is an attempt of that trial, counted
from 1 as all attempts are; so is each generation, as rows are superseded attempt by attempt.
Nothing here is scheduled: states follow from the journals and whether the run is alive.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._base.journal_records import AttemptStarted
from paceline._base.run_directory import RUN_FORMAT_VERSION, RunInfo
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.state_decisions import (
    SILENT,
    VANISHED,
    NotFoundError,
    RefusedError,
    RunEnd,
    SearchEnd,
    end_of_run,
    experiment_end,
)
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.searches.best_values import CHIEF, recompute_best
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import REPORTED
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import check_object
from paceline._cluster.master.store.row_ids_and_counts import (
    insert_row,
    update_attempt,
    update_experiment,
)
from paceline._cluster.messages.record_checks import check_run_info
from paceline._cluster.messages.runner_messages import (
    AttemptEnd,
    RecordBatch,
    RunBatch,
    RunMark,
    RunReply,
)
from paceline._cluster.messages.states import (
    AttemptState,
    ErrorKind,
    ExitReason,
    ExperimentState,
    TrialState,
)
from paceline.config._environment_and_secrets import without_secrets
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._validate_config import validate_config


def experiment_of_run(connection: sa.Connection, run_id: str) -> sa.Row[Any] | None:
    """Return the experiment of a run, None if unknown.

    Raises:
        NotAllowedError: The sender of the request does not see it.
    """
    check_object(connection, "run_id", run_id)
    experiments = tables.experiments
    return connection.execute(
        sa.select(experiments).where(experiments.c.external_id == run_id)
    ).first()


def is_reported(experiment: sa.Row[Any]) -> bool:
    """Return whether only senders who may name no directory have reported a run."""
    return (experiment.external_path or REPORTED).startswith(REPORTED)


def check_sender(experiment: sa.Row[Any], *, is_trusted: bool) -> None:
    """Refuse a sender whose token only reports, for a run that another kind of sender registered.

    Raises:
        RefusedError: The run is not that sender's.
    """
    if not is_trusted and not is_reported(experiment):
        raise RefusedError(
            "foreign_run",
            "A token of scope `report` must send runs that such a token registered, but"
            f" experiment {experiment.id} was registered by another. Hint: if the master watches"
            " the directory of the run, it reads the records there; else send with the token that"
            " registered the run.",
        )


def open_directory_runs(connection: sa.Connection) -> list[sa.Row[Any]]:
    """Return the unfinished experiments of runs with directories followed by a master."""
    experiments = tables.experiments
    states = (ExperimentState.ACTIVE.value, ExperimentState.PAUSED.value)
    query = sa.select(experiments).where(
        experiments.c.external_id.is_not(None),
        experiments.c.external_path.is_not(None),
        experiments.c.report_lease_s.is_(None),
        experiments.c.state.in_(states),
    )
    return [row for row in connection.execute(query) if not is_reported(row)]


def trial_of_run(connection: sa.Connection, experiment_id: int) -> sa.Row[Any]:
    """Return the only trial of an unmanaged experiment."""
    trials = tables.trials
    return connection.execute(
        sa.select(trials).where(trials.c.experiment_id == experiment_id)
    ).one()


def run_attempts(connection: sa.Connection, trial_id: int) -> list[sa.Row[Any]]:
    """Return a trial's attempts, the earliest first."""
    attempts = tables.attempts
    query = sa.select(attempts).where(attempts.c.trial_id == trial_id).order_by(attempts.c.number)
    return list(connection.execute(query))


def reopen_attempt(connection: sa.Connection, attempt: sa.Row[Any]) -> None:
    """Reopen an attempt ended by assumption: new records have come.

    It looked dead: its lock cannot be seen from another machine, for example. Or its chief has
    ended, and other ranks still report: its end stays recorded then.
    """
    reopened: dict[str, Any] = {} if attempt.outcome is not None else {"exit": None}
    update_attempt(
        connection, attempt.id, state=AttemptState.RUNNING.value, ended_at=None, **reopened
    )


def has_run_news(connection: sa.Connection, attempt_id: int, batches: Iterable[RunBatch]) -> bool:
    """Return whether the batches hold records of an attempt not yet stored."""
    marks = tables.journal_marks
    rows = connection.execute(
        sa.select(marks.c.rank, marks.c.sequence).where(marks.c.attempt_id == attempt_id)
    )
    stored = {row.rank: row.sequence for row in rows}
    return any(batch.records[-1][0] > stored.get(batch.rank, -1) for batch in batches)


def run_reply(connection: sa.Connection, experiment_id: int) -> RunReply:
    """Return the ids and stored marks of a run; the reporter continues from these marks."""
    marks, attempts = tables.journal_marks, tables.attempts
    rows = connection.execute(
        sa.select(attempts.c.run_attempt, marks.c.generation, marks.c.rank, marks.c.sequence)
        .join(attempts, attempts.c.id == marks.c.attempt_id)
        .where(attempts.c.experiment_id == experiment_id)
        .order_by(attempts.c.number, marks.c.rank)
    )
    return RunReply(
        experiment_id=experiment_id,
        trial_id=trial_of_run(connection, experiment_id).id,
        marks=[RunMark(*row) for row in rows],
    )


def move_unmanaged_checkpoints(
    connection: sa.Connection, experiment_id: int, old: str, new: str
) -> None:
    """Store the new location of checkpoints after a move of their storage."""
    checkpoints = tables.checkpoints
    connection.execute(
        sa.update(checkpoints)
        .where(checkpoints.c.experiment_id == experiment_id, checkpoints.c.storage == old)
        .values(storage=new)
    )


def check_run(info: RunInfo) -> None:
    """Refuse runs of a master, and run directories of another format version.

    Raises:
        RefusedError: A master started it, or it has another format version, or values that cannot
            be.
    """
    try:
        check_run_info(info)
    except ValueError as error:
        raise RefusedError("bad_run", f"The run cannot be shown: {error}") from error
    if info.version != RUN_FORMAT_VERSION:
        raise RefusedError(
            "wrong_version",
            f"A run directory must have format version {RUN_FORMAT_VERSION}, but {info.name!r} has"
            f" {info.version}. Hint: use the Paceline version that wrote it.",
        )
    if info.cluster_id:
        raise RefusedError(
            "managed_run",
            f"A run must have been made without a master, but {info.name!r} is an attempt that"
            " a master started. Hint: that master shows it.",
        )


def config_of_run(info: RunInfo) -> ExperimentConfig:
    """Return a `single` configuration for a run, based on the run's own if present.

    Without one the searched metric is taken to be `loss`; the smallest value is the best.

    Raises:
        paceline.config.ConfigError: The run's configuration is not valid.
    """
    searcher: dict[str, Any] = {"name": "single", "metric": "loss"}
    config: dict[str, Any]
    if info.trial is not None and info.trial.config:
        config = dict(info.trial.config)
        given = config["searcher"] if isinstance(config.get("searcher"), dict) else {}
        searcher |= {k: given[k] for k in ("metric", "smaller_is_better") if k in given}
    else:
        # Escaped `${`: command arguments are literal, not references to hyperparameters.
        arguments = [text.replace("${", "$${") for text in info.arguments]
        config = {"entrypoint": ["python3", *arguments]}
    return validate_config(config | {"name": info.name, "searcher": searcher})


def run_hparams(info: RunInfo) -> dict[str, Any]:
    """Return the run's hyperparameters, as far as they are known."""
    return (info.hparams if info.trial is None else info.trial.hparams) or {}


def run_seed(info: RunInfo) -> int:
    """Return the run's seed, 0 if unknown."""
    return (info.seed if info.trial is None else info.trial.trial_seed) or 0


def attempt_started(batches: Iterable[RunBatch]) -> AttemptStarted | None:
    """Return the start record of the chief, or else of another rank; None without any."""
    for batch in sorted(batches, key=lambda batch: (batch.rank != CHIEF, batch.rank)):
        first = batch.records[0][1]
        if isinstance(first, AttemptStarted):
            return first
    return None


# A journal without its first line has no step of resumption, so it supersedes nothing.
_SUPERSEDES_NOTHING = 2**62


class Unmanaged:
    """Take up runs made without a master; used in the writer thread, inside a transaction."""

    def __init__(self, changes: StateChanges, ingest: RecordIngest) -> None:
        self._changes = changes
        self._ingest = ingest
        # Deadlines of live-reported runs by experiment id, on the monotonic clock.
        self._deadlines: dict[int, float] = {}

    def register(
        self, transaction: Transaction, info: RunInfo, path: str, *, is_trusted: bool = True
    ) -> RunReply:
        """Register a run, and return the stored marks; repeated calls only update the path.

        Args:
            transaction: Everything happens in it, or nothing.
            info: The facts of the run.
            path: Its directory.
            is_trusted: Whether the sender may name directories that the master opens.

        Raises:
            RefusedError: A master started the run, or it has another format version, or it is not
                the sender's.
            paceline.config.ConfigError: The run holds a configuration that is not valid.
        """
        connection = transaction.connection
        known = experiment_of_run(connection, info.run_id)
        if not is_trusted:
            path = REPORTED + path
        if known is None:
            check_run(info)
            experiment_id = self._create(transaction, info, path)
            known = self._changes.experiment(connection, experiment_id)
        check_sender(known, is_trusted=is_trusted)
        if known.external_path != path:
            update_experiment(connection, known.id, external_path=path)
        return run_reply(connection, known.id)

    def take(
        self,
        transaction: Transaction,
        run_id: str,
        batches: Sequence[RunBatch],
        *,
        is_alive: bool,
        moved: Mapping[str, str] | None = None,
        lease_s: float | None = None,
        is_trusted: bool = True,
    ) -> RunReply:
        """Store a run's further records and bring its states up to date.

        Records that are known are dropped, so sending twice changes nothing.

        Args:
            transaction: Everything happens in it, or nothing.
            run_id: The run, which was registered before.
            batches: Records by journal, earlier attempts first.
            is_alive: Whether more may follow: the run continues, or it wrote more than this.
            moved: Checkpoint storages that the journals name, and where they are now.
            lease_s: Limit on silence of an unfinished run in seconds; None is for ever.
            is_trusted: Whether the sender may name directories that the master opens.

        Raises:
            NotFoundError: The run was not registered.
            RefusedError: The run is not the sender's.
        """
        connection = transaction.connection
        experiment = experiment_of_run(connection, run_id)
        if experiment is None:
            raise NotFoundError(f"There is no run {run_id!r}. Hint: register it first.")
        check_sender(experiment, is_trusted=is_trusted)
        if lease_s is not None:
            self._deadlines[experiment.id] = time.monotonic() + lease_s
        if experiment.report_lease_s != lease_s:
            update_experiment(connection, experiment.id, report_lease_s=lease_s)
        return self._take_records(transaction, experiment, batches, is_alive, moved or {})

    def reported_trial(
        self, connection: sa.Connection, run_id: str, *, is_trusted: bool = True
    ) -> sa.Row[Any]:
        """Return the trial of a run that sends a file, which is a sign of life.

        Raises:
            NotFoundError: The run was not registered.
            RefusedError: The run is not the sender's.
        """
        experiment = experiment_of_run(connection, run_id)
        if experiment is None:
            raise NotFoundError(f"There is no run {run_id!r}. Hint: register it first.")
        check_sender(experiment, is_trusted=is_trusted)
        if experiment.report_lease_s is not None:
            deadline = time.monotonic() + experiment.report_lease_s
            self._deadlines[experiment.id] = deadline
        return trial_of_run(connection, experiment.id)

    def append(self, transaction: Transaction, attempt_id: int, batch: RunBatch) -> None:
        """Store records of an attempt that runs and goes on: they change no state."""
        own = RecordBatch(batch.generation, batch.rank, batch.records, batch.after)
        self._ingest.store(transaction, attempt_id, [own])

    def end_silent(self, transaction: Transaction) -> None:
        """End live-reported runs silent for longer than their lease.

        A new record brings them back.
        """
        experiments = tables.experiments
        query = sa.select(experiments).where(
            experiments.c.state == ExperimentState.ACTIVE.value,
            experiments.c.report_lease_s.is_not(None),
        )
        now = time.monotonic()
        for experiment in list(transaction.connection.execute(query)):
            # After a start of the master all have their time once more.
            deadline = self._deadlines.setdefault(experiment.id, now + experiment.report_lease_s)
            if now > deadline:
                silent = SILENT.format(experiment.report_lease_s)
                self._take_records(transaction, experiment, [], False, {}, vanished=silent)
                del self._deadlines[experiment.id]

    def leave_out(
        self, transaction: Transaction, path: str, reason: str, *, run_id: str | None = None
    ) -> None:
        """End the run of an unreadable directory; new records let the run continue.

        Args:
            transaction: Everything happens in it, or nothing.
            path: The run's directory, as it was registered.
            reason: Why, for the states and the log of the run.
            run_id: The run, if it is known: others may have registered it by another path since.
        """
        for experiment in open_directory_runs(transaction.connection):
            if path == experiment.external_path or run_id == experiment.external_id:
                self._take_records(transaction, experiment, [], False, {}, left_out=reason)

    def _take_records(
        self,
        transaction: Transaction,
        experiment: sa.Row[Any],
        batches: Sequence[RunBatch],
        is_alive: bool,
        moved: Mapping[str, str],
        vanished: str = VANISHED,
        left_out: str | None = None,
    ) -> RunReply:
        connection = transaction.connection
        trial = trial_of_run(connection, experiment.id)
        full = sorted((batch for batch in batches if batch.records), key=batch_place)
        for key, group in groupby(full, lambda batch: (batch.attempt, batch.generation)):
            self._store(transaction, trial.id, key, list(group))
        for old, new in moved.items():
            move_unmanaged_checkpoints(connection, experiment.id, old, new)
        attempts = run_attempts(connection, trial.id)
        newest = attempts[-1] if attempts else None
        for attempt in attempts:
            # A later attempt shows that an earlier one is over.
            is_over = attempt is not newest or attempt.outcome is not None or not is_alive
            if is_over and attempt.state != AttemptState.ENDED.value:
                self._end_attempt(transaction, attempt, left_out or vanished)
        run_end = end_of_run(
            is_alive=is_alive,
            has_begun=newest is not None,
            outcome=newest and newest.outcome,
            error=newest and newest.error,
            vanished=vanished,
            left_out=left_out,
        )
        ended_at = newest.last_record_at if newest else experiment.created_at
        self._bring_to(transaction, experiment.id, run_end, ended_at)
        self._follow_progress(transaction, experiment.id)
        return run_reply(connection, experiment.id)

    # ---- rows ------------------------------------------------------------------------------

    def _create(self, transaction: Transaction, info: RunInfo, path: str) -> int:
        config = config_of_run(info)
        state = ExperimentState.ACTIVE.value
        experiment_id = insert_row(
            transaction.connection,
            tables.experiments,
            name=info.name,
            description=config.description,
            labels=[*dict.fromkeys([*config.labels, *info.labels])],
            state=state,
            config=without_secrets(config.to_json()),
            warnings=[],
            seed=config.reproducibility.experiment_seed or 0,
            created_at=info.created,
            # Nothing is searched, so there is no search to ask or to wait for.
            search_end=SearchEnd.COMPLETED.value,
            external_id=info.run_id,
            external_path=path,
        )
        hparams = run_hparams(info)
        trial_id = insert_row(
            transaction.connection,
            tables.trials,
            experiment_id=experiment_id,
            request_id=info.run_id,
            state=TrialState.ACTIVE.value,
            hparams=hparams,
            seed=run_seed(info),
            created_at=info.created,
        )
        transaction.emit("experiment_state", experiment_id, state=state, error=None)
        transaction.emit("trial_created", experiment_id, trial_id, hparams=hparams)
        return experiment_id

    def _store(
        self,
        transaction: Transaction,
        trial_id: int,
        key: tuple[int, int],
        batches: list[RunBatch],
    ) -> None:
        connection = transaction.connection
        known = {
            (row.run_attempt, row.run_generation): row for row in run_attempts(connection, trial_id)
        }
        attempt = known.get(key)
        started_at = None
        if attempt is None:
            if any(batch.after is not None and batch.after > -1 for batch in batches):
                # Gap before this batch: the marks in the reply make the reporter resend it.
                return
            attempt = self._begin_attempt(transaction, trial_id, key, batches)
            started_at = attempt.created_at
        elif not has_run_news(connection, attempt.id, batches):
            return
        elif attempt.state == AttemptState.ENDED.value:
            reopen_attempt(connection, attempt)
        self._ingest.store(
            transaction,
            attempt.id,
            [RecordBatch(b.generation, b.rank, b.records, b.after) for b in batches],
        )
        newest = max(record.time for batch in batches for _, record in batch.records)
        # Ranks report independently: a batch can be older than the last record.
        values = {"last_record_at": max(newest, attempt.last_record_at or 0.0)}
        if started_at is not None:
            values["started_at"] = started_at
        update_attempt(connection, attempt.id, **values)
        if known and attempt.number < max(row.number for row in known.values()):
            # Late records may lie beyond the step from which a later attempt resumed.
            recompute_best(self._changes, transaction, self._changes.trial(connection, trial_id))

    def _begin_attempt(
        self,
        transaction: Transaction,
        trial_id: int,
        key: tuple[int, int],
        batches: list[RunBatch],
    ) -> sa.Row[Any]:
        connection = transaction.connection
        trial = self._changes.trial(connection, trial_id)
        number = trial.num_attempts + 1
        started = attempt_started(batches)
        first = batches[0].records[0][1]
        connection.execute(
            sa.insert(tables.attempts).values(
                trial_id=trial_id,
                experiment_id=trial.experiment_id,
                number=number,
                state=AttemptState.PENDING.value,
                slots=[],
                created_at=first.time if started is None else started.time,
                resumed_from=started and started.resumed_from,
                resumed_steps=started.steps_completed if started else _SUPERSEDES_NOTHING,
                run_attempt=key[0],
                run_generation=key[1],
            )
        )
        self._changes.update_trial(transaction, trial_id, num_attempts=number)
        if started is not None:
            text = f"Attempt {number} of the run began at step {started.steps_completed}"
            # Clients of other trackers do not say where they are.
            if started.host:
                text += f": process {started.pid} on {started.host}, {started.world_size} rank(s)"
            self._changes.note(transaction, trial_id, number, "INFO", f"{text}.")
        return run_attempts(connection, trial_id)[-1]

    # ---- ends ------------------------------------------------------------------------------

    def _end_attempt(
        self, transaction: Transaction, attempt: sa.Row[Any], vanished: str = VANISHED
    ) -> None:
        """End an attempt at its last sign of life."""
        ended_at = attempt.last_record_at
        error = attempt.error or (vanished if attempt.outcome is None else None)
        kind = ErrorKind.USER if attempt.error else None
        end = AttemptEnd(reason=ExitReason.EXITED, code=None, signal=None, time=ended_at, kind=kind)
        stored = msgspec.to_builtins(end) | {"outcome": attempt.outcome, "error": error}
        update_attempt(
            transaction.connection,
            attempt.id,
            state=AttemptState.ENDED.value,
            ended_at=ended_at,
            exit=stored,
        )
        told = attempt.exit or {}
        # The attempt was reopened and ended as before: no news.
        if told and (told["outcome"], told["error"]) == (attempt.outcome, error):
            return
        transaction.emit(
            "attempt_ended", attempt.experiment_id, attempt.trial_id,
            number=attempt.number, exit=stored,
        )  # fmt: skip
        if error is not None:
            self._changes.note(transaction, attempt.trial_id, attempt.number, "ERROR", error)

    def _bring_to(
        self, transaction: Transaction, experiment_id: int, run_end: RunEnd, ended_at: float
    ) -> None:
        changes, connection = self._changes, transaction.connection
        experiment = changes.experiment(connection, experiment_id)
        trial = trial_of_run(connection, experiment_id)
        present = (experiment.state, trial.state, experiment.error)
        if present == (run_end.experiment.value, run_end.trial.value, run_end.error):
            return
        self._activate(transaction, experiment, trial)
        if run_end.experiment is ExperimentState.PAUSED:
            changes.set_experiment_state(transaction, experiment_id, ExperimentState.PAUSED)
        elif run_end.trial.is_terminal:
            active = changes.trial(connection, trial.id)
            trial_error = run_end.error if run_end.trial is TrialState.ERROR else None
            changes.set_trial_state(
                transaction,
                active,
                run_end.trial,
                reason=run_end.reason,
                error=trial_error,
                kind=ErrorKind.USER if trial_error else None,
            )
            has_failed = run_end.experiment is ExperimentState.ERROR
            stopping = (
                ExperimentState.STOPPING_ERROR if has_failed else ExperimentState.STOPPING_COMPLETED
            )
            changes.set_experiment_state(transaction, experiment_id, stopping, error=run_end.error)
            changes.set_experiment_state(transaction, experiment_id, experiment_end(stopping))
            changes.update_trial(transaction, trial.id, ended_at=ended_at)
            update_experiment(connection, experiment_id, ended_at=ended_at)

    def _activate(
        self, transaction: Transaction, experiment: sa.Row[Any], trial: sa.Row[Any]
    ) -> None:
        changes = self._changes
        if TrialState(trial.state).is_terminal:
            changes.set_trial_state(transaction, trial, TrialState.ACTIVE, reason="resumed")
            changes.update_trial(
                transaction, trial.id, ended_at=None, error=None, error_kind=None, stop_reason=None
            )
        if experiment.state != ExperimentState.ACTIVE.value:
            update_experiment(transaction.connection, experiment.id, ended_at=None, error=None)
            changes.set_experiment_state(transaction, experiment.id, ExperimentState.ACTIVE)

    def _follow_progress(self, transaction: Transaction, experiment_id: int) -> None:
        """Let the experiment's progress be its trial's; a completed run is all done."""
        connection = transaction.connection
        experiment = self._changes.experiment(connection, experiment_id)
        progress = trial_of_run(connection, experiment_id).progress or 0.0
        if experiment.state == ExperimentState.COMPLETED.value:
            progress = 1.0
        if progress != experiment.progress:
            update_experiment(connection, experiment_id, progress=progress)
            transaction.emit("progress", experiment_id, progress=progress)


def batch_place(batch: RunBatch) -> tuple[int, int, int]:
    """Return the place of a batch in the order of its run."""
    return batch.attempt, batch.generation, batch.rank
