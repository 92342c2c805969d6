"""Ingest of records on checkpoints: those that were stored, and files of them that were deleted."""

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from paceline.journal import CheckpointDeleted, CheckpointFilesDeleted, CheckpointStored
from paceline.master.experiments._checkpoint_files import (
    is_same_storage,
    note_deleted_files,
    place_of_experiment,
)
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import Transaction, config_of, metric_at, read_cluster_id, tables
from paceline.messages.states import CheckpointState
from paceline.storage import check_uuid, is_of_other_trial


def store_checkpoint(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], record: CheckpointStored
) -> None:
    """Store that an attempt has a checkpoint; one that is known stays as it is.

    Raises:
        RefusedError: No checkpoint of the attempt can have such a UUID, or lie there.
    """
    checkpoints, connection = tables.checkpoints, transaction.connection
    _check_names(record)
    check_owner(connection, attempt, record.uuid)
    known = select(checkpoints.c.uuid).where(checkpoints.c.uuid == record.uuid)
    if connection.execute(known).first() is not None:
        return
    experiment = changes.experiment(connection, attempt.experiment_id)
    config = config_of(experiment)
    metric = config.searcher.metric
    if config.deletes_while_running and experiment.retention_done:
        experiments = tables.experiments
        is_this = experiments.c.id == attempt.experiment_id
        connection.execute(update(experiments).where(is_this).values(retention_done=False))
        transaction.after_commit(changes.wake)
    own = place_of_experiment(experiment, changes.default_storage)
    if experiment.external_id is None and own and not is_same_storage(record.storage, own):
        _tell_of_other_storage(changes, transaction, attempt, record)
    step = record.steps_completed
    connection.execute(
        insert(checkpoints).values(
            uuid=record.uuid,
            trial_id=attempt.trial_id,
            experiment_id=attempt.experiment_id,
            attempt=attempt.number,
            steps_completed=step,
            state=CheckpointState.COMPLETED.value,
            metadata=record.metadata,
            resources=record.resources,
            size=sum(record.resources.values()),
            storage=record.storage,
            created_at=record.time,
            metric=metric_at(connection, attempt.trial_id, "validation", metric, step),
        )
    )
    trial = changes.trial(connection, attempt.trial_id)
    if step > trial.steps_completed:
        changes.update_trial(transaction, trial.id, steps_completed=step)
    transaction.emit(
        "checkpoint",
        attempt.experiment_id,
        attempt.trial_id,
        uuid=record.uuid,
        steps_completed=step,
    )


def check_owner(connection: Connection, attempt: Row[Any], uuid: str) -> None:
    """Refuse a UUID that only checkpoints of another trial have.

    Who sees a new checkpoint in a storage could name it before its own trial does.

    Raises:
        RefusedError: It is one.
    """
    cluster_id = read_cluster_id(connection)
    if cluster_id is not None and is_of_other_trial(uuid, cluster_id, attempt.trial_id):
        raise RefusedError(
            "other_trial", f"Checkpoint {uuid} belongs to another trial than {attempt.trial_id}."
        )


def _check_names(record: CheckpointStored) -> None:
    """Refuse what no training process of ours writes, and what nothing could be read from."""
    try:
        check_uuid(record.uuid)
        if "\0" in record.storage:
            raise ValueError("A storage must have no null character.")
        if "://" not in record.storage:
            Path(record.storage).expanduser()
    except (ValueError, RuntimeError) as error:
        raise RefusedError(
            "bad_record",
            f"The record of a checkpoint must name one that can exist: {error!s:.200}",
        ) from error


def _tell_of_other_storage(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], record: CheckpointStored
) -> None:
    """Note once per trial that checkpoints lie where the master does not touch them."""
    checkpoints = tables.checkpoints.c
    earlier = select(checkpoints.uuid).where(
        checkpoints.trial_id == attempt.trial_id, checkpoints.storage == record.storage
    )
    if transaction.connection.execute(earlier.limit(1)).first() is None:
        changes.note(
            transaction,
            attempt.trial_id,
            attempt.number,
            "WARNING",
            f"The script stores checkpoints in {record.storage}, not in the storage of the"
            " experiment: the master neither reads nor deletes them. Hint: name the storage in the"
            " config.",
        )


def take_checkpoint_deletion(
    connection: Connection, attempt: Row[Any], record: CheckpointDeleted | CheckpointFilesDeleted
) -> None:
    """Note which files an attempt has deleted of a checkpoint, if that is one of its trial."""
    checkpoints = tables.checkpoints.c
    query = select(checkpoints.trial_id).where(checkpoints.uuid == record.uuid)
    if connection.execute(query).scalar() == attempt.trial_id:
        left = {} if isinstance(record, CheckpointDeleted) else record.resources
        note_deleted_files(connection, record.uuid, left)
