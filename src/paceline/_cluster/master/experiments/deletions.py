"""Deletion of experiments: its obstacles, their rows, and their files, also after a kill."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.experiments.checkpoint_places import (
    CheckpointPlace,
    checkpoint_places,
)
from paceline._cluster.master.experiments.checkpoints import delete_files, registered_checkpoints
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.home_directory import SecretStore
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import drop_unused_environments
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.quotas import keep_usage
from paceline._cluster.master.store.reach import acting
from paceline._cluster.master.store.row_ids_and_counts import (
    POINTS,
    TRIALS,
    checkpoint_sizes,
    ids_parameter,
    insert_document,
    keep_ids,
    many_ids,
    numbers_of,
)
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.messages.states import (
    LIVE_ATTEMPTS,
    LIVE_TRIALS,
    CheckpointState,
    ExperimentState,
    told_state,
)
from paceline._cluster.runner.attempt_directory import AttemptDirectory

logger = logging.getLogger(__name__)

faults.register("master.deletion.committed")

# A document per deleted experiment whose files are still to be removed.
_KIND = "deletion"
_documents = tables.documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Data removed by a deletion; `obstacle` is the reason to refuse the deletion, or None."""

    num_trials: int
    num_checkpoints: int
    checkpoint_bytes: int
    num_metric_points: int
    obstacle: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """Files of an experiment outside the database: logs, attempt directories, checkpoints."""

    experiment_id: int
    trial_ids: tuple[int, ...]
    attempt_ids: tuple[int, ...]
    checkpoints: dict[str, CheckpointPlace]


def loss_of(connection: sa.Connection, experiment_id: int) -> Loss:
    """Return the data removed by deleting an experiment.

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
        obstacle=obstacle_to_deletion(row, checkpoint_users(connection)),
    )


def delete_experiment(
    transaction: Transaction, changes: StateChanges, experiment_id: int
) -> Leftovers:
    """Delete all rows of an experiment, and return the files left for the caller to remove.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: It has not ended, others start from its checkpoints, or its run still exists.
    """
    connection = transaction.connection
    row = StateChanges.experiment(connection, experiment_id)
    obstacle = obstacle_to_deletion(row, checkpoint_users(connection))
    if obstacle is not None:
        raise RefusedError("not_deletable", obstacle)
    trials = tables.trials.c
    ids = sa.select(trials.id).where(trials.experiment_id == experiment_id)
    attempts = tables.attempts.c
    attempt_ids = sa.select(attempts.id).where(attempts.experiment_id == experiment_id)
    leftovers = Leftovers(
        experiment_id=experiment_id,
        trial_ids=tuple(connection.execute(ids).scalars()),
        attempt_ids=tuple(connection.execute(attempt_ids).scalars()),
        checkpoints=checkpoint_places(
            connection,
            experiment_id,
            _checkpoints_to_delete(connection, row),
            changes.default_storage,
        ),
    )
    # Highest ids are kept before the deletion: no id may be given twice.
    keep_ids(connection, tables.experiments, tables.trials, tables.attempts)
    keep_usage(connection, experiment_id)
    transaction.insert_late_rows()
    _delete_rows(connection, experiment_id, ids)
    _note_leftovers(connection, leftovers, row)
    transaction.emit("experiment_deleted", experiment_id)
    transaction.after_commit(lambda: changes.searches.forget(experiment_id))
    return leftovers


def _delete_rows(connection: sa.Connection, experiment_id: int, trial_ids: Any) -> None:
    series, attempts = tables.series, tables.attempts
    series_ids = sa.select(series.c.id).where(series.c.trial_id.in_(trial_ids))
    attempt_ids = sa.select(attempts.c.id).where(attempts.c.experiment_id == experiment_id)
    used = sa.select(attempts.c.environment).where(
        attempts.c.experiment_id == experiment_id, attempts.c.environment.is_not(None)
    )
    environments = set(connection.execute(used.distinct()).scalars())
    connection.execute(sa.delete(tables.chunks).where(tables.chunks.c.series_id.in_(series_ids)))
    connection.execute(sa.delete(series).where(series.c.trial_id.in_(trial_ids)))
    for marks in (tables.journal_marks, tables.time_marks):
        connection.execute(sa.delete(marks).where(marks.c.attempt_id.in_(attempt_ids)))
    # Trials and the experiment itself come last: the others refer to them.
    for table in (
        attempts,
        tables.checkpoints,
        tables.search_inputs,
        tables.search_snapshots,
        tables.search_views,
        tables.events,
        tables.media,
        tables.run_files,
        tables.documents,
        tables.trials,
    ):
        connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id))
    experiments = tables.experiments
    connection.execute(sa.delete(experiments).where(experiments.c.id == experiment_id))
    drop_unused_environments(connection, environments)


def obstacle_to_deletion(row: sa.Row[Any], users: Mapping[int, str]) -> str | None:
    """Return why an experiment must not be deleted, None if it may be.

    Args:
        row: Its id, state and `external_path`.
        users: The result of `checkpoint_users`.
    """
    if not ExperimentState(row.state).is_terminal:
        return (
            f"Experiment {row.id} must have ended to be deleted, but is {told_state(row.state)}."
            " Hint: kill it first, or wait for its end."
        )
    if row.external_path is not None and Path(row.external_path).exists():
        return (
            f"Experiment {row.id} shows the run in {row.external_path!r}, which is not the"
            " master's to delete. Hint: remove that directory first, or archive the experiment."
        )
    if row.id in users:
        return f"Experiment {row.id} must not be deleted while {users[row.id]}"
    return None


def checkpoint_users(connection: sa.Connection) -> dict[int, str]:
    """Return outside users of an experiment's checkpoints, with a hint, by experiment."""
    checkpoints, trials, attempts = tables.checkpoints.c, tables.trials.c, tables.attempts.c
    started = sa.select(checkpoints.experiment_id, trials.id).where(
        trials.source_checkpoint == checkpoints.uuid,
        trials.state.in_(LIVE_TRIALS),
        trials.experiment_id != checkpoints.experiment_id,
    )
    resumed = sa.select(checkpoints.experiment_id, trials.id).where(
        attempts.resumed_from == checkpoints.uuid,
        attempts.state.in_(LIVE_ATTEMPTS),
        attempts.trial_id == trials.id,
        trials.state.in_(LIVE_TRIALS),
        trials.experiment_id != checkpoints.experiment_id,
    )
    models = registered_checkpoints(connection)
    owners = sa.select(checkpoints.uuid, checkpoints.experiment_id).where(
        checkpoints.uuid.in_(many_ids())
    )
    found = {
        row.experiment_id: f"the model {models[row.uuid]} has one of its checkpoints. Hint: delete"
        " that version first, by `paceline model delete`."
        for row in connection.execute(owners, ids_parameter(models))
    }
    for experiment_id, trial_id in connection.execute(started.union(resumed)):
        found[experiment_id] = (
            f"trial {trial_id} starts from one of its checkpoints. Hint: kill that trial first, or"
            " wait for its end."
        )
    return found


def _checkpoints_to_delete(connection: sa.Connection, row: sa.Row[Any]) -> list[sa.Row[Any]]:
    """Return the checkpoints with files owned by the master; none for an unmanaged run."""
    if row.external_id is not None:
        return []
    checkpoints = tables.checkpoints
    return list(
        connection.execute(
            sa.select(checkpoints).where(
                checkpoints.c.experiment_id == row.id,
                checkpoints.c.state != CheckpointState.DELETED.value,
            )
        )
    )


def _note_leftovers(connection: sa.Connection, leftovers: Leftovers, row: sa.Row[Any]) -> None:
    """Note the files left to remove, for the next start of a master killed before."""
    content = {
        "trial_ids": leftovers.trial_ids,
        "attempt_ids": leftovers.attempt_ids,
        "checkpoints": {uuid: list(place) for uuid, place in leftovers.checkpoints.items()},
    }
    columns = {"created_at": row.created_at, "changed_at": row.created_at}
    columns["project_id"] = row.project_id
    insert_document(connection, _KIND, "", str(leftovers.experiment_id), content, **columns)


class FileRemoval:
    """Removal of the files of deleted experiments.

    Args:
        database: Where they are noted.
        changes: Has the storages.
        logs: Their lines.
        secrets: Their secrets.
        attempts: The directory of attempts.
    """

    def __init__(
        self,
        database: Database,
        changes: StateChanges,
        logs: LogStore,
        secrets: SecretStore,
        attempts: Path,
    ) -> None:
        self._database = database
        self._changes = changes
        self._logs = logs
        self._secrets = secrets
        self._attempts = attempts

    def finish(self) -> None:
        """Remove the files left by a master killed in the middle of a deletion."""
        with self._database.read() as connection:
            query = sa.select(_documents.c.name, _documents.c.content)
            rows = connection.execute(query.where(_documents.c.kind == _KIND)).all()
        for name, content in rows:
            leftovers = Leftovers(
                experiment_id=int(name),
                trial_ids=tuple(content["trial_ids"]),
                attempt_ids=tuple(content["attempt_ids"]),
                checkpoints={
                    uuid: CheckpointPlace(*place) for uuid, place in content["checkpoints"].items()
                },
            )
            left = self.remove(leftovers)
            if left:
                logger.warning("Files of deleted experiment %s stay: %s.", name, ", ".join(left))

    def remove(self, leftovers: Leftovers) -> list[str]:
        """Remove the files of deleted rows, and return the names of undeletable files."""
        faults.reach("master.deletion.committed")
        left = [
            f"{place.storage}/{uuid}"
            for uuid, place in leftovers.checkpoints.items()
            if not self._delete_files(place, uuid)
        ]
        attempts = self._attempts
        removals: list[Callable[[], None]] = [
            partial(self._secrets.forget, leftovers.experiment_id),
            *(partial(self._logs.delete, trial_id) for trial_id in leftovers.trial_ids),
            *(AttemptDirectory(attempts / str(n)).remove_kept for n in leftovers.attempt_ids),
        ]
        for remove in removals:
            # A file that stays must not keep the others.
            try:
                remove()
            except OSError as error:
                left.append(str(error))
        noted = (_documents.c.kind == _KIND, _documents.c.name == str(leftovers.experiment_id))
        with acting(None):
            forget = sa.delete(_documents).where(*noted)
            self._database.write(lambda made: made.connection.execute(forget)).result()
        return left

    def _delete_files(self, place: CheckpointPlace, uuid: str) -> bool:
        try:
            return delete_files(self._changes.storage_calls, place, uuid)
        except RefusedError:
            return False
