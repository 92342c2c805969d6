"""Their rows and facts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Table, insert, select, update

from paceline._base.journal_records import AttemptStarted
from paceline._base.run_directory import RUN_FORMAT_VERSION, RunInfo
from paceline._cluster.master.experiments.record_checks import check_run_info
from paceline._cluster.master.experiments.record_ingest import CHIEF
from paceline._cluster.master.experiments.state_decisions import INVALID_HP, RefusedError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import REPORTED
from paceline._cluster.master.store.row_ids_and_counts import new_id
from paceline._cluster.messages.runner_messages import RunBatch, RunMark, RunReply
from paceline._cluster.messages.states import AttemptState, ExperimentState, TrialState
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._validate_config import validate_config


def experiment_of_run(connection: Connection, run_id: str) -> Row[Any] | None:
    """Return the experiment of a run, None if unknown."""
    experiments = tables.experiments
    return connection.execute(
        select(experiments).where(experiments.c.external_id == run_id)
    ).first()


def is_reported(experiment: Row[Any]) -> bool:
    """Return whether only senders who may name no directory have reported a run."""
    return (experiment.external_path or REPORTED).startswith(REPORTED)


def check_sender(experiment: Row[Any], *, is_trusted: bool) -> None:
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


def open_directory_runs(connection: Connection) -> list[Row[Any]]:
    """Return the unfinished experiments of runs with directories followed by a master."""
    experiments = tables.experiments
    states = (ExperimentState.ACTIVE.value, ExperimentState.PAUSED.value)
    query = select(experiments).where(
        experiments.c.external_id.is_not(None),
        experiments.c.external_path.is_not(None),
        experiments.c.report_lease_s.is_(None),
        experiments.c.state.in_(states),
    )
    return [row for row in connection.execute(query) if not is_reported(row)]


def trial_of_run(connection: Connection, experiment_id: int) -> Row[Any]:
    """Return the only trial of an unmanaged experiment."""
    trials = tables.trials
    return connection.execute(select(trials).where(trials.c.experiment_id == experiment_id)).one()


def run_attempts(connection: Connection, trial_id: int) -> list[Row[Any]]:
    """Return a trial's attempts, the earliest first."""
    attempts = tables.attempts
    query = select(attempts).where(attempts.c.trial_id == trial_id).order_by(attempts.c.number)
    return list(connection.execute(query))


def insert_row(connection: Connection, table: Table, **values: Any) -> int:
    """Insert a row and return its id."""
    row_id = new_id(connection, table)
    connection.execute(insert(table).values(id=row_id, **values))
    return row_id


def update_experiment(connection: Connection, experiment_id: int, **values: Any) -> None:
    """Change the row of an experiment."""
    experiments = tables.experiments
    connection.execute(
        update(experiments).where(experiments.c.id == experiment_id).values(**values)
    )


def update_attempt(connection: Connection, attempt_id: int, **values: Any) -> None:
    """Change the row of an attempt."""
    attempts = tables.attempts
    connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(**values))


def reopen_attempt(connection: Connection, attempt: Row[Any]) -> None:
    """Reopen an attempt ended by assumption: new records have come.

    It looked dead: its lock cannot be seen from another machine, for example. Or its chief has
    ended, and other ranks still report: its end stays recorded then.
    """
    reopened: dict[str, Any] = {} if attempt.outcome is not None else {"exit": None}
    update_attempt(
        connection, attempt.id, state=AttemptState.RUNNING.value, ended_at=None, **reopened
    )


def has_run_news(connection: Connection, attempt_id: int, batches: Iterable[RunBatch]) -> bool:
    """Return whether the batches hold records of an attempt not yet stored."""
    marks = tables.journal_marks
    rows = connection.execute(
        select(marks.c.rank, marks.c.sequence).where(marks.c.attempt_id == attempt_id)
    )
    stored = {row.rank: row.sequence for row in rows}
    return any(batch.records[-1][0] > stored.get(batch.rank, -1) for batch in batches)


def run_reply(connection: Connection, experiment_id: int) -> RunReply:
    """Return the ids and stored marks of a run; the reporter continues from these marks."""
    marks, attempts = tables.journal_marks, tables.attempts
    rows = connection.execute(
        select(attempts.c.run_attempt, marks.c.generation, marks.c.rank, marks.c.sequence)
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
    connection: Connection, experiment_id: int, old: str, new: str
) -> None:
    """Store the new location of checkpoints after a move of their storage."""
    checkpoints = tables.checkpoints
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.experiment_id == experiment_id, checkpoints.c.storage == old)
        .values(storage=new)
    )


VANISHED = "The process ended without a word: it was killed, or its machine failed."
SILENT = (
    "Nothing was heard of the run for {:.0f} s: it was killed, its machine failed, or the network"
    " does. It goes on here once it is heard again."
)
_NEVER_BEGAN = "The run ended before it recorded anything."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """States of experiment and trial for showing a run."""

    experiment: ExperimentState
    trial: TrialState
    reason: str | None = None
    error: str | None = None


def end_of_run(
    *,
    is_alive: bool,
    has_begun: bool,
    outcome: str | None,
    error: str | None,
    vanished: str = VANISHED,
    left_out: str | None = None,
) -> RunEnd:
    """Decide how a run is shown, from its newest attempt.

    A preempted run waits to be resumed, so it is paused.

    Args:
        is_alive: Whether a process of the run is at work, or more records are to come.
        has_begun: Whether there is an attempt at all.
        outcome: How the newest attempt said that it ended, None if it did not.
        error: The error that it named.
        vanished: The text for an attempt that recorded no end.
        left_out: Why nothing more can be read of the run, so that it cannot be resumed either; None
            if it can.
    """
    if left_out is not None and outcome in (None, "preempted"):
        return RunEnd(experiment=ExperimentState.ERROR, trial=TrialState.ERROR, error=left_out)
    if outcome is None and is_alive:
        return RunEnd(experiment=ExperimentState.ACTIVE, trial=TrialState.ACTIVE)
    if outcome == "preempted":
        return RunEnd(experiment=ExperimentState.PAUSED, trial=TrialState.ACTIVE)
    if outcome == "completed":
        return RunEnd(experiment=ExperimentState.COMPLETED, trial=TrialState.COMPLETED)
    if outcome == INVALID_HP:
        # Same states as for an experiment with a single, refusing trial.
        return RunEnd(
            experiment=ExperimentState.ERROR,
            trial=TrialState.COMPLETED,
            reason=INVALID_HP,
            error=f"The run refused its hyperparameters: {error or 'InvalidHP'}.",
        )
    why = error or (vanished if has_begun else _NEVER_BEGAN)
    return RunEnd(experiment=ExperimentState.ERROR, trial=TrialState.ERROR, error=why)


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
