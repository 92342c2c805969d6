"""Routes of checkpoints."""

import asyncio
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote

import msgspec
from fastapi import Path, Query, Response
from fastapi.responses import FileResponse, StreamingResponse
from sqlalchemy import select

from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, RecordsOf, checkpoint_row, write_rows
from paceline.master.experiments import (
    CheckpointPlace,
    RefusedError,
    StorageCalls,
    delete_files,
    delete_matching_files,
    in_own_thread,
    note_deleted_files,
    place_of_checkpoint,
)
from paceline.master.store import Transaction, checkpoint_views, tables
from paceline.messages.checkpoints import Checkpoint
from paceline.messages.states import LIVE_ATTEMPTS, LIVE_TRIALS, CheckpointState
from paceline.storage import DirectoryStorage, Manifest, problem_of_file

router = ApiRouter(tags=["checkpoints"], route_class=ReadingRoute)

_PIECE_BYTES = 1024 * 1024

Uuid = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("/checkpoints/{uuid}")
def read_checkpoint(uuid: Uuid, records: RecordsOf) -> Checkpoint:
    """Read one checkpoint."""
    with records.database.read() as connection:
        return checkpoint_views([checkpoint_row(connection, uuid)])[0]


@router.delete("/checkpoints/{uuid}")
async def delete_checkpoint(
    uuid: Uuid,
    master: MasterOf,
    glob: Annotated[
        list[str] | None,
        Query(description="Delete only the files that a pattern matches, as in a .gitignore."),
    ] = None,
) -> Checkpoint:
    """Delete a checkpoint's files, or those that patterns match; it stays listed."""
    view, place = await asyncio.to_thread(_read_with_place, uuid, master)
    await write_rows(master, lambda transaction: _withdraw_unused(transaction, master, uuid))
    calls = master.changes.storage_calls
    try:
        left = await asyncio.wrap_future(
            in_own_thread(lambda: _delete_checkpoint_files(calls, place, uuid, glob))
        )
        if left != view.resources:
            await write_rows(
                master, lambda transaction: note_deleted_files(transaction.connection, uuid, left)
            )
    finally:
        master.changes.being_deleted.discard(uuid)
    return await asyncio.to_thread(read_checkpoint, uuid, master)


def _read_with_place(uuid: str, master: Master) -> tuple[Checkpoint, CheckpointPlace]:
    with master.database.read() as connection:
        row = checkpoint_row(connection, uuid)
        place = place_of_checkpoint(connection, row, master.changes.default_storage)
        return checkpoint_views([row])[0], place


@router.get("/checkpoints/{uuid}/files/{path:path}", response_class=FileResponse)
async def read_checkpoint_file(uuid: Uuid, path: str, master: MasterOf) -> Response:
    """Read one file of a checkpoint."""
    return await asyncio.wrap_future(in_own_thread(lambda: _checkpoint_file(uuid, path, master)))


def _checkpoint_file(uuid: str, path: str, master: Master) -> Response:
    view, place = _read_with_place(uuid, master)
    if view.state is CheckpointState.DELETED:
        raise ApiError(409, "deleted", f"Checkpoint {uuid} was deleted.")
    with master.changes.storage_calls.noted(place.storage):
        storage = place.opened(uuid)
        manifest = storage.manifest(uuid)
    place.check(manifest)
    if path not in manifest.files:
        known = ", ".join(manifest.files)
        raise ApiError(404, "not_found", f"Checkpoint {uuid} has no file {path!r}, but: {known}.")
    # This file alone: whoever fetches all of them would have each one digested for every other.
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
        raise ApiError(409, "checkpoint_unusable", f"{name!r} of checkpoint {uuid} {reason}.")
    filename = path.rsplit("/", 1)[-1]
    headers = {
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=utf-8''{quote(filename)}",
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def _verified_pieces(
    storage: DirectoryStorage, manifest: Manifest, name: str
) -> tuple[Iterator[bytes], dict[str, str]]:
    """Open a file once, and return what is in it, or what is wrong with it."""
    try:
        file = storage.open_file(manifest.uuid, name)
    except (FileNotFoundError, NotADirectoryError):
        return iter(()), {name: "is missing"}
    reason = problem_of_file(file, manifest.files[name])
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
    """Delete files of a checkpoint, and return the sizes of those that are left."""
    try:
        if globs is not None:
            left = delete_matching_files(calls, place, uuid, globs)
        else:
            left = {} if delete_files(calls, place, uuid) else None
    except RefusedError:
        raise
    except ValueError as error:
        raise ApiError(422, "invalid_glob", f"`glob` must be a pattern, but: {error}") from error
    if left is None:
        raise ApiError(503, "not_deleted", f"The files of checkpoint {uuid} cannot be deleted.")
    return left


def _withdraw_unused(transaction: Transaction, master: Master, uuid: str) -> None:
    """Let no trial start from a checkpoint any more; 409 if one that has not ended does."""
    trials, attempts = tables.trials, tables.attempts
    warm = select(trials.c.id).where(
        trials.c.source_checkpoint == uuid, trials.c.state.in_(LIVE_TRIALS)
    )
    resumed = select(attempts.c.trial_id).where(
        attempts.c.resumed_from == uuid, attempts.c.state.in_(LIVE_ATTEMPTS)
    )
    user = transaction.connection.execute(warm.union(resumed).limit(1)).scalar()
    if user is not None:
        raise ApiError(
            409,
            "in_use",
            f"Checkpoint {uuid} must not be deleted while trial {user} starts from it. Hint: kill"
            " that trial first, or wait for its end.",
        )
    transaction.after_rollback(lambda: master.changes.being_deleted.discard(uuid))
    master.changes.being_deleted.add(uuid)
