"""States of a run in the memory that its parent owns: found again by the next processes."""

import logging
import shutil

from paceline._base.run_memory import own_run_memory
from paceline.storage._checkpoint_files import CheckpointError
from paceline.storage._checkpoint_storage import check_uuid
from paceline.storage._directory_storage import DirectoryStorage

logger = logging.getLogger(__name__)


def memory_storage(run_id: str) -> DirectoryStorage | None:
    """Return the storage of a run's states in memory; None if no parent owns such memory."""
    try:
        path = own_run_memory()
    except OSError as error:
        logger.warning("No state is kept in memory: %s.", error)
        return None
    if path is None:
        return None
    owner = path.stat().st_uid
    return DirectoryStorage(path / check_uuid(run_id), has_one_owner=True, owner=owner)


def newest_in_memory(run_id: str, steps_completed: int) -> tuple[str | None, int]:
    """Return the newest whole state in memory, and its step; remove all others there.

    Args:
        run_id: The run; states of other runs are never looked at.
        steps_completed: The step of the newest checkpoint in the storage.

    Returns:
        None and `steps_completed` if none in memory is newer.
    """
    storage = memory_storage(run_id)
    newest, steps = None, steps_completed
    if storage is None or not storage.root.is_dir():
        return newest, steps
    for uuid in storage.list():
        try:
            found = storage.verify(uuid).metadata["steps_completed"]
        except (CheckpointError, OSError) as error:
            logger.warning("Passing over a state in memory: %s", error)
            continue
        if found > steps:
            newest, steps = uuid, found
    for path in storage.root.iterdir():
        if path.name != newest:
            # What a killed process has left takes the room of the next state.
            shutil.rmtree(path, ignore_errors=True)
    return newest, steps
