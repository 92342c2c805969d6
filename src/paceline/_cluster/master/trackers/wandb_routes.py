"""Routes that W&B's clients call: GraphQL, file streams, files."""

import asyncio
import logging
import re
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, select

from paceline._cluster.master.api.access_guard import AccessIdentity, IdentityOf
from paceline._cluster.master.api.requests_and_answers import (
    ApiError,
    MasterOf,
    problem,
    write_rows,
)
from paceline._cluster.master.api.route_scopes import ApiRouter, RouteScope
from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.run_files import (
    FileTooLargeError,
    bytes_left,
    get_file,
    put_file,
)
from paceline._cluster.master.trackers.wandb_artifacts import artifact_file
from paceline._cluster.master.trackers.wandb_graphql import Document, GraphqlError
from paceline._cluster.master.trackers.wandb_history import media_type_of
from paceline._cluster.master.trackers.wandb_queries import mutation_fields, query_fields
from paceline._cluster.master.trackers.wandb_runs import (
    Asked,
    checked_place,
    decode_id,
)
from paceline._cluster.master.trackers.wandb_streams import StreamRequest, take_stream
from paceline.config._fields_and_problems import ConfigError

logger = logging.getLogger(__name__)

wandb_router = ApiRouter(include_in_schema=False)

_MAX_UNPACKED = 64 * 1024 * 1024
_MAX_FILE = 64 * 1024**3
_PIECE = 1024 * 1024
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
# Nothing that a client uploads may act on the master's origin.
_HEADERS = {"Content-Security-Policy": "sandbox; default-src 'none'", "Accept-Ranges": "bytes"}


@wandb_router.post("/graphql")
async def answer_graphql(request: Request, master: MasterOf, identity: IdentityOf) -> Response:
    """Answer a query or a mutation."""
    body = await _body(request)
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        document = Document(str(given.get("query")), given.get("operationName"))
        variables = given.get("variables") or {}
        asked = partial(_asked, request, master, identity)
        if document.kind == "mutation":
            data = await write_rows(
                master, lambda transaction: _mutate(asked, transaction, document, variables)
            )
        else:
            data = await asyncio.to_thread(_query, master, asked, document, variables)
    except (GraphqlError, NotFoundError, RefusedError, ConfigError) as error:
        return _graphql_error(200, str(error))
    except ApiError as error:
        return _graphql_error(error.status, str(error))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A request of another shape: the client is told, and the log has the place.
        logger.warning("A W&B client's request cannot be answered.", exc_info=error)
        return _graphql_error(200, f"The request cannot be answered: {error!r:.300}.")
    return Response(msgspec.json.encode({"data": data}), media_type="application/json")


def _graphql_error(status: int, message: str) -> Response:
    content = msgspec.json.encode({"data": None, "errors": [{"message": message}]})
    return Response(content, status_code=status, media_type="application/json")


def _asked(
    request: Request,
    master: Master,
    identity: AccessIdentity | None,
    connection: Connection,
    transaction: Transaction | None,
) -> Asked:
    return Asked(
        master=master,
        connection=connection,
        transaction=transaction,
        scope=RouteScope.READ if identity is None else identity.scope,
        user="" if identity is None else identity.user,
        base_url=str(request.base_url).rstrip("/"),
    )


def _query(
    master: Master, asked: Callable[..., Asked], document: Document, variables: Mapping[str, Any]
) -> dict[str, Any]:
    with master.database.read() as connection:
        return document.answer(query_fields(asked(connection, None)), variables)


def _mutate(
    asked: Callable[..., Asked],
    transaction: Transaction,
    document: Document,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    fields = mutation_fields(asked(transaction.connection, transaction))
    return document.answer(fields, variables)


@wandb_router.post("/files/{entity}/{project}/{run}/file_stream")
async def take_file_stream(
    entity: str, project: str, run: str, request: Request, master: MasterOf, identity: IdentityOf
) -> Response:
    """Store lines of a run's history, events and output, its summary and its end."""
    body = await _body(request)
    try:
        # Texts with lone surrogates are valid JSON to the client, so they are replaced here.
        stream = msgspec.json.decode(body.decode(errors="replace"), type=StreamRequest)
        place = checked_place(entity, project, run)

        def job(transaction: Transaction) -> None:
            take_stream(
                _asked(request, master, identity, transaction.connection, transaction),
                place,
                stream,
            )

        await write_rows(master, job)
    except (ApiError, NotFoundError, RefusedError):
        raise
    except OSError as error:
        # The client sends it again until there is room.
        raise ApiError(503, "disk_full", f"The output cannot be stored: {error}.") from error
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        # Sending them again would never end.
        raise ApiError(422, "invalid_records", f"The lines cannot be stored: {error}") from error
    return Response(b'{"exitcode":null,"limits":{}}', media_type="application/json")


async def _body(request: Request) -> bytes:
    """Return the body of a request, unpacked."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "gzip":
        raise ApiError(415, "unknown_encoding", f"A body must be packed by gzip, not {encoding!r}.")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = await asyncio.to_thread(unpacker.decompress, body, _MAX_UNPACKED)
    except zlib.error as error:
        raise ApiError(400, "invalid_gzip", f"The body cannot be unpacked: {error}.") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        text = f"A body must be complete, and have at most {_MAX_UNPACKED:,} bytes unpacked."
        raise ApiError(413, "body_too_large", text)
    return unpacked


@wandb_router.put("/wandb-files/{trial_id}/{path:path}")
async def store_file(trial_id: int, path: str, request: Request, master: MasterOf) -> Response:
    """Store a file of a run; the guard has checked the signature of the URL."""

    def find_limit() -> int:
        with master.database.read() as connection:
            return min(_MAX_FILE, bytes_left(connection, trial_id))

    limit = await asyncio.to_thread(find_limit)
    try:
        digest, size = await master.files.receive(_pieces(request), max_bytes=limit)
    except FileTooLargeError as error:
        return problem(413, "body_too_large", str(error))
    except OSError as error:
        return problem(503, "disk_full", f"The file cannot be stored: {error.strerror}.")

    def job(transaction: Transaction) -> None:
        trials = tables.trials
        trial = transaction.connection.execute(
            select(trials).where(trials.c.id == trial_id)
        ).first()
        if trial is None:
            raise NotFoundError(f"There is no run with the trial {trial_id}.")
        put_file(transaction.connection, trial, path, digest, size, media_type_of(path))

    await write_rows(master, job)
    return Response(status_code=200, headers={"ETag": f'"{digest}"'})


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        yield piece


@wandb_router.get("/wandb-files/{trial_id}/{path:path}")
async def read_file(trial_id: int, path: str, request: Request, master: MasterOf) -> Response:
    """Return a file of a run; the guard has checked the signature of the URL."""

    def find() -> Any:
        with master.database.read() as connection:
            return get_file(connection, trial_id, path)

    return _file_answer(master, request, await asyncio.to_thread(find))


@wandb_router.get("/artifactsV2/{path:path}")
async def read_artifact_file(
    path: str, request: Request, master: MasterOf, identity: IdentityOf
) -> Response:
    """Return a file of an artifact by the artifact and the file's MD5, as older clients ask."""
    parts = path.split("/")

    def find() -> Any:
        with master.database.read() as connection:
            asked = _asked(request, master, identity, connection, None)
            for index in range(1, len(parts) - 1):
                number = _number_of(parts[index])
                if number is not None:
                    return artifact_file(asked, number, parts[-2])
        return None

    return _file_answer(master, request, await asyncio.to_thread(find))


def _number_of(text: str) -> str | None:
    try:
        return decode_id(text, "Artifact")[0]
    except GraphqlError:
        return None


def _file_answer(master: Master, request: Request, row: Any) -> Response:
    if row is None:
        return problem(404, "not_found", "There is no such file.")
    try:
        file = master.files.open(row.digest)
    except OSError:
        return problem(404, "not_found", f"The content of {row.path!r} is gone.")
    first, last, status = 0, row.size - 1, 200
    headers = {**_HEADERS, "Content-Disposition": "attachment", "ETag": f'"{row.digest}"'}
    asked = _RANGE.fullmatch(request.headers.get("range", ""))
    if asked is not None and int(asked[1]) <= last:
        first, last = int(asked[1]), min(int(asked[2] or last), last)
        status = 206
        headers["Content-Range"] = f"bytes {first}-{last}/{row.size}"
    headers["Content-Length"] = str(max(last - first + 1, 0))

    def pieces() -> Any:
        with file:
            file.seek(first)
            left = last - first + 1
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                left -= len(piece)
                yield piece

    return StreamingResponse(pieces(), status, headers, media_type=row.media_type)
