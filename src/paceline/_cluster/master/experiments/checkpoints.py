"""Checkpoints of experiments: ingest of records, owners, deletion, start points."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from paceline._base.journal_records import (
    CheckpointDeleted,
    CheckpointFilesDeleted,
    CheckpointStored,
)
from paceline._cluster.master.experiments.checkpoint_places import (
    CheckpointPlace,
    experiment_place,
    is_same_storage,
    storage_for_others,
)
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import StorageCalls
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Database, Transaction, read_cluster_id
from paceline._cluster.master.store.metric_rows import metric_at
from paceline._cluster.master.store.reach import current_reach
from paceline._cluster.messages.states import AttemptState, CheckpointState
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointVersionError,
)
from paceline.storage._checkpoint_files import Manifest, glob_selector, origin_of
from paceline.storage._checkpoint_storage import check_uuid, is_of_other_trial
from paceline.storage._directory_storage import DirectoryStorage

logger = logging.getLogger(__name__)


MODEL_VERSION = "mlflow.model-version"
"""Kind of the documents of versions of registered models."""
_CHECKPOINT_URI = "checkpoint:/"


def checkpoint_of_source(source: str) -> str | None:
    """Return the source checkpoint of a model's version, None for another source."""
    is_checkpoint = source.startswith(_CHECKPOINT_URI)
    return source.removeprefix(_CHECKPOINT_URI) if is_checkpoint else None


def registered_checkpoints(connection: sa.Connection) -> dict[str, str]:
    """Return the checkpoints of registered models, each with a model and version that has it.

    Models that the sender of the request does not see have no name.
    """
    documents, reach = tables.documents.c, current_reach()
    location = documents.content["location"].as_string()
    columns = documents.parent, documents.name, documents.project_id
    query = sa.select(location, *columns).where(
        documents.kind == MODEL_VERSION, location.startswith(_CHECKPOINT_URI)
    )
    sees = None if reach is None else reach.sees
    return {
        place.removeprefix(_CHECKPOINT_URI): f"{name} (version {version})"
        if sees is None or project in sees
        else "of another project"
        for place, name, version, project in connection.execute(query)
    }


def delete_files(calls: StorageCalls, place: CheckpointPlace, uuid: str) -> bool:
    """Delete the files of a checkpoint; return False after logging an error.

    Raises:
        RefusedError: They are not the master's to delete.
    """
    try:
        with _refusing_damaged(uuid), calls.noted(place.storage):
            place.opened(uuid).delete_checked(uuid, place.check)
    except CheckpointNotFoundError:
        return True  # deleted before
    except RefusedError:
        raise
    except (OSError, ValueError, CheckpointError):
        logger.exception("The checkpoint %s in %s could not be deleted.", uuid, place.storage)
        calls.note_failure(place.storage)
        return False
    return True


def delete_matching_files(
    calls: StorageCalls, place: CheckpointPlace, uuid: str, globs: Sequence[str]
) -> dict[str, int] | None:
    """Delete the files matching the patterns, and return the sizes of the remaining files.

    Returns:
        The files left, empty if all matched; None, with a logged line, if it failed.

    Raises:
        RefusedError: They are not the master's to delete.
        ValueError: A pattern is not valid.
    """
    selects = glob_selector(globs)
    try:
        with _refusing_damaged(uuid), calls.noted(place.storage):
            storage = place.opened(uuid)
            manifest = storage.manifest(uuid)
            if all(map(selects, manifest.files)):
                storage.delete_checked(uuid, place.check)
                return {}
            place.check(manifest)
            return storage.delete_files(uuid, selects).resources
    except CheckpointNotFoundError:
        return {}
    except (OSError, CheckpointError, NotImplementedError):
        logger.exception("Files of checkpoint %s in %s could not be deleted.", uuid, place.storage)
        return None


@contextmanager
def _refusing_damaged(uuid: str) -> Iterator[None]:
    """Turn damage found by the body into a refusal: unrecognizable directories are not deleted.

    Raises:
        RefusedError: The body has found none of this version that is whole.
    """
    try:
        yield
    except (CheckpointCorruptError, CheckpointVersionError) as error:
        raise RefusedError(
            "checkpoint_unusable",
            f"Checkpoint {uuid} is not deleted, as it cannot be read: {error}"
            " Hint: remove its directory by hand.",
        ) from error


def note_deleted_files(connection: sa.Connection, uuid: str, resources: Mapping[str, int]) -> None:
    """Store the remaining files of a checkpoint; without any, its state becomes deleted."""
    checkpoints = tables.checkpoints
    if not resources:
        values: dict[str, object] = {"state": CheckpointState.DELETED.value}
    else:
        values = {
            "state": CheckpointState.PARTIALLY_DELETED.value,
            "resources": dict(resources),
            "size": sum(resources.values()),
        }
    connection.execute(
        sa.update(checkpoints)
        .where(checkpoints.c.uuid == uuid, checkpoints.c.state != CheckpointState.DELETED.value)
        .values(**values)
    )


def is_checkpoint_gone(connection: sa.Connection, uuid: str, calls: StorageCalls) -> bool:
    """Return whether the files of a checkpoint in a directory are gone.

    A directory with nothing in it may not be mounted, which says nothing; neither does
    one that does not answer.
    """
    checkpoints = tables.checkpoints
    query = sa.select(checkpoints.c.storage).where(checkpoints.c.uuid == uuid)
    place = connection.execute(query).scalar()
    if place is None or "://" in place:
        return False
    root = Path(place)

    def is_gone() -> bool:
        # An empty directory may be a file system that is not mounted.
        return any(root.iterdir()) and not storage_for_others(place).exists(uuid)

    try:
        return calls.ask(place, is_gone, default=False)
    except (OSError, CheckpointError):
        return False


def store_checkpoint(
    changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any], record: CheckpointStored
) -> None:
    """Store a checkpoint of an attempt; an already stored checkpoint stays unchanged.

    Raises:
        RefusedError: No checkpoint of the attempt can have such a UUID, or lie there.
    """
    checkpoints, connection = tables.checkpoints, transaction.connection
    _check_names(record)
    check_owner(connection, attempt, record.uuid)
    known = sa.select(checkpoints.c.uuid).where(checkpoints.c.uuid == record.uuid)
    # Records may come twice, and a known checkpoint may have been deleted since.
    if connection.execute(known).first() is not None:
        return
    experiment = changes.experiment(connection, attempt.experiment_id)
    config = config_of(experiment)
    metric = config.searcher.metric
    if config.deletes_while_running and experiment.retention_done:
        experiments = tables.experiments
        is_this = experiments.c.id == attempt.experiment_id
        connection.execute(sa.update(experiments).where(is_this).values(retention_done=False))
        transaction.after_commit(changes.wakeups.wake)
    own = experiment_place(experiment, changes.default_storage)
    if experiment.external_id is None and own and not is_same_storage(record.storage, own):
        _warn_other_storage(changes, transaction, attempt, record)
    step = record.steps_completed
    connection.execute(
        sa.insert(checkpoints).values(
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
    trial = changes.brief_trial(connection, attempt.trial_id)
    if step > trial.steps_completed:
        changes.update_trial(transaction, trial.id, steps_completed=step)
    transaction.emit(
        "checkpoint",
        attempt.experiment_id,
        attempt.trial_id,
        uuid=record.uuid,
        steps_completed=step,
    )


def check_owner(connection: sa.Connection, attempt: sa.Row[Any], uuid: str) -> None:
    """Refuse the UUID of another trial's checkpoint.

    A process that sees a new checkpoint in a storage could name it before its own trial does.

    Raises:
        RefusedError: It is one.
    """
    cluster_id = read_cluster_id(connection)
    if cluster_id is not None and is_of_other_trial(uuid, cluster_id, attempt.trial_id):
        raise RefusedError(
            "other_trial", f"Checkpoint {uuid} belongs to another trial than {attempt.trial_id}."
        )


def _check_names(record: CheckpointStored) -> None:
    """Refuse UUIDs and storages never written by a training process, or impossible to open."""
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


def _warn_other_storage(
    changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any], record: CheckpointStored
) -> None:
    """Warn in the log, once per trial and storage, about checkpoints stored elsewhere."""
    checkpoints = tables.checkpoints.c
    earlier = sa.select(checkpoints.uuid).where(
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
    connection: sa.Connection,
    attempt: sa.Row[Any],
    record: CheckpointDeleted | CheckpointFilesDeleted,
) -> None:
    """Store the deletion of checkpoint files by an attempt, for checkpoints of its own trial."""
    checkpoints = tables.checkpoints.c
    query = sa.select(checkpoints.trial_id).where(checkpoints.uuid == record.uuid)
    if connection.execute(query).scalar() == attempt.trial_id:
        left = {} if isinstance(record, CheckpointDeleted) else record.resources
        note_deleted_files(connection, record.uuid, left)


def latest_checkpoint(
    connection: sa.Connection, trial_id: int, being_deleted: Collection[str] = ()
) -> tuple[str, int] | None:
    """Return UUID and step of a trial's newest complete checkpoint not being deleted."""
    checkpoints = tables.checkpoints
    row = connection.execute(
        sa.select(checkpoints.c.uuid, checkpoints.c.steps_completed)
        .where(
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.state == CheckpointState.COMPLETED.value,
            checkpoints.c.uuid.not_in(tuple(being_deleted)),
        )
        .order_by(
            checkpoints.c.steps_completed.desc(),
            checkpoints.c.attempt.desc(),
            checkpoints.c.created_at.desc(),
        )
        .limit(1)
    ).first()
    return None if row is None else (row.uuid, row.steps_completed)


def usable_checkpoint(
    changes: StateChanges, transaction: Transaction, trial_id: int, number: int
) -> tuple[str, int] | None:
    """Return a trial's newest usable checkpoint; checkpoints without files become deleted.

    A power cut can take a checkpoint that the database knows already, if its files have not reached
    the disk.
    """
    connection = transaction.connection
    while (latest := latest_checkpoint(connection, trial_id, changes.being_deleted)) is not None:
        if not is_checkpoint_gone(connection, latest[0], changes.storage_calls):
            break
        note_deleted_files(connection, latest[0], {})
        changes.note(
            transaction,
            trial_id,
            number,
            "WARNING",
            f"The files of checkpoint {latest[0]} (step {latest[1]}) are gone; the trial goes"
            " on from an earlier one, or from the beginning without one.",
        )
    return latest


def check_checkpoint(connection: sa.Connection, uuid: str, being_deleted: Collection[str]) -> None:
    """Check a source checkpoint: known, not deleted, and not being deleted.

    Raises:
        RefusedError: It is unknown, was deleted, or is being deleted.
    """
    checkpoints = tables.checkpoints
    state = connection.execute(
        sa.select(checkpoints.c.state).where(checkpoints.c.uuid == uuid)
    ).scalar()
    found = None
    if state is None:
        found = "is unknown"
    elif state == CheckpointState.DELETED.value:
        found = "was deleted"
    elif uuid in being_deleted:
        found = "is being deleted"
    if found is not None:
        raise RefusedError(
            "no_checkpoint",
            f"`searcher.source_checkpoint_uuid` must name a checkpoint, but {uuid!r} {found}.",
        )


# Clocks of file servers may be behind.
_SLACK_S = 3600.0
_LOOKED_UP_AT_ONCE = 500


class _NotOursError(Exception):
    """Error raised to keep a checkpoint from being deleted."""


def remove_unknown_checkpoints(
    database: Database, experiment: sa.Row[Any], place: str, since_s: float
) -> None:
    """Remove unrecorded checkpoints of an ended experiment, stored while an attempt was killed.

    Their records can no longer come. Only checkpoints whose manifest names an ended attempt of the
    experiment are touched, and only in a directory. Earlier checkpoints may be from a time that the
    database has lost: `paceline home check` lists them.

    Args:
        database: The database.
        experiment: The experiment.
        place: Where its checkpoints go.
        since_s: Those that are older stay, in seconds since the epoch.

    Raises:
        OSError: The storage cannot be read.
        ValueError: There is none.
    """
    storage = storage_for_others(place) if place else None
    if not isinstance(storage, DirectoryStorage) or not storage.root.is_dir():
        return
    attempts = tables.attempts.c
    with database.read() as connection:
        cluster_id = read_cluster_id(connection)
        ended = connection.execute(
            sa.select(attempts.trial_id, attempts.number).where(
                attempts.experiment_id == experiment.id,
                attempts.state == AttemptState.ENDED.value,
            )
        ).all()
    if cluster_id is None:
        return
    origins = {origin_of(cluster_id, trial_id, number) for trial_id, number in ended}

    def check(manifest: Manifest) -> None:
        if manifest.origin not in origins or manifest.created < since_s:
            raise _NotOursError

    for uuid in _unknown(database, _new_names(storage, since_s)):
        _remove(storage, uuid, check)


def _remove(storage: DirectoryStorage, uuid: str, check: Callable[[Manifest], None]) -> None:
    try:
        storage.delete_checked(uuid, check)
    except _NotOursError:
        return
    except (OSError, ValueError, CheckpointError):
        # Foreign checkpoint, perhaps: another user may be deleting the directory at this moment.
        logger.debug("The checkpoint %s in %s stays.", uuid, storage.url, exc_info=True)
        return
    logger.info("The checkpoint %s in %s is removed: nobody knows of it.", uuid, storage.url)


def _new_names(storage: DirectoryStorage, since_s: float) -> list[str]:
    """Return the names of the directories changed since a time, with slack for slow clocks."""
    found = []
    with os.scandir(storage.root) as entries:
        for entry in entries:
            try:
                is_directory = entry.is_dir(follow_symlinks=False)
                changed_s = entry.stat(follow_symlinks=False).st_mtime
            except OSError:
                # Removed meanwhile.
                continue
            if is_directory and changed_s >= since_s - _SLACK_S:
                found.append(entry.name)
    return found


def _unknown(database: Database, names: Sequence[str]) -> Iterator[str]:
    checkpoints = tables.checkpoints.c
    for start in range(0, len(names), _LOOKED_UP_AT_ONCE):
        some = names[start : start + _LOOKED_UP_AT_ONCE]
        with database.read() as connection:
            query = sa.select(checkpoints.uuid).where(checkpoints.uuid.in_(some))
            known = set(connection.execute(query).scalars())
        yield from (name for name in some if name not in known)
