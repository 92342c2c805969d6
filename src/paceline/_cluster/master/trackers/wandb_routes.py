"""Routes that W&B's clients call: GraphQL, file streams, files."""

import asyncio
import logging
import zlib
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from fastapi import Request, Response

from paceline._cluster.master.api.access_guard import AccessIdentity, IdentityOf
from paceline._cluster.master.api.file_routes import name_file, receive_file, send_file
from paceline._cluster.master.api.requests_and_answers import (
    ApiError,
    MasterOf,
    trial_row,
    write_rows,
)
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.experiments.unmanaged_runs import run_attempts
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import NotAllowedError
from paceline._cluster.master.store.run_files import get_file
from paceline._cluster.master.trackers.wandb_artifacts import artifact_file
from paceline._cluster.master.trackers.wandb_graphql import Document, GraphqlError
from paceline._cluster.master.trackers.wandb_queries import mutation_fields, query_fields
from paceline._cluster.master.trackers.wandb_runs import Asked, checked_place, decode_id
from paceline._cluster.master.trackers.wandb_streams import StreamRequest, take_stream
from paceline._cluster.master.trackers.wandb_values import media_type_of
from paceline.config._fields_and_problems import ConfigError

logger = logging.getLogger(__name__)

wandb_router = ApiRouter(include_in_schema=False)

_MAX_UNPACKED = 64 * 1024 * 1024


@wandb_router.post("/graphql")
async def answer_graphql(request: Request, master: MasterOf, identity: IdentityOf) -> Response:
    """Answer a query or a mutation."""
    body = await _body(request)
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        # Not in the loop: the first one loads the parser, for which all other answers would wait.
        document = await asyncio.to_thread(
            Document, str(given.get("query")), given.get("operationName")
        )
        variables = given.get("variables") or {}
        asked = partial(_asked, request, master, identity)

        def mutate(writer: Transaction) -> dict[str, Any]:
            return document.answer(mutation_fields(asked(writer.connection, writer)), variables)

        def query() -> dict[str, Any]:
            with master.database.read() as connection:
                return document.answer(query_fields(asked(connection, None)), variables)

        if document.kind == "mutation":
            data = await write_rows(master, mutate)
        else:
            data = await asyncio.to_thread(query)
    except (GraphqlError, NotAllowedError, NotFoundError, RefusedError, ConfigError) as error:
        return _graphql_error(str(error))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A request of another shape: the client is told, and the log has the place.
        logger.warning("A W&B client's request cannot be answered.", exc_info=error)
        return _graphql_error(f"The request cannot be answered: {error!r:.300}.")
    return Response(msgspec.json.encode({"data": data}), media_type="application/json")


def _graphql_error(message: str) -> Response:
    content = msgspec.json.encode({"data": None, "errors": [{"message": message}]})
    return Response(content, media_type="application/json")


def _asked(
    request: Request,
    master: Master,
    identity: AccessIdentity | None,
    connection: sa.Connection,
    transaction: Transaction | None,
) -> Asked:
    return Asked(
        master=master,
        connection=connection,
        transaction=transaction,
        identity=identity,
        base_url=str(request.base_url).rstrip("/"),
    )


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
    except (ApiError, NotAllowedError, NotFoundError, RefusedError):
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

    def find(connection: sa.Connection) -> sa.Row[Any]:
        return trial_row(connection, trial_id)

    def note(transaction: Transaction, error: ApiError) -> None:
        number = run_attempts(transaction.connection, trial_id)[-1].number
        text = f"The file {path!r:.300} is left out. {error}"
        master.changes.note(transaction, trial_id, number, "WARNING", text)

    try:
        digest, size = await receive_file(master, find, request)
    except ApiError as error:
        if error.status == 413:
            # The client shows nothing of this answer, and would send all again after another.
            await write_rows(master, partial(note, error=error))
        raise
    await name_file(master, find, path, digest, size, media_type_of(path))
    return Response(status_code=200, headers={"ETag": f'"{digest}"'})


@wandb_router.get("/wandb-files/{trial_id}/{path:path}")
async def read_file(trial_id: int, path: str, request: Request, master: MasterOf) -> Response:
    """Return a file of a run; the guard has checked the signature of the URL."""

    def find() -> Any:
        with master.database.read() as connection:
            return get_file(connection, trial_id, path)

    row = await asyncio.to_thread(find)
    return send_file(master, path, row, span=request.headers.get("range"))


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

    row = await asyncio.to_thread(find)
    return send_file(master, path, row, span=request.headers.get("range"))


def _number_of(text: str) -> str | None:
    try:
        return decode_id(text, "Artifact")[0]
    except GraphqlError:
        return None
