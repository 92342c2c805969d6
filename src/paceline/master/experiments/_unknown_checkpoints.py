"""Removing checkpoints that ended attempts have stored, and of which no record has come."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Row, select

from paceline.master.experiments._checkpoint_files import storage_for_others
from paceline.master.store import Database, read_cluster_id, tables
from paceline.messages.states import AttemptState
from paceline.storage import CheckpointError, DirectoryStorage, Manifest, origin_of

logger = logging.getLogger(__name__)

# Clocks of file servers may be behind.
_SLACK_S = 3600.0
_LOOKED_UP_AT_ONCE = 500


class _NotOursError(Exception):
    """Raised for a checkpoint that stays."""


def remove_unknown_checkpoints(
    database: Database, experiment: Row[Any], place: str, since_s: float
) -> None:
    """Remove the checkpoints of an ended experiment that were stored when an attempt was killed.

    Their records can come no more. Touched are those alone whose manifest names an ended attempt of
    the experiment, in its storage, if that is a directory. Earlier ones may be of a time that the
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
        # That of somebody else, who may be deleting it now.
        logger.debug("The checkpoint %s in %s stays.", uuid, storage.url, exc_info=True)
        return
    logger.info("The checkpoint %s in %s is removed: nobody knows of it.", uuid, storage.url)


def _new_names(storage: DirectoryStorage, since_s: float) -> list[str]:
    """Return the directories that have changed since a time."""
    found = []
    with os.scandir(storage.root) as entries:
        for entry in entries:
            try:
                is_directory = entry.is_dir(follow_symlinks=False)
                changed_s = entry.stat(follow_symlinks=False).st_mtime
            except OSError:
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
