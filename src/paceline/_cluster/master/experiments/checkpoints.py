"""Checkpoint files and their rows: access checks, ingest of records, deletion, start points."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, insert, select, update

from paceline._base.files import opened_directory
from paceline._base.journal_records import (
    CheckpointDeleted,
    CheckpointFilesDeleted,
    CheckpointStored,
)
from paceline._cluster.master.experiments.attempts import checkpoint_root
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import StorageCalls
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import REPORTED, config_of
from paceline._cluster.master.store.database import Database, Transaction, read_cluster_id
from paceline._cluster.master.store.metric_rows_and_times import metric_at
from paceline._cluster.master.store.reach import current_reach
from paceline._cluster.messages.states import AttemptState, CheckpointState
from paceline.storage._checkpoint_files import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    Manifest,
    glob_selector,
    origin_of,
)
from paceline.storage._checkpoint_storage import (
    CheckpointStorage,
    check_uuid,
    is_of_other_trial,
    storage_from,
)
from paceline.storage._directory_storage import DirectoryStorage

logger = logging.getLogger(__name__)


class CheckpointPlace(NamedTuple):
    """Storage named by a checkpoint record, with the storage and origin required for access.

    Attributes:
        storage: The storage that its record names.
        own: The storage of its experiment; None for a run without a master, which may use any.
        origin: The `origin` that its manifest must have; None if any will do, and none as well.
        run_dir: For a run without a master, its directory: in directories, the checkpoint must
            belong to the owner of the run.
    """

    storage: str
    own: str | None = None
    origin: str | None = None
    run_dir: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether the record names the storage of the experiment."""
        return self.own is None or is_same_storage(self.storage, self.own)

    def check(self, manifest: Manifest) -> None:
        """Refuse the checkpoint of another attempt, or of a run without a master.

        Raises:
            RefusedError: It is.
        """
        if self.origin is not None and manifest.origin != self.origin:
            raise RefusedError(
                "other_checkpoint",
                f"Checkpoint {manifest.uuid} in {self.storage} must be that of its record, but"
                f" {'another attempt' if manifest.origin else 'a run without a master'} has stored"
                " it.",
            )

    def opened(self, uuid: str) -> CheckpointStorage:
        """Return the storage.

        Files in directories belong to one user, whoever else can write there.

        Raises:
            RefusedError: It is not the storage of the experiment, or a directory or an object
                store that the run of another user need not own. A record alone could name any. Or
                no storage can be there.
            StorageNotInstalledError: No installed package offers its URL's scheme.
        """
        if not self.is_own:
            raise RefusedError(
                "other_storage",
                f"Checkpoint {uuid} must lie in the storage of its experiment, but lies in"
                f" {self.storage}, which the master leaves alone. Hint: read or delete its files"
                " there.",
            )
        try:
            storage = storage_for_others(self.storage)
        except CheckpointError:
            raise
        except ValueError as error:
            raise RefusedError(
                "checkpoint_unusable", f"Checkpoint {uuid} cannot be read: {error!s:.1000}"
            ) from error
        if self.run_dir is None:
            return storage
        if not isinstance(storage, DirectoryStorage) and self._is_far(self.run_dir):
            return storage
        owner = self._run_owner(self.run_dir, uuid)
        if owner == os.geteuid():
            return storage
        if not isinstance(storage, DirectoryStorage):
            raise RefusedError(
                "other_storage",
                f"The files of checkpoint {uuid} are in {self.storage}, which the master does not"
                " open with its own credentials for the run of another user. Hint: read or delete"
                " them with yours.",
            )
        # All files must be the owner's: links to files of others are refused.
        return DirectoryStorage(storage.root, has_one_owner=True, owner=owner)

    @staticmethod
    def _is_far(run_dir: str) -> bool:
        """Return whether a sender who may submit has sent a run from another machine."""
        # A run of this machine whose user has removed it, lay in a directory that is there.
        try:
            return not run_dir.startswith(REPORTED) and not Path(run_dir).parent.exists()
        except OSError:
            return False

    def _run_owner(self, run_dir: str, uuid: str) -> int:
        hint = f"Hint: read or delete its files in {self.storage}."
        if run_dir.startswith(REPORTED):
            raise RefusedError(
                "other_storage",
                f"The files of checkpoint {uuid} are not here: its run was reported with a token of"
                f" the scope `report`, for which the master opens no storage. {hint}",
            )
        try:
            with opened_directory(run_dir) as directory:
                return os.fstat(directory).st_uid
        except OSError as error:
            raise RefusedError(
                "other_storage",
                f"The master opens files of checkpoint {uuid} only if it sees the owner of its run,"
                f" but the run's directory {run_dir!r} cannot be opened ({error.strerror}). {hint}",
            ) from error


def storage_for_others(place: str) -> CheckpointStorage:
    """Return a storage for reading and deleting files possibly written by other users.

    Raises:
        ValueError: There is none at the place.
    """
    storage = storage_from(place)
    if isinstance(storage, DirectoryStorage):
        return DirectoryStorage(storage.root, has_one_owner=True)
    return storage.in_a_hurry()


def is_same_storage(place: str, other: str) -> bool:
    """Return whether two paths or URLs name the same storage."""
    try:
        return place == other or storage_from(place).url == storage_from(other).url
    except (ValueError, RuntimeError):  # such as `~` of nobody
        return False


def is_own_storage(
    connection: Connection, experiment_id: int, place: str, *, default_storage: str
) -> bool:
    """Return whether an experiment keeps its checkpoints in a storage; a run may use any."""
    experiments = tables.experiments
    query = select(experiments).where(experiments.c.id == experiment_id)
    experiment = connection.execute(query).first()
    if experiment is None or experiment.external_id is not None:
        return experiment is not None
    own = experiment_place(experiment, default_storage)
    return not own or is_same_storage(place, own)


def experiment_place(experiment: Row[Any], default_storage: str) -> str:
    """Return where the checkpoints of an experiment go."""
    return checkpoint_root(config_of(experiment)) or default_storage


def checkpoint_place(
    connection: Connection, row: Row[Any], default_storage: str
) -> CheckpointPlace:
    """Return where a checkpoint lies and must lie."""
    return checkpoint_places(connection, row.experiment_id, [row], default_storage)[row.uuid]


def checkpoint_places(
    connection: Connection, experiment_id: int, rows: Sequence[Row[Any]], default_storage: str
) -> dict[str, CheckpointPlace]:
    """Return where the checkpoints of an experiment lie and must lie, by their UUIDs."""
    experiments = tables.experiments
    query = select(experiments).where(experiments.c.id == experiment_id)
    experiment = connection.execute(query).one()
    if experiment.external_id is not None:
        run_dir = experiment.external_path or ""
        return {row.uuid: CheckpointPlace(row.storage, run_dir=run_dir) for row in rows}
    own = experiment_place(experiment, default_storage) or None
    cluster_id = read_cluster_id(connection)
    return {
        row.uuid: CheckpointPlace(
            row.storage, own, cluster_id and origin_of(cluster_id, row.trial_id, row.attempt)
        )
        for row in rows
    }


MODEL_VERSION = "mlflow.model-version"
"""Kind of the documents of versions of registered models."""
_CHECKPOINT_URI = "checkpoint:/"


def checkpoint_of_source(source: str) -> str | None:
    """Return the source checkpoint of a model's version, None for another source."""
    is_checkpoint = source.startswith(_CHECKPOINT_URI)
    return source.removeprefix(_CHECKPOINT_URI) if is_checkpoint else None


def registered_checkpoints(connection: Connection) -> dict[str, str]:
    """Return the checkpoints of registered models, each with a model and version that has it.

    Models that the sender of the request does not see have no name.
    """
    documents, reach = tables.documents.c, current_reach()
    location = documents.content["location"].as_string()
    columns = documents.parent, documents.name, documents.project_id
    query = select(location, *columns).where(
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


def note_deleted_files(connection: Connection, uuid: str, resources: Mapping[str, int]) -> None:
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
        update(checkpoints)
        .where(checkpoints.c.uuid == uuid, checkpoints.c.state != CheckpointState.DELETED.value)
        .values(**values)
    )


def is_checkpoint_gone(connection: Connection, uuid: str, calls: StorageCalls) -> bool:
    """Return whether the files of a checkpoint in a directory are gone.

    A directory with nothing in it may not be mounted, which says nothing; neither does
    one that does not answer.
    """
    checkpoints = tables.checkpoints
    query = select(checkpoints.c.storage).where(checkpoints.c.uuid == uuid)
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
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], record: CheckpointStored
) -> None:
    """Store a checkpoint of an attempt; an already stored checkpoint stays unchanged.

    Raises:
        RefusedError: No checkpoint of the attempt can have such a UUID, or lie there.
    """
    checkpoints, connection = tables.checkpoints, transaction.connection
    _check_names(record)
    check_owner(connection, attempt, record.uuid)
    known = select(checkpoints.c.uuid).where(checkpoints.c.uuid == record.uuid)
    # Records may come twice, and a known checkpoint may have been deleted since.
    if connection.execute(known).first() is not None:
        return
    experiment = changes.experiment(connection, attempt.experiment_id)
    config = config_of(experiment)
    metric = config.searcher.metric
    if config.deletes_while_running and experiment.retention_done:
        experiments = tables.experiments
        is_this = experiments.c.id == attempt.experiment_id
        connection.execute(update(experiments).where(is_this).values(retention_done=False))
        transaction.after_commit(changes.wakeups.wake)
    own = experiment_place(experiment, changes.default_storage)
    if experiment.external_id is None and own and not is_same_storage(record.storage, own):
        _warn_other_storage(changes, transaction, attempt, record)
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


def check_owner(connection: Connection, attempt: Row[Any], uuid: str) -> None:
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
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], record: CheckpointStored
) -> None:
    """Warn in the log, once per trial and storage, about checkpoints stored elsewhere."""
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
    """Store the deletion of checkpoint files by an attempt, for checkpoints of its own trial."""
    checkpoints = tables.checkpoints.c
    query = select(checkpoints.trial_id).where(checkpoints.uuid == record.uuid)
    if connection.execute(query).scalar() == attempt.trial_id:
        left = {} if isinstance(record, CheckpointDeleted) else record.resources
        note_deleted_files(connection, record.uuid, left)


def latest_checkpoint(
    connection: Connection, trial_id: int, being_deleted: Collection[str] = ()
) -> tuple[str, int] | None:
    """Return UUID and step of a trial's newest complete checkpoint not being deleted."""
    checkpoints = tables.checkpoints
    row = connection.execute(
        select(checkpoints.c.uuid, checkpoints.c.steps_completed)
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


def check_checkpoint(connection: Connection, uuid: str, being_deleted: Collection[str]) -> None:
    """Check a source checkpoint: known, not deleted, and not being deleted.

    Raises:
        RefusedError: It is unknown, was deleted, or is being deleted.
    """
    checkpoints = tables.checkpoints
    state = connection.execute(
        select(checkpoints.c.state).where(checkpoints.c.uuid == uuid)
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
    database: Database, experiment: Row[Any], place: str, since_s: float
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
            select(attempts.trial_id, attempts.number).where(
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
            query = select(checkpoints.uuid).where(checkpoints.uuid.in_(some))
            known = set(connection.execute(query).scalars())
        yield from (name for name in some if name not in known)
