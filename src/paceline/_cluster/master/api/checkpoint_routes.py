"""Routes for checkpoint transfers in pieces, and routes of stored checkpoints."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
import xxhash
from fastapi import Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.checkpoint_places import CheckpointPlace, checkpoint_place
from paceline._cluster.master.experiments.checkpoints import (
    delete_files,
    delete_matching_files,
    note_deleted_files,
    registered_checkpoints,
)
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.storage_calls import StorageCalls, in_own_thread
from paceline._cluster.master.master import Master
from paceline._cluster.master.nodes.checkpoint_transfers import OFFERS_AT_ONCE, PIECES_AT_ONCE
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import checkpoint_views
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.messages.experiment_models import Checkpoint
from paceline._cluster.messages.master_models import Storage
from paceline._cluster.messages.runner_messages import (
    CheckpointOffer,
    PieceReply,
    ShardOffer,
    runner_id,
)
from paceline._cluster.messages.states import LIVE_ATTEMPTS, LIVE_TRIALS, CheckpointState
from paceline._cluster.runner.attempt_preparation import is_shortage
from paceline.storage._checkpoint_directory import file_problem
from paceline.storage._checkpoint_errors import CheckpointWriteError, first_names
from paceline.storage._checkpoint_files import Manifest
from paceline.storage._directory_storage import DirectoryStorage

checkpoint_router = ApiRouter(tags=["checkpoints"], route_class=ReadingRoute)

_PIECE_BYTES = 1024 * 1024

Uuid = Annotated[str, Path(min_length=1, max_length=128)]


@checkpoint_router.get("/checkpoints")
def find_checkpoints(
    records: models.RecordsOf,
    prefix: Annotated[
        str, Query(min_length=4, max_length=128, description="Beginning of their UUIDs.")
    ],
    limit: Annotated[int, Query(ge=1, le=100, description="At most so many.")] = 20,
) -> list[Checkpoint]:
    """Find checkpoints by the beginning of their UUIDs."""
    uuids = tables.checkpoints.c.uuid
    # A range uses the index, and takes `%` and `_` for themselves.
    query = sa.select(tables.checkpoints).where(uuids >= prefix, uuids < f"{prefix}\U0010ffff")
    with records.database.read() as connection:
        rows = connection.execute(query.order_by(uuids).limit(limit)).all()
        return checkpoint_views(list(rows))


@checkpoint_router.get("/storages")
def list_storages(master: models.MasterOf) -> list[Storage]:
    """List the storages in use by projects that the sender sees, those that fail first."""
    with master.database.read() as connection:
        return master.storage_health.read(connection)


@checkpoint_router.get("/checkpoints/{uuid}")
def read_checkpoint(uuid: Uuid, records: models.RecordsOf) -> Checkpoint:
    """Read a checkpoint."""
    with records.database.read() as connection:
        return checkpoint_views([models.checkpoint_row(connection, uuid)])[0]


@checkpoint_router.delete("/checkpoints/{uuid}")
async def delete_checkpoint(
    uuid: Uuid,
    master: models.MasterOf,
    glob: Annotated[
        list[str] | None,
        Query(description="Delete only the files that a pattern matches, as in a .gitignore."),
    ] = None,
) -> Checkpoint:
    """Delete a checkpoint's files, or those matching patterns; the checkpoint stays listed."""
    view, place = await asyncio.to_thread(_read_with_place, uuid, master)
    # First: no trial may choose the checkpoint from now on.
    await models.write_rows(master, lambda transaction: _withdraw_unused(transaction, master, uuid))
    calls = master.changes.storage_calls
    try:
        # A storage that hangs must not hold a thread of the API.
        left = await asyncio.wrap_future(
            in_own_thread(lambda: _delete_checkpoint_files(calls, place, uuid, glob))
        )
        if left != view.resources:
            await models.write_rows(
                master, lambda transaction: note_deleted_files(transaction.connection, uuid, left)
            )
    finally:
        master.changes.being_deleted.discard(uuid)
    return await asyncio.to_thread(read_checkpoint, uuid, master)


def _read_with_place(uuid: str, master: Master) -> tuple[Checkpoint, CheckpointPlace]:
    with master.database.read() as connection:
        row = models.checkpoint_row(connection, uuid)
        place = checkpoint_place(connection, row, master.changes.default_storage)
        return checkpoint_views([row])[0], place


@checkpoint_router.get("/checkpoints/{uuid}/files/{path:path}", response_class=FileResponse)
async def read_checkpoint_file(uuid: Uuid, path: str, master: models.MasterOf) -> Response:
    """Read a file of a checkpoint."""
    return await asyncio.wrap_future(in_own_thread(lambda: _checkpoint_file(uuid, path, master)))


def _checkpoint_file(uuid: str, path: str, master: Master) -> Response:
    view, place = _read_with_place(uuid, master)
    if view.state is CheckpointState.DELETED:
        raise models.ApiError(409, "deleted", f"Checkpoint {uuid} was deleted.")
    with master.changes.storage_calls.noted(place.storage):
        storage = place.opened(uuid)
        manifest = storage.manifest(uuid)
    place.check(manifest)
    if path not in manifest.files:
        known = first_names(manifest.files)
        raise models.ApiError(
            404, "not_found", f"Checkpoint {uuid} has no file {path!r:.1000}, but: {known}."
        )
    # Manifest reduced to a single file: verifying all files for each download would be quadratic.
    wanted = msgspec.structs.replace(manifest, files={path: manifest.files[path]})
    size = manifest.files[path].size
    if isinstance(storage, DirectoryStorage):
        with master.changes.storage_calls.watched(place.storage):
            pieces, problems = _verified_pieces(storage, wanted, path)
    else:
        problems = storage.problems(wanted)
        pieces = (
            storage.read_file(uuid, path, offset, _PIECE_BYTES)
            for offset in range(0, size, _PIECE_BYTES)
        )
    for name, reason in problems.items():
        raise models.ApiError(
            409, "checkpoint_unusable", f"{name!r} of checkpoint {uuid} {reason}."
        )
    filename = path.rsplit("/", 1)[-1]
    headers = {
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=utf-8''{quote(filename)}",
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def _verified_pieces(
    storage: DirectoryStorage, manifest: Manifest, name: str
) -> tuple[Iterator[bytes], dict[str, str]]:
    """Open a file once; return its content in pieces, or its problem."""
    try:
        file = storage.open_file(manifest.uuid, name)
    except (FileNotFoundError, NotADirectoryError):
        return iter(()), {name: "is missing"}
    # The check and the content use one descriptor: nobody can replace the file in between.
    reason = file_problem(file, manifest.files[name])
    if reason is not None:
        file.close()
        return iter(()), {name: reason}
    file.seek(0)

    def pieces() -> Iterator[bytes]:
        with file:
            yield from iter(lambda: file.read(_PIECE_BYTES), b"")

    return pieces(), {}


def _delete_checkpoint_files(
    calls: StorageCalls, place: CheckpointPlace, uuid: str, globs: list[str] | None
) -> dict[str, int]:
    """Delete files of a checkpoint; return the sizes of the remaining files."""
    try:
        if globs is not None:
            left = delete_matching_files(calls, place, uuid, globs)
        else:
            left = {} if delete_files(calls, place, uuid) else None
    except RefusedError:
        raise
    except ValueError as error:
        raise models.ApiError(
            422, "invalid_glob", f"`glob` must be a pattern, but: {error}"
        ) from error
    if left is None:
        raise models.ApiError(
            503, "not_deleted", f"The files of checkpoint {uuid} cannot be deleted."
        )
    return left


def _withdraw_unused(transaction: Transaction, master: Master, uuid: str) -> None:
    """Bar trials from starting from a checkpoint; 409 if an unfinished trial uses the files."""
    trials, attempts = tables.trials, tables.attempts
    warm = sa.select(trials.c.id).where(
        trials.c.source_checkpoint == uuid, trials.c.state.in_(LIVE_TRIALS)
    )
    resumed = sa.select(attempts.c.trial_id).where(
        attempts.c.resumed_from == uuid, attempts.c.state.in_(LIVE_ATTEMPTS)
    )
    user = transaction.connection.execute(warm.union(resumed).limit(1)).scalar()
    if user is not None:
        raise models.ApiError(
            409,
            "in_use",
            f"Checkpoint {uuid} must not be deleted while trial {user} starts from it. Hint: kill"
            " that trial first, or wait for its end.",
        )
    model = registered_checkpoints(transaction.connection).get(uuid)
    if model is not None:
        raise models.ApiError(
            409,
            "registered",
            f"Checkpoint {uuid} must not be deleted while the model {model} has it. Hint: delete"
            " that version first, by `paceline model delete`.",
        )
    transaction.after_rollback(lambda: master.changes.being_deleted.discard(uuid))
    master.changes.being_deleted.add(uuid)


Result = TypeVar("Result")

transfer_router = ApiRouter(tags=["attempts"], route_class=ReadingRoute)

AttemptId = Annotated[int, Path(ge=1, le=2**62)]
TransferUuid = Annotated[str, Path(pattern="^[0-9A-Za-z][0-9A-Za-z_-]{0,127}$")]
Name = Annotated[str, Query(min_length=1, max_length=4096, description="The file.")]
Member = Annotated[int, Query(ge=0, le=10_000, description="Which of the attempt's nodes, from 0.")]
Offset = Annotated[int, Query(ge=0, le=2**62)]

# Longest wait for a transfer place in memory; after that the runner must retry.
_LONGEST_WAIT_S = 10.0
# Deadlines for receiving a complete piece, and a complete list of files.
_LONGEST_PIECE_S = 60.0
_LONGEST_OFFER_S = 300.0
_RENEWAL_S = 2.0


@transfer_router.post(
    "/attempts/{attempt_id}/checkpoints/{uuid}", openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def offer_checkpoint(
    attempt_id: AttemptId, uuid: TransferUuid, request: Request, master: models.MasterOf
) -> Response:
    """Return the missing files of an offered checkpoint; a complete checkpoint is stored."""
    async with _offer_place(master):
        offer = await _decode(request, CheckpointOffer)
        needs = await _do_transfer(
            master, attempt_id, lambda: master.transfers.offer(attempt_id, uuid, offer), uuid
        )
    if needs.is_stored:
        await asyncio.to_thread(master.transfers.waiting.settle, attempt_id)
    return _json(needs)


@transfer_router.post(
    "/attempts/{attempt_id}/checkpoints/{uuid}/shards", openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def offer_shards(
    attempt_id: AttemptId,
    uuid: TransferUuid,
    request: Request,
    master: models.MasterOf,
    member: Member,
) -> Response:
    """Return the missing files of shards stored by the ranks of another node."""
    async with _offer_place(master):
        offer = await _decode(request, ShardOffer)
        needs = await _do_transfer(
            master,
            attempt_id,
            lambda: master.transfers.offer_shards(attempt_id, member, uuid, offer),
            uuid,
            member,
        )
    return _json(needs)


@transfer_router.put(
    "/attempts/{attempt_id}/checkpoints/{uuid}/pieces", openapi_extra={"requestBody": {
    "content": {"application/octet-stream": {}}}})  # fmt: skip
async def store_piece(
    attempt_id: AttemptId,
    uuid: TransferUuid,
    request: Request,
    master: models.MasterOf,
    name: Name,
    offset: Offset,
    digest: Annotated[str, Header(alias="x-paceline-digest", description="xxh3_128")],
    member: Member = 0,
) -> Response:
    """Append a piece to a file of an incoming checkpoint; returns the file's new size.

    A piece that does not begin at the present size changes nothing.
    """
    async with _piece_place(master):
        data = await _transfer_body(request, _LONGEST_PIECE_S)
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise models.ApiError(
                422, "damaged_piece", f"A piece of {name!r} was damaged on its way."
            )
        num_bytes = await _do_transfer(
            master,
            attempt_id,
            lambda: master.transfers.receive(attempt_id, uuid, name, offset, data, member),
            uuid,
            member,
        )
    return _json(PieceReply(num_bytes))


@transfer_router.delete("/attempts/{attempt_id}/checkpoints/{uuid}", status_code=204)
async def delete_sent_checkpoint(
    attempt_id: AttemptId, uuid: TransferUuid, master: models.MasterOf
) -> None:
    """Delete a checkpoint of the attempt's trial; a second time changes nothing."""
    await _do_transfer(master, attempt_id, lambda: master.transfers.delete(attempt_id, uuid))


@transfer_router.get("/attempts/{attempt_id}/checkpoints/{uuid}")
async def read_checkpoint_files(
    attempt_id: AttemptId, uuid: TransferUuid, master: models.MasterOf
) -> Response:
    """Read the manifest of a checkpoint the attempt may start from."""
    async with _offer_place(master):
        files = await _do_transfer(
            master, attempt_id, lambda: master.transfers.read_files(attempt_id, uuid)
        )
        return _json(files)


@transfer_router.get("/attempts/{attempt_id}/checkpoints/{uuid}/pieces")
async def read_piece(
    attempt_id: AttemptId, uuid: TransferUuid, master: models.MasterOf, name: Name, offset: Offset
) -> Response:
    """Read a full-size piece of a file of an allowed checkpoint, without verification."""
    async with _piece_place(master):
        data = await _do_transfer(
            master,
            attempt_id,
            lambda: master.transfers.read_piece(attempt_id, uuid, name, offset),
        )
    return Response(data, media_type="application/octet-stream")


def _piece_place(master: Master) -> AbstractAsyncContextManager[None]:
    return _transfer_place(master.transfers.pieces, PIECES_AT_ONCE, "pieces")


def _offer_place(master: Master) -> AbstractAsyncContextManager[None]:
    return _transfer_place(master.transfers.offers, OFFERS_AT_ONCE, "lists of files")


@asynccontextmanager
async def _transfer_place(places: asyncio.Semaphore, number: int, what: str) -> AsyncIterator[None]:
    """Hold a transfer place in memory; 503 if none is free in time, so the sender retries."""
    try:
        await asyncio.wait_for(places.acquire(), _LONGEST_WAIT_S)
    except asyncio.TimeoutError as error:
        raise models.ApiError(
            503,
            "busy",
            f"The master takes at most {number} {what} of checkpoints at a time, and none was done"
            f" within {_LONGEST_WAIT_S:g} s.",
        ) from error
    try:
        yield
    finally:
        places.release()


async def _transfer_body(request: Request, timeout_s: float) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), timeout_s)
    except asyncio.TimeoutError as error:
        raise models.ApiError(
            408, "too_slow", f"The body must arrive within {timeout_s:g} s, but did not."
        ) from error


async def _do_transfer(
    master: Master,
    attempt_id: int,
    job: Callable[[], Result],
    stored: str | None = None,
    member: int = 0,
) -> Result:
    """Run a long transfer job in its own thread, and keep the attempt's lease meanwhile.

    `stored` is the checkpoint being stored, in whole or in part.
    """
    # Thread of its own, not from the small pool of request threads: the storage may hang.
    task = asyncio.wrap_future(in_own_thread(job))
    while not task.done():
        master.leases.renew(runner_id(attempt_id, member))
        await asyncio.wait({task}, timeout=_RENEWAL_S)
    try:
        result = task.result()
    except RefusedError:
        raise
    except BlockingIOError as error:
        raise models.ApiError(503, "busy", "Another request writes to the file.") from error
    except FileNotFoundError as error:
        raise models.ApiError(
            404, "not_found", f"There is no such file: {error.filename}."
        ) from error
    except ValueError as error:
        raise models.ApiError(422, "invalid_checkpoint", str(error)) from error
    except OSError as error:
        # A full disk, and one that cannot be written to now: it is worth trying again.
        if not isinstance(error, CheckpointWriteError) and not is_shortage(error):
            raise
        why = os.strerror(error.errno) if error.errno else str(error)
        if stored is not None:
            await asyncio.to_thread(master.transfers.waiting.note, attempt_id, stored, why)
        detail = f"The checkpoint cannot be stored: {why}."
        raise models.ApiError(503, "storage_unavailable", detail) from error
    return result


async def _decode(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await _transfer_body(request, _LONGEST_OFFER_S), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise models.ApiError(422, "invalid_request", str(error)) from error


def _json(message: Any) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
