"""Removing what lost workers have left in a run's checkpoint storage."""

import logging
from collections.abc import Collection

from paceline import core
from paceline.journal import RunDirectory
from paceline.storage import CheckpointStorage
from paceline.train._spec import checkpoint_uuid

logger = logging.getLogger(__name__)


def remove_leftovers(run: RunDirectory, storage: CheckpointStorage, known: Collection[str]) -> None:
    """Remove checkpoints that were not committed, or of which no journal tells.

    Only a run's own storage is touched, while no workers write to it.

    Args:
        run: The run directory.
        storage: Where the run has its checkpoints.
        known: Those that exist, as far as they are known without reading all journals.
    """
    if storage.local_root is None or run.path not in storage.local_root.parents:
        return
    storage.sweep(older_than_s=0)
    unknown = [uuid for uuid in storage.list() if uuid not in known]
    if not unknown:
        return
    told = {stored.uuid for stored in core.read_checkpoints(run)}
    for uuid in unknown:
        if uuid not in told and _is_own(run, storage, uuid):
            # The chief was killed between the commit and the record.
            logger.info("Deleting checkpoint %s, as no journal tells of it.", uuid)
            storage.delete(uuid)


def _is_own(run: RunDirectory, storage: CheckpointStorage, uuid: str) -> bool:
    number = storage.manifest(uuid).metadata.get("number")
    run_id = run.read_info().run_id
    return any(
        uuid == checkpoint_uuid(run_id, key.attempt, key.generation, number)
        for key in run.journal_keys()
    )
