"""The state of an earlier run, for a new run to begin with."""

import logging
import os
from pathlib import Path
from typing import NamedTuple

from paceline import core
from paceline.journal import RunDirectory
from paceline.storage import CheckpointStorage, checkpoint_at

logger = logging.getLogger(__name__)

_FINISHED = (core.RunState.COMPLETED, core.RunState.RUNNING)


class EarlierState(NamedTuple):
    """A checkpoint, and the storage that holds it; None is the run's own."""

    uuid: str
    storage: CheckpointStorage | None = None


def state_at(place: str) -> EarlierState:
    """Return the state of a checkpoint of the run, or of one at a path or URL."""
    if "/" not in place:
        return EarlierState(place)
    storage, uuid = checkpoint_at(place)
    return EarlierState(uuid, storage)


def earlier_state(
    core_context: core.Context, resume: str | os.PathLike[str]
) -> EarlierState | None:
    """Return the newest state of an earlier run, the same on every rank.

    Args:
        core_context: The context of the new run.
        resume: "auto" for the newest run of the same name, unless it is completed; a run directory;
            or the URL of a checkpoint.

    Returns:
        None if there is no such run or it has no checkpoint.

    Raises:
        NotARunDirectoryError: The directory is none.
        CheckpointCorruptError: All its checkpoints are damaged.
    """
    if isinstance(resume, str) and "://" in resume:
        return state_at(resume)
    path, state = None, None
    if core_context.distributed.rank == 0:
        path = _newest(core_context) if resume == "auto" else Path(resume)
        if path is not None:
            storage, uuid = core.restorable_checkpoint(path)
            state = EarlierState(uuid, storage) if uuid is not None else None
    path, state = core_context.distributed.broadcast((path, state))
    if state is None:
        logger.info("There is no state of an earlier run to begin with.")
    else:
        logger.info("Beginning with the state of %s.", path)
    return state


def asked_state(
    core_context: core.Context,
    latest_checkpoint: str | None,
    resume: str | os.PathLike[str] | None,
) -> EarlierState | None:
    """Return the state that a user asks for; None for what the run goes on from by itself.

    Args:
        core_context: The context of the run.
        latest_checkpoint: A checkpoint of the run, or the path or URL of one.
        resume: See `earlier_state`; it is for a new run without a master.
    """
    if latest_checkpoint is not None:
        return state_at(latest_checkpoint)
    is_new = core_context.latest_checkpoint is None and core_context.info is None
    return earlier_state(core_context, resume) if resume is not None and is_new else None


def _newest(core_context: core.Context) -> Path | None:
    own = RunDirectory(core_context.run_dir).read_info()
    run = core.newest_run_named(core_context.run_dir.parent, own.name, before=own)
    if run is None or core.summarize_run(run.path).state in _FINISHED:
        return None
    return run.path
