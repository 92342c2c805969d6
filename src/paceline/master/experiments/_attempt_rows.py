"""Rows of attempts, for whoever acts on one that its runner names."""

from typing import Any

from sqlalchemy import Connection, Row, select

from paceline.master.experiments._state_transitions import NotFoundError, RefusedError
from paceline.master.store import tables
from paceline.messages.states import LIVE_ATTEMPTS, AttemptState


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


def live_attempts(connection: Connection) -> list[Row[Any]]:
    """Return the attempts to look after; those of unmanaged experiments have no runner."""
    attempts, experiments = tables.attempts, tables.experiments
    # Asked of each attempt that is live: a join would begin with the experiments, which are many.
    is_unmanaged = (
        select(experiments.c.id)
        .where(experiments.c.id == attempts.c.experiment_id, experiments.c.external_id.is_not(None))
        .exists()
    )
    query = select(attempts).where(attempts.c.state.in_(LIVE_ATTEMPTS), ~is_unmanaged)
    return list(connection.execute(query.order_by(attempts.c.id)).all())


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
