"""Deleting files of checkpoints, and what the database says of them then."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy import Connection, select, update

from paceline.master.experiments._storage_calls import StorageCalls
from paceline.master.store import tables
from paceline.messages.states import CheckpointState
from paceline.storage import (
    CheckpointError,
    CheckpointNotFoundError,
    DirectoryStorage,
    glob_selector,
    storage_from,
)

logger = logging.getLogger(__name__)


def delete_files(storage: str, uuid: str) -> bool:
    """Delete a checkpoint's files; False, with a logged line, if that fails."""
    try:
        storage_from(storage).in_a_hurry().delete(uuid)
    except CheckpointNotFoundError:
        return True  # deleted before
    except (OSError, ValueError, CheckpointError):
        logger.exception("The checkpoint %s in %s could not be deleted.", uuid, storage)
        return False
    return True


def delete_matching_files(storage: str, uuid: str, globs: Sequence[str]) -> dict[str, int] | None:
    """Delete the files that patterns match, and return the sizes of the others.

    Returns:
        What is left, empty if all files matched; None, with a logged line, if it failed.

    Raises:
        ValueError: A pattern is not valid.
    """
    selects = glob_selector(globs)
    try:
        place = storage_from(storage).in_a_hurry()
        if all(map(selects, place.manifest(uuid).files)):
            place.delete(uuid)
            return {}
        return place.delete_files(uuid, selects).resources
    except CheckpointNotFoundError:
        return {}
    except (OSError, CheckpointError, NotImplementedError):
        logger.exception("Files of checkpoint %s in %s could not be deleted.", uuid, storage)
        return None


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
        return any(root.iterdir()) and not DirectoryStorage(root).exists(uuid)

    try:
        return calls.ask(place, is_gone, default=False)
    except (OSError, CheckpointError):
        return False
