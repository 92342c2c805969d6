"""Routes of contexts: the packed code directories of experiments."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Request
from fastapi.responses import FileResponse

from paceline._atomic_files import replacing_atomically
from paceline._private_files import open_private
from paceline.journal import sync_directory
from paceline.master.api._access_guard import IdentityOf
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, write_rows
from paceline.master.store import note_context
from paceline.runner import ArchiveLimits, ArchiveTooLargeError, check_archive, is_shortage

router = ApiRouter(tags=["master"], route_class=ReadingRoute)

Digest = Annotated[str, PathParameter(pattern="^[0-9a-f]{64}$")]


@router.put("/contexts/{digest}", status_code=204)
async def store_context(digest: Digest, request: Request, master: MasterOf) -> None:
    """Store a packed context directory under the SHA-256 of its bytes."""
    path = master.home.contexts_path / f"{digest}.tar.gz"
    try:
        with replacing_atomically(path, mode=0o600) as part:
            if await _receive_context(request, part) != digest:
                message = "The body must have the SHA-256 named in the path."
                raise ApiError(422, "wrong_digest", message)
            await asyncio.to_thread(check_archive, part, ArchiveLimits.from_environment())
            # First, so that no file is there that the database does not know, whenever the master
            # dies.
            await write_rows(master, lambda transaction: note_context(transaction, digest))
        await asyncio.to_thread(sync_directory, path.parent)
    except ArchiveTooLargeError as error:
        raise ApiError(413, "context_too_large", str(error)) from error
    except OSError as error:
        if not is_shortage(error):
            raise
        detail = f"The code cannot be stored: {error.strerror}."
        raise ApiError(503, "storage_unavailable", detail) from error


async def _receive_context(request: Request, path: Path) -> str:
    """Write a body to a private file that is on disk then, and return its SHA-256."""
    digest = hashlib.sha256()
    with open_private(path, "wb") as file:
        async for piece in request.stream():
            digest.update(piece)
            await asyncio.to_thread(file.write, piece)
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    return digest.hexdigest()


@router.get("/contexts/{digest}", response_class=FileResponse)
def read_context(digest: Digest, master: MasterOf, identity: IdentityOf) -> FileResponse:
    """Read a packed context directory; an attempt reads its own only."""
    assert identity is not None
    attempt_id = identity.attempt_id
    if attempt_id is not None and not master.attempt_tokens.has_code(attempt_id, digest):
        raise ApiError(403, "scope_too_low", f"Attempt {attempt_id} runs other code than {digest}.")
    path = master.home.contexts_path / f"{digest}.tar.gz"
    if not path.is_file():
        raise ApiError(404, "not_found", f"There is no context {digest}.")
    return FileResponse(path, media_type="application/gzip")
