"""Deleting an experiment: what that takes away, what forbids it, and what it leaves to remove."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, or_, select

from paceline.master.experiments._checkpoint_files import CheckpointPlace, places_of_checkpoints
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import (
    POINTS,
    TRIALS,
    Transaction,
    checkpoint_sizes,
    drop_unused_environments,
    keep_ids,
    numbers_of,
    tables,
)
from paceline.messages.states import (
    LIVE_ATTEMPTS,
    LIVE_TRIALS,
    CheckpointState,
    ExperimentState,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Data that a deletion removes; `obstacle` is the reason to refuse it, or None."""

    num_trials: int
    num_checkpoints: int
    checkpoint_bytes: int
    num_metric_points: int
    obstacle: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """Files outside the database: trial logs, attempt directories, checkpoints by their UUIDs."""

    trial_ids: tuple[int, ...]
    attempt_ids: tuple[int, ...]
    checkpoints: dict[str, CheckpointPlace]


def loss_of(connection: Connection, experiment_id: int) -> Loss:
    """Return what deleting an experiment would take away.

    Raises:
        NotFoundError: There is no such experiment.
    """
    row = StateChanges.experiment(connection, experiment_id)
    num_checkpoints, size = 0, 0
    if row.external_id is None:
        stored = checkpoint_sizes(connection, [experiment_id])
        num_checkpoints, size = stored.get(experiment_id, (0, 0))
    return Loss(
        num_trials=numbers_of(connection, TRIALS, [experiment_id]).get(experiment_id, 0),
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=size,
        num_metric_points=numbers_of(connection, POINTS, [experiment_id]).get(experiment_id, 0),
        obstacle=_obstacle_to_deletion(connection, row),
    )


def delete_experiment(
    transaction: Transaction, changes: StateChanges, experiment_id: int
) -> Leftovers:
    """Delete all that the database holds of an experiment; the caller removes the rest.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: It has not ended, others start from its checkpoints, or its run still exists.
    """
    connection = transaction.connection
    row = StateChanges.experiment(connection, experiment_id)
    obstacle = _obstacle_to_deletion(connection, row)
    if obstacle is not None:
        raise RefusedError("not_deletable", obstacle)
    trials = tables.trials.c
    ids = select(trials.id).where(trials.experiment_id == experiment_id)
    attempts = tables.attempts.c
    attempt_ids = select(attempts.id).where(attempts.experiment_id == experiment_id)
    leftovers = Leftovers(
        trial_ids=tuple(connection.execute(ids).scalars()),
        attempt_ids=tuple(connection.execute(attempt_ids).scalars()),
        checkpoints=places_of_checkpoints(
            connection,
            experiment_id,
            _checkpoints_to_delete(connection, row),
            changes.default_storage,
        ),
    )
    keep_ids(connection, tables.experiments, tables.trials, tables.attempts)
    _delete_rows(connection, experiment_id, ids)
    transaction.emit("experiment_deleted", experiment_id)
    transaction.after_commit(lambda: changes.searches.forget(experiment_id))
    return leftovers


def _delete_rows(connection: Connection, experiment_id: int, trial_ids: Any) -> None:
    series, attempts = tables.series, tables.attempts
    series_ids = select(series.c.id).where(series.c.trial_id.in_(trial_ids))
    attempt_ids = select(attempts.c.id).where(attempts.c.experiment_id == experiment_id)
    used = select(attempts.c.environment).where(
        attempts.c.experiment_id == experiment_id, attempts.c.environment.is_not(None)
    )
    environments = set(connection.execute(used.distinct()).scalars())
    connection.execute(delete(tables.chunks).where(tables.chunks.c.series_id.in_(series_ids)))
    connection.execute(delete(series).where(series.c.trial_id.in_(trial_ids)))
    for marks in (tables.journal_marks, tables.time_marks):
        connection.execute(delete(marks).where(marks.c.attempt_id.in_(attempt_ids)))
    # Trials and the experiment itself come last: the others refer to them.
    for table in (
        attempts,
        tables.checkpoints,
        tables.search_inputs,
        tables.search_snapshots,
        tables.search_views,
        tables.events,
        tables.trials,
    ):
        connection.execute(delete(table).where(table.c.experiment_id == experiment_id))
    experiments = tables.experiments
    connection.execute(delete(experiments).where(experiments.c.id == experiment_id))
    drop_unused_environments(connection, environments)


def _obstacle_to_deletion(connection: Connection, row: Row[Any]) -> str | None:
    if not ExperimentState(row.state).is_terminal:
        return (
            f"Experiment {row.id} must have ended to be deleted, but is {row.state}. Hint: kill it"
            " first, or wait for its end."
        )
    if row.external_path is not None and Path(row.external_path).exists():
        return (
            f"Experiment {row.id} shows the run in {row.external_path!r}, which is not the"
            " master's to delete. Hint: remove that directory first, or archive the experiment."
        )
    user = _user_of_checkpoints(connection, row.id)
    if user is not None:
        return (
            f"Experiment {row.id} must not be deleted while trial {user} starts from one of its"
            " checkpoints. Hint: kill that trial first, or wait for its end."
        )
    return None


def _user_of_checkpoints(connection: Connection, experiment_id: int) -> int | None:
    """Return a trial of another experiment that is going to start from a checkpoint of this one."""
    checkpoints, trials, attempts = tables.checkpoints.c, tables.trials, tables.attempts

    def is_ours(uuid: ColumnElement[Any]) -> ColumnElement[bool]:
        # Looked up by its name: an experiment may have many checkpoints, but few trials go on.
        return (
            select(checkpoints.uuid)
            .where(checkpoints.uuid == uuid, checkpoints.experiment_id == experiment_id)
            .exists()
        )

    resumed = select(attempts.c.trial_id).where(
        attempts.c.state.in_(LIVE_ATTEMPTS), is_ours(attempts.c.resumed_from)
    )
    is_used = or_(is_ours(trials.c.source_checkpoint), trials.c.id.in_(resumed))
    query = select(trials.c.id).where(
        is_used, trials.c.state.in_(LIVE_TRIALS), trials.c.experiment_id != experiment_id
    )
    found: int | None = connection.execute(query.limit(1)).scalar()
    return found


def _checkpoints_to_delete(connection: Connection, row: Row[Any]) -> list[Row[Any]]:
    """Return the checkpoints whose files are the master's to delete."""
    if row.external_id is not None:
        return []
    checkpoints = tables.checkpoints
    return list(
        connection.execute(
            select(checkpoints).where(
                checkpoints.c.experiment_id == row.id,
                checkpoints.c.state != CheckpointState.DELETED.value,
            )
        )
    )
