"""Routes of checkpoints."""

import asyncio
from typing import Annotated
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Path
from fastapi.responses import FileResponse, Response, StreamingResponse
from sqlalchemy import select, update

from paceline.master._master import Master
from paceline.master.api._common import MasterOf, checkpoint_row, write
from paceline.master.api._problems import ApiError
from paceline.master.experiments import delete_files
from paceline.master.store import Transaction, checkpoint_views, tables
from paceline.messages import resources
from paceline.messages.states import AttemptState, CheckpointState, TrialState
from paceline.storage import storage_from

router = APIRouter(tags=["checkpoints"])

_PIECE_BYTES = 1024 * 1024

Uuid = Annotated[str, Path(min_length=1, max_length=128)]


@router.get("/checkpoints/{uuid}")
def read_checkpoint(uuid: Uuid, master: MasterOf) -> resources.Checkpoint:
    """Read one checkpoint."""
    with master.database.read() as connection:
        return checkpoint_views([checkpoint_row(connection, uuid)])[0]


@router.delete("/checkpoints/{uuid}")
async def delete_checkpoint(uuid: Uuid, master: MasterOf) -> resources.Checkpoint:
    """Delete a checkpoint's files; it stays listed as deleted."""
    view = await asyncio.to_thread(read_checkpoint, uuid, master)
    await asyncio.to_thread(_check_unused, master, uuid)
    if not await asyncio.to_thread(delete_files, view.storage, uuid):
        raise ApiError(503, "not_deleted", f"The files of checkpoint {uuid} cannot be deleted.")

    def mark(transaction: Transaction) -> None:
        transaction.connection.execute(
            update(tables.checkpoints)
            .where(tables.checkpoints.c.uuid == uuid)
            .values(state=CheckpointState.DELETED.value)
        )

    await write(master, mark)
    return await asyncio.to_thread(read_checkpoint, uuid, master)


@router.get("/checkpoints/{uuid}/files/{path:path}", response_class=FileResponse)
def read_checkpoint_file(uuid: Uuid, path: str, master: MasterOf) -> Response:
    """Read one file of a checkpoint."""
    with master.database.read() as connection:
        row = checkpoint_row(connection, uuid)
    if row.state != CheckpointState.COMPLETED.value:
        raise ApiError(409, "deleted", f"Checkpoint {uuid} was deleted.")
    storage = storage_from(row.storage)
    manifest = storage.manifest(uuid)
    if path not in manifest.files:
        known = ", ".join(manifest.files)
        raise ApiError(404, "not_found", f"Checkpoint {uuid} has no file {path!r}, but: {known}.")
    # This file alone: whoever fetches all of them would have each one digested for every other.
    wanted = msgspec.structs.replace(manifest, files={path: manifest.files[path]})
    for name, reason in storage.problems(wanted).items():
        raise ApiError(409, "checkpoint_unusable", f"{name!r} of checkpoint {uuid} {reason}.")
    filename = path.rsplit("/", 1)[-1]
    if storage.local_root is not None:
        return FileResponse(storage.local_root / uuid / path, filename=filename)
    size = manifest.files[path].size
    pieces = (
        storage.read_file(uuid, path, offset, _PIECE_BYTES)
        for offset in range(0, size, _PIECE_BYTES)
    )
    headers = {
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=utf-8''{quote(filename)}",
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def _check_unused(master: Master, uuid: str) -> None:
    """Answer 409 while a trial that has not ended starts or goes on from a checkpoint."""
    trials, attempts = tables.trials, tables.attempts
    ended = [state.value for state in TrialState if state.is_terminal]
    with master.database.read() as connection:
        warm = select(trials.c.id).where(
            trials.c.source_checkpoint == uuid, trials.c.state.not_in(ended)
        )
        resumed = select(attempts.c.trial_id).where(
            attempts.c.resumed_from == uuid, attempts.c.state != AttemptState.ENDED.value
        )
        user = connection.execute(warm.union(resumed).limit(1)).scalar()
    if user is not None:
        raise ApiError(
            409,
            "in_use",
            f"Checkpoint {uuid} must not be deleted while trial {user} starts from it. Hint: kill"
            " that trial first, or wait for its end.",
        )
