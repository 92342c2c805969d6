"""Removing what killed processes have left of checkpoints."""

import logging
import time
from collections.abc import Mapping

from paceline.core._journal_history import read_checkpoints
from paceline.core._run_summaries import moved_storage
from paceline.journal import RunDirectory
from paceline.storage import CheckpointError, storage_from

logger = logging.getLogger(__name__)

# For how long a server may be at work on what a process had sent when it was killed.
_LANDING_S = 2.0


def discard_unfinished(run: RunDirectory) -> None:
    """Remove the checkpoints that a run's processes have begun and not committed or recorded.

    What is left of those that they have begun to delete is removed too. Only for whoever knows that
    all of these processes have ended.

    Args:
        run: The run directory of the processes.
    """
    begun = run.begun_checkpoints()
    recorded = {stored.uuid for stored in read_checkpoints(run)} if begun else set()
    # One that another process commits may be recorded in another run directory.
    parts = run.begun_checkpoints(is_part=True)
    if parts and run.read_info().storage_per_node:
        # The runner of this node sends them, and learns whether the chief has committed them.
        parts = {}
    # What a copied run directory has noted is the work of the original, in the original's storage.
    moved = moved_storage(run, run.read_info()) if parts or begun else {}
    unfinished = {uuid: moved.get(url, url) for uuid, url in {**parts, **begun}.items()}
    found = _discard(unfinished, {*begun} - recorded)
    left = {uuid: url for uuid, url in unfinished.items() if uuid in found and "://" in url}
    if left:
        time.sleep(_LANDING_S)
        found = (found - {*left}) | _discard(left, {*begun} - recorded)
    for uuid in found:
        run.forget_checkpoint(uuid)


def _discard(unfinished: Mapping[str, str], unrecorded: set[str]) -> set[str]:
    """Remove checkpoints that are not whole, and those that are but that no journal tells of.

    Args:
        unfinished: The URLs of their storages by UUID.
        unrecorded: The UUIDs of those that no process can know any more.

    Returns:
        The UUIDs of those that could be removed, or looked at.
    """
    done = set()
    for uuid, url in unfinished.items():
        try:
            storage = storage_from(url).in_a_hurry()
            storage.discard(uuid)
            if uuid in unrecorded and storage.exists(uuid):
                # The chief was killed between the commit and the record: no journal tells of it.
                storage.delete(uuid)
        except (OSError, ValueError, CheckpointError) as error:
            logger.warning("The unfinished checkpoint %s cannot be removed: %s", uuid, error)
            continue
        done.add(uuid)
    return done
