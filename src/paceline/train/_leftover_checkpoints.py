"""Removing what lost workers have left in a run's checkpoint storage."""

import logging
from collections.abc import Mapping

from paceline import core
from paceline.journal import RunDirectory
from paceline.storage import CheckpointStorage
from paceline.train._checkpoint import Checkpoint
from paceline.train._spec import checkpoint_uuid

logger = logging.getLogger(__name__)

# The saves of one rank that can lack parts of others when a group is lost; there are never so many.
_MOST_OPEN = 100


def remove_leftovers(
    run: RunDirectory, storage: CheckpointStorage, known: Mapping[str, Checkpoint]
) -> None:
    """Remove checkpoints that were not committed, or of which no journal tells.

    Only the run's own are touched, while no workers write them: others may use the storage too.

    Args:
        run: The run directory.
        storage: Where the run has its checkpoints.
        known: Those that exist, as far as they are known without reading all journals.
    """
    core.discard_unfinished(run)
    run_id = run.read_info().run_id
    generations = sorted({(key.attempt, key.generation) for key in run.journal_keys()})
    own: set[str] = set()
    unknown: list[str] = []
    for generation in generations:

        def name(number: int, generation: tuple[int, int] = generation) -> str:
            return checkpoint_uuid(run_id, *generation, number)

        numbers = [c.number for c in known.values() if c.uuid == name(c.number)]
        number = max(numbers, default=0) + 1
        # The earlier ones too: a deletion may have been begun.
        own.update(name(each) for each in range(1, number + _MOST_OPEN))
        while storage.exists(name(number)):
            unknown.append(name(number))
            number += 1
    storage.sweep(older_than_s=0, among=own)
    told = {stored.uuid for stored in core.read_checkpoints(run)} if unknown else ()
    for uuid in unknown:
        if uuid not in told:
            # The chief was killed between the commit and the record.
            logger.info("Deleting checkpoint %s, as no journal tells of it.", uuid)
            storage.delete(uuid)
