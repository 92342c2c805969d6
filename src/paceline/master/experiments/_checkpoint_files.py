"""Files of checkpoints: which ones the master may touch, and what the database says of them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select, update

from paceline.master.experiments._attempt_launch import checkpoint_root
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.experiments._storage_calls import StorageCalls
from paceline.master.store import config_of, read_cluster_id, tables
from paceline.messages.states import CheckpointState
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorage,
    CheckpointVersionError,
    DirectoryStorage,
    Manifest,
    glob_selector,
    origin_of,
    storage_from,
)

logger = logging.getLogger(__name__)


class CheckpointPlace(NamedTuple):
    """Where a checkpoint lies, by the record that tells of it, and where it must.

    Attributes:
        storage: The storage that its record names.
        own: That of its experiment; None for a run without a master, which may use any.
        origin: The `origin` that its manifest must have; None if any will do, and none as well.
    """

    storage: str
    own: str | None = None
    origin: str | None = None

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

        Files in directories are those of one user, whoever else can write there.

        Raises:
            RefusedError: It is not the storage of the experiment. A record alone could name any.
        """
        if not self.is_own:
            raise RefusedError(
                "other_storage",
                f"Checkpoint {uuid} must lie in the storage of its experiment, but lies in"
                f" {self.storage}, which the master leaves alone. Hint: read or delete its files"
                " there.",
            )
        return storage_for_others(self.storage)


def storage_for_others(place: str) -> CheckpointStorage:
    """Return a storage to read and delete what other users may have written.

    Raises:
        ValueError: There is none at the place.
    """
    storage = storage_from(place)
    if isinstance(storage, DirectoryStorage):
        return DirectoryStorage(storage.root, has_one_owner=True)
    return storage.in_a_hurry()


def is_same_storage(place: str, other: str) -> bool:
    """Tell whether two paths or URLs name one storage."""
    try:
        return place == other or storage_from(place).url == storage_from(other).url
    except (ValueError, RuntimeError):  # such as `~` of nobody
        return False


def place_of_experiment(experiment: Row[Any], default_storage: str) -> str:
    """Return where the checkpoints of an experiment go."""
    return checkpoint_root(config_of(experiment)) or default_storage


def place_of_checkpoint(
    connection: Connection, row: Row[Any], default_storage: str
) -> CheckpointPlace:
    """Return where a checkpoint lies and must lie."""
    return places_of_checkpoints(connection, row.experiment_id, [row], default_storage)[row.uuid]


def places_of_checkpoints(
    connection: Connection, experiment_id: int, rows: Sequence[Row[Any]], default_storage: str
) -> dict[str, CheckpointPlace]:
    """Return where the checkpoints of an experiment lie and must lie, by their UUIDs."""
    experiments = tables.experiments
    query = select(experiments).where(experiments.c.id == experiment_id)
    experiment = connection.execute(query).one()
    if experiment.external_id is not None:
        return {row.uuid: CheckpointPlace(row.storage) for row in rows}
    own = place_of_experiment(experiment, default_storage) or None
    cluster_id = read_cluster_id(connection)
    return {
        row.uuid: CheckpointPlace(
            row.storage, own, cluster_id and origin_of(cluster_id, row.trial_id, row.attempt)
        )
        for row in rows
    }


def delete_files(calls: StorageCalls, place: CheckpointPlace, uuid: str) -> bool:
    """Delete a checkpoint's files; False, with a logged line, if that fails.

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
        return False
    return True


def delete_matching_files(
    calls: StorageCalls, place: CheckpointPlace, uuid: str, globs: Sequence[str]
) -> dict[str, int] | None:
    """Delete the files that patterns match, and return the sizes of the others.

    Returns:
        What is left, empty if all files matched; None, with a logged line, if it failed.

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
    """Delete no directory that cannot be seen to be a checkpoint.

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
    """Store which files of a checkpoint are left, if fewer than before."""
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
    """Tell whether the files of a checkpoint in a directory are gone.

    A directory with nothing in it may be one that is not mounted, which tells nothing; neither does
    one that does not answer.
    """
    checkpoints = tables.checkpoints
    query = select(checkpoints.c.storage).where(checkpoints.c.uuid == uuid)
    place = connection.execute(query).scalar()
    if place is None or "://" in place:
        return False
    root = Path(place)

    def is_gone() -> bool:
        return any(root.iterdir()) and not storage_for_others(place).exists(uuid)

    try:
        return calls.ask(place, is_gone, default=False)
    except (OSError, CheckpointError):
        return False
