"""Checkpoints to start from."""

from sqlalchemy import Connection, select

from paceline.master.experiments._checkpoint_files import is_checkpoint_gone, note_deleted_files
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import Transaction, tables
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


def usable_checkpoint(
    changes: StateChanges, transaction: Transaction, trial_id: int, number: int
) -> tuple[str, int] | None:
    """Return a trial's newest checkpoint; those whose files are gone count as deleted.

    A power cut can take a checkpoint of which the database has heard, if it comes before the
    disk has it.
    """
    while (latest := latest_checkpoint(transaction.connection, trial_id)) is not None:
        if not is_checkpoint_gone(transaction.connection, latest[0]):
            break
        note_deleted_files(transaction.connection, latest[0], {})
        changes.note(
            transaction,
            trial_id,
            number,
            "WARNING",
            f"The files of checkpoint {latest[0]} (step {latest[1]}) are gone; the trial goes"
            " on from an earlier one, or from the beginning without one.",
        )
    return latest


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
