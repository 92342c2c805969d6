"""Helpers that several routes share."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Path, Query, Request, Response
from pydantic_core import to_json
from sqlalchemy import Connection, Row, Select, select

from paceline.master._master import Master
from paceline.master._stored_records import StoredRecords
from paceline.master.api._problem_answers import ApiError
from paceline.master.experiments import StateChanges
from paceline.master.store import (
    Order,
    Place,
    Transaction,
    checkpoint_views,
    decode_cursor,
    encode_cursor,
    once,
    tables,
)
from paceline.messages.base import Page
from paceline.messages.checkpoints import Checkpoint

Result = TypeVar("Result")

MAX_PAGE = 1000
_MAX_INTEGER = 2**63 - 1


# Dependencies are coroutines: FastAPI gives plain functions a thread, which takes longer than they.
async def _master(request: Request) -> Master:
    master: Master = request.app.state.master
    return master


MasterOf = Annotated[Master, Depends(_master)]
# A GET route that takes this, and no master, may be answered by a second process.
RecordsOf = Annotated[StoredRecords, Depends(_master)]
TrialId = Annotated[int, Path(ge=1, le=2**62)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="At most so many items.")]
Cursor = Annotated[str | None, Query(description="`next_cursor` of the answer before.")]


@functools.cache
def records_parameter(endpoint: Callable[..., Any]) -> str | None:
    """Return which parameter of a route's function takes the `StoredRecords`, None if none does."""
    for name, one in inspect.signature(endpoint).parameters.items():
        if one.annotation == RecordsOf:
            return name
    return None


async def write_rows(master: Master, job: Callable[[Transaction], Result]) -> Result:
    """Run a job in the writer thread and wait for its commit."""
    return await asyncio.wrap_future(master.database.write(job))


async def _request_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=100,
            description="A new random key; a request that is sent again with it, within a day,"
            " gets the experiment of the first one.",
        ),
    ] = None,
) -> str | None:
    return None if idempotency_key is None else f"{request.url.path} {idempotency_key}"


RequestKey = Annotated[str | None, Depends(_request_key)]


async def write_once(master: Master, key: str | None, job: Callable[[Transaction], int]) -> int:
    """Run a job like `write_rows`, and not again for a request that had the same key."""

    def keyed_job(transaction: Transaction) -> int:
        if key is None:
            return job(transaction)
        return once(transaction.connection, key, lambda: job(transaction))

    return await write_rows(master, keyed_job)


def position_in_rows(cursor: str | None, default: list[Any]) -> list[Any]:
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


def place_in_rows(cursor: str | None, order: str, num_keys: int) -> Place | None:
    """Return the place in a list of some order that a cursor names; None is the beginning.

    A cursor of an earlier version says how many rows come before.

    Raises:
        ApiError: The cursor was made elsewhere.
    """
    if cursor is None:
        return None
    try:
        given, *keys = decode_cursor(cursor)
    except ValueError as error:
        raise ApiError(400, "invalid_cursor", str(error)) from error
    if type(given) is int and not keys and 0 <= given <= _MAX_INTEGER:
        return given
    if given != order or len(keys) != num_keys or not all(map(_is_key, keys)):
        raise ApiError(400, "invalid_cursor", f"`cursor` {cursor!r} belongs to another list.")
    return keys


def _is_key(value: Any) -> bool:
    """Tell whether the database can compare to a value."""
    if isinstance(value, str):
        return value.isascii() or value == value.encode(errors="replace").decode()
    return (
        value is None
        or type(value) is float
        or (type(value) is int and -_MAX_INTEGER <= value <= _MAX_INTEGER)
    )


def page_of_encoded(items: Sequence[bytes], next_cursor: str | None, total: int | None) -> Response:
    """Return the answer of a `Page` whose items are encoded already."""
    last = to_json({"next_cursor": next_cursor, "total": total}).removeprefix(b"{")
    return Response(b'{"items":[' + b",".join(items) + b"]," + last, media_type="application/json")


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


def checkpoint_page(
    connection: Connection,
    query: Select[Any],
    order: Order,
    name: str,
    cursor: str | None,
    limit: int,
) -> Page[Checkpoint]:
    """Return one page of checkpoints; `name` is that of the order, for the cursor."""
    after = place_in_rows(cursor, name, len(order.keys))
    rows = order.read(connection, query, after=after, limit=limit + 1)
    more = None
    if len(rows) > limit:
        last = rows[limit - 1]._mapping
        more = encode_cursor(name, *(last[str(key.key)] for key in order.keys))
    return Page(items=checkpoint_views(rows[:limit]), next_cursor=more)
