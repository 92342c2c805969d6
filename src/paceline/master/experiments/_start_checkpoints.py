"""Checkpoints to start from."""

from collections.abc import Collection

from sqlalchemy import Connection, select

from paceline.master.experiments._checkpoint_files import is_checkpoint_gone, note_deleted_files
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import Transaction, tables
from paceline.messages.states import CheckpointState


def latest_checkpoint(
    connection: Connection, trial_id: int, being_deleted: Collection[str] = ()
) -> tuple[str, int] | None:
    """Return the UUID and step of a trial's newest checkpoint that is there and stays."""
    checkpoints = tables.checkpoints
    row = connection.execute(
        select(checkpoints.c.uuid, checkpoints.c.steps_completed)
        .where(
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.state == CheckpointState.COMPLETED.value,
            checkpoints.c.uuid.not_in(tuple(being_deleted)),
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
    connection = transaction.connection
    while (latest := latest_checkpoint(connection, trial_id, changes.being_deleted)) is not None:
        if not is_checkpoint_gone(connection, latest[0], changes.storage_calls):
            break
        note_deleted_files(connection, latest[0], {})
        changes.note(
            transaction,
            trial_id,
            number,
            "WARNING",
            f"The files of checkpoint {latest[0]} (step {latest[1]}) are gone; the trial goes"
            " on from an earlier one, or from the beginning without one.",
        )
    return latest


def check_checkpoint(connection: Connection, uuid: str, being_deleted: Collection[str]) -> None:
    """Check that a checkpoint is there and stays.

    Raises:
        RefusedError: It is unknown, was deleted, or is being deleted.
    """
    checkpoints = tables.checkpoints
    state = connection.execute(
        select(checkpoints.c.state).where(checkpoints.c.uuid == uuid)
    ).scalar()
    found = None
    if state is None:
        found = "is unknown"
    elif state == CheckpointState.DELETED.value:
        found = "was deleted"
    elif uuid in being_deleted:
        found = "is being deleted"
    if found is not None:
        raise RefusedError(
            "no_checkpoint",
            f"`searcher.source_checkpoint_uuid` must name a checkpoint, but {uuid!r} {found}.",
        )
