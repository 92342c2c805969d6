"""Checkpoints to start from."""

from sqlalchemy import Connection, select

from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import tables
from paceline.messages.states import CheckpointState


def latest_checkpoint(connection: Connection, trial_id: int) -> tuple[str, int] | None:
    """Return the UUID and step of a trial's newest checkpoint that is there."""
    checkpoints = tables.checkpoints
    row = connection.execute(
        select(checkpoints.c.uuid, checkpoints.c.steps_completed)
        .where(
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.state == CheckpointState.COMPLETED.value,
        )
        .order_by(
            checkpoints.c.steps_completed.desc(),
            checkpoints.c.attempt.desc(),
            checkpoints.c.created_at.desc(),
        )
        .limit(1)
    ).first()
    return None if row is None else (row.uuid, row.steps_completed)


def check_checkpoint(connection: Connection, uuid: str) -> None:
    """Check that a checkpoint is there.

    Raises:
        RefusedError: It is unknown, or was deleted.
    """
    checkpoints = tables.checkpoints
    state = connection.execute(
        select(checkpoints.c.state).where(checkpoints.c.uuid == uuid)
    ).scalar()
    if state in (None, CheckpointState.DELETED.value):
        found = "is unknown" if state is None else "was deleted"
        raise RefusedError(
            "no_checkpoint",
            f"`searcher.source_checkpoint_uuid` must name a checkpoint, but {uuid!r} {found}.",
        )
