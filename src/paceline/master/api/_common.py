"""Helpers that several routes share."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from sqlalchemy import Connection, Row, select

from paceline.master._master import Master
from paceline.master.api._problems import ApiError
from paceline.master.experiments import StateChanges
from paceline.master.store import Transaction, decode_cursor, tables

Result = TypeVar("Result")

MAX_PAGE = 1000


# Dependencies are coroutines: FastAPI gives plain functions a thread, which takes longer than they.
async def _master(request: Request) -> Master:
    master: Master = request.app.state.master
    return master


MasterOf = Annotated[Master, Depends(_master)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="At most so many items.")]
Cursor = Annotated[str | None, Query(description="`next_cursor` of the answer before.")]


async def write(master: Master, job: Callable[[Transaction], Result]) -> Result:
    """Run a job in the writer thread and wait for its commit."""
    return await asyncio.wrap_future(master.database.write(job))


def position(cursor: str | None, default: list[Any]) -> list[Any]:
    """Return the position in a cursor.

    Raises:
        ApiError: The cursor was made elsewhere.
    """
    if cursor is None:
        return default
    try:
        decoded = decode_cursor(cursor)
    except ValueError as error:
        raise ApiError(400, "invalid_cursor", str(error)) from error
    if [type(item) for item in decoded] != [type(item) for item in default]:
        raise ApiError(400, "invalid_cursor", f"`cursor` {cursor!r} belongs to another list.")
    return decoded


def experiment_row(connection: Connection, experiment_id: int) -> Row[Any]:
    """Return an experiment's row or answer 404."""
    return StateChanges.experiment(connection, experiment_id)


def trial_row(connection: Connection, trial_id: int) -> Row[Any]:
    """Return a trial's row or answer 404."""
    return StateChanges.trial(connection, trial_id)


def checkpoint_row(connection: Connection, uuid: str) -> Row[Any]:
    """Return a checkpoint's row or answer 404."""
    query = select(tables.checkpoints).where(tables.checkpoints.c.uuid == uuid)
    row = connection.execute(query).first()
    if row is None:
        raise ApiError(404, "not_found", f"There is no checkpoint {uuid!r}.")
    return row
