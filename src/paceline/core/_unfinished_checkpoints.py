"""Removing what killed processes have left of checkpoints."""

import logging

from paceline.journal import RunDirectory
from paceline.storage import CheckpointError, storage_from

logger = logging.getLogger(__name__)


def discard_unfinished(run: RunDirectory) -> None:
    """Remove the checkpoints that a run's processes have begun and not committed.

    Only for whoever knows that all of these processes have ended.

    Args:
        run: The run directory of the processes.
    """
    for uuid, storage in run.begun_checkpoints().items():
        try:
            storage_from(storage).discard(uuid)
        except (OSError, ValueError, CheckpointError) as error:
            logger.warning("The unfinished checkpoint %s cannot be removed: %s", uuid, error)
            continue
        run.forget_checkpoint(uuid)
