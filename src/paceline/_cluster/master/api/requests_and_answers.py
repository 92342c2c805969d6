"""Helpers shared by several routes, and errors as application/problem+json."""

import asyncio
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
import sqlalchemy as sa
from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, ProgrammingError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from paceline._base.arguments_and_errors import wrong_value_text
from paceline._cluster.master.experiments.state_decisions import (
    NotFoundError,
    RefusedError,
    TransitionError,
)
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    EncodingCache,
    checkpoint_views,
    decode_cursor,
    encode_cursor,
)
from paceline._cluster.master.store.database import DatabaseUnavailableError, Transaction
from paceline._cluster.master.store.experiment_list import NameCache
from paceline._cluster.master.store.list_pages import Order
from paceline._cluster.master.store.reach import NotAllowedError
from paceline._cluster.master.store.row_ids_and_counts import KeyReusedError, once
from paceline._cluster.messages.experiment_models import Checkpoint, Page, Problem
from paceline.config._fields_and_problems import ConfigError
from paceline.search._search_method import SearchMethodError
from paceline.storage._checkpoint_errors import CheckpointError

# Answers of the API are data: a browser that shows one loads and runs nothing.
API_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = (
    (b"content-security-policy", API_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


def with_security_headers(
    headers: list[tuple[bytes, bytes]],
) -> list[tuple[bytes, bytes]]:
    """Return the headers plus the security headers; existing headers keep their values."""
    there = {name.lower() for name, _ in headers}
    return [*headers, *(header for header in _HEADERS if header[0] not in there)]


def sending_security_headers(send: Send) -> Send:
    """Return a `send` function adding the security headers to each response."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": with_security_headers(list(message["headers"]))}
        await send(message)

    return wrapped


_TITLES = {
    400: "Bad request",
    401: "Not signed in",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    422: "Invalid",
    429: "Too many requests",
    431: "Headers too large",
    500: "Internal error",
    503: "Not available",
    507: "No room",
}
_CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """Raised by a route to answer with a problem."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code


def problem(status: int, code: str, detail: str) -> Response:
    """Return a problem as a response."""
    body = Problem(title=_TITLES.get(status, "Error"), status=status, code=code, detail=detail)
    # Details quote the request, which may contain text that UTF-8 cannot hold: escaped, it always
    # can.
    content = json.dumps(body.model_dump())
    return Response(content, status_code=status, media_type="application/problem+json")


# Status and code of the answer to an error; its text is the detail.
_ANSWERS: dict[type[Exception], tuple[int, str]] = {
    NotFoundError: (404, "not_found"),
    TransitionError: (409, "wrong_state"),
    ConfigError: (422, "invalid_config"),
    SearchMethodError: (422, "search_method_failed"),
    CheckpointError: (409, "checkpoint_unusable"),
    DatabaseUnavailableError: (503, "database_unavailable"),
}
# The same with a text of its own; nobody reads that of a client that is gone.
_TOLD_ANSWERS: dict[type[Exception], tuple[int, str, str]] = {
    OverflowError: (422, "invalid_request", "Integers must fit into 64 bits, but one does not."),
    UnicodeEncodeError: (
        422, "invalid_request", "Text must be Unicode, but has a lone surrogate.",
    ),
    ClientDisconnect: (
        400, "client_gone", "The client went away before its request was complete.",
    ),
}  # fmt: skip


def install_problem_answers(app: FastAPI) -> None:
    """Install handlers for the errors raised by routes."""
    for kind, (status, code) in _ANSWERS.items():
        app.add_exception_handler(kind, partial(_answer, status, code))
    for kind, answer in _TOLD_ANSWERS.items():
        app.add_exception_handler(kind, partial(_tell, answer))

    @app.exception_handler(ApiError)
    async def _api_error(_request: Request, error: ApiError) -> Response:
        return problem(error.status, error.code, str(error))

    @app.exception_handler(NotAllowedError)
    async def _not_allowed(_request: Request, error: NotAllowedError) -> Response:
        status, code = (404, "not_found") if error.is_hidden else (403, "role_too_low")
        return problem(status, code, str(error))

    @app.exception_handler(RefusedError)
    async def _refused(_request: Request, error: RefusedError) -> Response:
        return problem(409, error.code, str(error))

    @app.exception_handler(RequestValidationError)
    async def _validation(_request: Request, error: RequestValidationError) -> Response:
        # First part of a place: path, query, header or body.
        found = "; ".join(
            f"`{'.'.join(map(str, entry['loc'][1:] or entry['loc']))}` {wrong_value_text(entry)}"
            for entry in error.errors()
        )
        return problem(422, "invalid_request", f"{found}.")

    @app.exception_handler(DatabaseError)
    async def _database(_request: Request, error: DatabaseError) -> Response:
        if isinstance(error, (DataError, IntegrityError, ProgrammingError)):
            # Statement errors are bugs of the caller, not an unavailable database.
            raise error
        return problem(503, "database_unavailable", f"The database cannot answer: {error.orig}.")

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: HTTPException) -> Response:
        code = getattr(error, "code", _CODES.get(error.status_code, "error"))
        return problem(error.status_code, code, str(error.detail))

    @app.exception_handler(Exception)
    async def _internal(_request: Request, error: Exception) -> Response:
        detail = f"The master failed ({type(error).__name__}); its log says more."
        return problem(500, "internal_error", detail)


async def _answer(status: int, code: str, _request: Request, error: Exception) -> Response:
    return problem(status, code, str(error))


async def _tell(answer: tuple[int, str, str], _request: Request, _error: Exception) -> Response:
    return problem(*answer)


class ReadableDatabase(Protocol):
    """Database with read access."""

    def read(self, *, everything: bool = False) -> AbstractContextManager[sa.Connection]:
        """Yield a connection with a consistent snapshot."""


class StoredRecords(Protocol):
    """Database and its in-memory caches, available in a second process as well."""

    @property
    def database(self) -> ReadableDatabase:
        """The database."""

    @property
    def encodings(self) -> EncodingCache:
        """Encoded rows."""

    @property
    def kept_names(self) -> NameCache:
        """Names of hyperparameters."""


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
    """Return the name of the parameter taking the `StoredRecords`, None if there is none."""
    for name, one in inspect.signature(endpoint).parameters.items():
        if one.annotation == RecordsOf:
            return name
    return None


async def write_rows(master: Master, job: Callable[[Transaction], Result]) -> Result:
    """Run a job in the writer thread and wait for its commit."""
    return await asyncio.wrap_future(master.database.write(job))


class KeyedRequest(NamedTuple):
    """Key that a client gave a request, within its route, and the digest of the body."""

    key: str
    digest: str


async def _request_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            max_length=100,
            description="A new random key; a request that is sent again with it, within a day,"
            " gets the experiment of the first one. Another request with it is refused.",
        ),
    ] = None,
) -> KeyedRequest | None:
    if idempotency_key is None:
        return None
    content = await request.body()
    # A body that is no JSON is refused later, where all bodies are checked.
    with suppress(msgspec.DecodeError, RecursionError):
        body = msgspec.json.decode(content)
        if isinstance(body, dict):
            # The commit of the code may change while the code, named by its digest, does not.
            body.pop("source", None)
        content = msgspec.json.encode(body, order="sorted")
    digest = hashlib.sha256(content).hexdigest()
    return KeyedRequest(f"{request.url.path} {idempotency_key}", digest)


RequestKey = Annotated[KeyedRequest | None, Depends(_request_key)]


async def write_once(
    master: Master, key: KeyedRequest | None, job: Callable[[Transaction], int]
) -> int:
    """Run a job like `write_rows`, but at most once for the same request key.

    Raises:
        ApiError: Another request had this key.
    """

    def keyed_job(transaction: Transaction) -> int:
        if key is None:
            return job(transaction)
        try:
            return once(transaction.connection, *key, lambda: job(transaction))
        except KeyReusedError as error:
            raise ApiError(409, "key_reused", str(error)) from error

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
    # Exact types: `True` is an `int` for isinstance.
    if [type(item) for item in decoded] != [type(item) for item in default]:
        raise ApiError(400, "invalid_cursor", f"`cursor` {cursor!r} belongs to another list.")
    return decoded


def place_in_rows(cursor: str | None, order: str, num_keys: int) -> list[Any] | None:
    """Return the place encoded in a list's cursor; None for the beginning of the list.

    Raises:
        ApiError: The cursor was made elsewhere.
    """
    if cursor is None:
        return None
    try:
        given, *keys = decode_cursor(cursor)
    except ValueError as error:
        raise ApiError(400, "invalid_cursor", str(error)) from error
    if given != order or len(keys) != num_keys or not all(map(_is_key, keys)):
        raise ApiError(400, "invalid_cursor", f"`cursor` {cursor!r} belongs to another list.")
    return keys


def _is_key(value: Any) -> bool:
    """Return whether the database can compare to a value."""
    if isinstance(value, str):
        return value.isascii() or value == value.encode(errors="replace").decode()
    return (
        value is None
        or type(value) is float
        or (type(value) is int and -_MAX_INTEGER <= value <= _MAX_INTEGER)
    )


def page_of_encoded(items: Sequence[bytes], next_cursor: str | None, total: int | None) -> Response:
    """Return the answer for a `Page` with already encoded items."""
    last = to_json({"next_cursor": next_cursor, "total": total}).removeprefix(b"{")
    return Response(b'{"items":[' + b",".join(items) + b"]," + last, media_type="application/json")


def utc_text(moment: float) -> str:
    """Return a time in seconds since the epoch as people read it."""
    return f"{datetime.fromtimestamp(moment, timezone.utc):%Y-%m-%d %H:%M} UTC"


def experiment_row(connection: sa.Connection, experiment_id: int) -> sa.Row[Any]:
    """Return an experiment's row or answer 404."""
    return StateChanges.experiment(connection, experiment_id)


def page_of_rows(
    rows: Sequence[Any], limit: int, item: Callable[[Any], Any], *position: str
) -> Page[Any]:
    """Return a page of rows, of which there is one more than `limit` if another page follows.

    Args:
        rows: The rows.
        limit: How many there are in the page.
        item: Makes an item of a row.
        position: The columns by which the next page finds its begin.
    """
    more = None
    if len(rows) > limit:
        more = encode_cursor(*(getattr(rows[limit - 1], name) for name in position))
    return Page(items=[item(row) for row in rows[:limit]], next_cursor=more)


def trial_row(connection: sa.Connection, trial_id: int) -> sa.Row[Any]:
    """Return a trial's row or answer 404."""
    return StateChanges.trial(connection, trial_id)


def checkpoint_row(connection: sa.Connection, uuid: str) -> sa.Row[Any]:
    """Return a checkpoint's row or answer 404."""
    query = sa.select(tables.checkpoints).where(tables.checkpoints.c.uuid == uuid)
    row = connection.execute(query).first()
    if row is None:
        raise ApiError(404, "not_found", f"There is no checkpoint {uuid!r}.")
    return row


def checkpoint_page(
    connection: sa.Connection,
    query: sa.Select[Any],
    order: Order,
    name: str,
    cursor: str | None,
    limit: int,
) -> Page[Checkpoint]:
    """Return a page of checkpoints; `name` identifies the order in the cursor."""
    after = place_in_rows(cursor, name, len(order.keys))
    rows = order.read(connection, query, after=after, limit=limit + 1)
    more = None
    if len(rows) > limit:
        last = rows[limit - 1]._mapping
        more = encode_cursor(name, *(last[str(key.key)] for key in order.keys))
    return Page(items=checkpoint_views(rows[:limit]), next_cursor=more)
