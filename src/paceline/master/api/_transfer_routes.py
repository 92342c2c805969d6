"""Routes of checkpoints that travel between nodes and the master, in pieces."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from fastapi import Header, Path, Query, Request, Response

from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.experiments import RefusedError, in_own_thread
from paceline.master.nodes import OFFERS_AT_ONCE, PIECES_AT_ONCE
from paceline.messages.attempts import CheckpointOffer, PieceReply, ShardOffer, runner_id
from paceline.runner import is_shortage
from paceline.storage import CheckpointWriteError

Result = TypeVar("Result")

router = ApiRouter(tags=["attempts"], route_class=ReadingRoute)

AttemptId = Annotated[int, Path(ge=1, le=2**62)]
Uuid = Annotated[str, Path(pattern="^[0-9A-Za-z][0-9A-Za-z_-]{0,127}$")]
Name = Annotated[str, Query(min_length=1, max_length=4096, description="The file.")]
Member = Annotated[int, Query(ge=0, le=10_000, description="Which of the attempt's nodes, from 0.")]
Offset = Annotated[int, Query(ge=0, le=2**62)]

# For a place among the pieces that are in memory; then the runner is told to come again.
_LONGEST_WAIT_S = 10.0
# In which a piece, or a list of files, must have arrived.
_LONGEST_PIECE_S = 60.0
_LONGEST_OFFER_S = 300.0
_RENEWAL_S = 2.0


@router.post("/attempts/{attempt_id}/checkpoints/{uuid}", openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def offer_checkpoint(
    attempt_id: AttemptId, uuid: Uuid, request: Request, master: MasterOf
) -> Response:
    """Tell what is missing of a checkpoint; once nothing is, it is stored."""
    async with _offer_place(master):
        offer = await _decode(request, CheckpointOffer)
        needs = await _do_transfer(
            master, attempt_id, lambda: master.transfers.offer(attempt_id, uuid, offer), uuid
        )
    if needs.is_stored:
        await asyncio.to_thread(master.transfers.waiting.settle, attempt_id)
    return _json(needs)


@router.post("/attempts/{attempt_id}/checkpoints/{uuid}/shards", openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def offer_shards(
    attempt_id: AttemptId, uuid: Uuid, request: Request, master: MasterOf, member: Member
) -> Response:
    """Tell what is missing of the files that ranks of one more node have stored."""
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


@router.put("/attempts/{attempt_id}/checkpoints/{uuid}/pieces", openapi_extra={"requestBody": {
    "content": {"application/octet-stream": {}}}})  # fmt: skip
async def store_piece(
    attempt_id: AttemptId,
    uuid: Uuid,
    request: Request,
    master: MasterOf,
    name: Name,
    offset: Offset,
    digest: Annotated[str, Header(alias="x-paceline-digest", description="xxh3_128")],
    member: Member = 0,
) -> Response:
    """Append a piece to a file of a checkpoint that is being sent; tells the file's size then.

    A piece that does not begin at the present size changes nothing.
    """
    async with _piece_place(master):
        data = await _transfer_body(request, _LONGEST_PIECE_S)
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise ApiError(422, "damaged_piece", f"A piece of {name!r} was damaged on its way.")
        num_bytes = await _do_transfer(
            master,
            attempt_id,
            lambda: master.transfers.receive(attempt_id, uuid, name, offset, data, member),
            uuid,
            member,
        )
    return _json(PieceReply(num_bytes))


@router.delete("/attempts/{attempt_id}/checkpoints/{uuid}", status_code=204)
async def delete_sent_checkpoint(attempt_id: AttemptId, uuid: Uuid, master: MasterOf) -> None:
    """Delete a checkpoint of the attempt's trial; a second time changes nothing."""
    await _do_transfer(master, attempt_id, lambda: master.transfers.delete(attempt_id, uuid))


@router.get("/attempts/{attempt_id}/checkpoints/{uuid}")
async def read_checkpoint_files(attempt_id: AttemptId, uuid: Uuid, master: MasterOf) -> Response:
    """Read the manifest of a checkpoint that the attempt may start from."""
    async with _offer_place(master):
        files = await _do_transfer(
            master, attempt_id, lambda: master.transfers.read_files(attempt_id, uuid)
        )
        return _json(files)


@router.get("/attempts/{attempt_id}/checkpoints/{uuid}/pieces")
async def read_piece(
    attempt_id: AttemptId, uuid: Uuid, master: MasterOf, name: Name, offset: Offset
) -> Response:
    """Read a piece of a file of such a checkpoint, as large as pieces are; nothing is verified."""
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
    """Hold one of the places for what is in memory; its sender comes again if there is none."""
    try:
        await asyncio.wait_for(places.acquire(), _LONGEST_WAIT_S)
    except asyncio.TimeoutError as error:
        raise ApiError(
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
        raise ApiError(
            408, "too_slow", f"The body must arrive within {timeout_s:g} s, but did not."
        ) from error


async def _do_transfer(
    master: Master,
    attempt_id: int,
    job: Callable[[], Result],
    stored: str | None = None,
    member: int = 0,
) -> Result:
    """Do what may take long in a thread, with a lease that is kept meanwhile.

    `stored` is the checkpoint that it stores, or a part of.
    """
    # Not one of the few threads that answer other requests: the storage may hang.
    task = asyncio.wrap_future(in_own_thread(job))
    while not task.done():
        master.leases.renew(runner_id(attempt_id, member))
        await asyncio.wait({task}, timeout=_RENEWAL_S)
    try:
        result = task.result()
    except RefusedError:
        raise
    except BlockingIOError as error:
        raise ApiError(503, "busy", "Another request writes to the file.") from error
    except FileNotFoundError as error:
        raise ApiError(404, "not_found", f"There is no such file: {error.filename}.") from error
    except ValueError as error:
        raise ApiError(422, "invalid_checkpoint", str(error)) from error
    except OSError as error:
        # A full disk, and one that cannot be written to now: it is worth trying again.
        if not isinstance(error, CheckpointWriteError) and not is_shortage(error):
            raise
        why = os.strerror(error.errno) if error.errno else str(error)
        if stored is not None:
            await asyncio.to_thread(master.transfers.waiting.note, attempt_id, stored, why)
        detail = f"The checkpoint cannot be stored: {why}."
        raise ApiError(503, "storage_unavailable", detail) from error
    return result


async def _decode(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await _transfer_body(request, _LONGEST_OFFER_S), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(422, "invalid_request", str(error)) from error


def _json(message: Any) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
