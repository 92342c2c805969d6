"""Rows of attempts, for whoever acts on one that its runner names."""

from typing import Any

from sqlalchemy import Connection, Row, select

from paceline.master.experiments._state_transitions import NotFoundError, RefusedError
from paceline.master.store import tables
from paceline.messages.states import AttemptState


def read_attempt(connection: Connection, attempt_id: int) -> Row[Any]:
    """Return an attempt's row.

    Raises:
        NotFoundError: There is none.
    """
    row = connection.execute(
        select(tables.attempts).where(tables.attempts.c.id == attempt_id)
    ).first()
    if row is None:
        raise NotFoundError(f"There is no attempt {attempt_id}.")
    return row


def check_not_over(attempt: Row[Any]) -> None:
    """Refuse what a runner sends for an attempt that has ended, and was maybe given away.

    Raises:
        RefusedError: It has ended.
    """
    if attempt.state == AttemptState.ENDED.value:
        raise RefusedError(
            "attempt_over",
            f"Attempt {attempt.id} has ended: its runner reports and starts nothing any more.",
        )
