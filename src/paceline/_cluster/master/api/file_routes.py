"""Files and media of runs: received from reporters and runners, shown to readers."""

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Annotated, Any
from urllib.parse import quote

from fastapi import Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, Row

from paceline._base.run_directory import check_file_path
from paceline._cluster.master.api.access_guard import IdentityOf
from paceline._cluster.master.api.attempt_and_log_routes import (
    AttemptId,
    Member,
    RunId,
    may_name_directories,
)
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import (
    MAX_PAGE,
    ApiError,
    Cursor,
    Limit,
    MasterOf,
    RecordsOf,
    TrialId,
    page_of_rows,
    position_in_rows,
    trial_row,
    write_rows,
)
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.attempts import check_not_over, read_attempt
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.run_files import (
    LIMIT_REACHED,
    MAX_FILE_BYTES,
    FileTooLargeError,
    bytes_left,
    get_file,
    list_files,
    media_names,
    put_file,
    read_media,
)
from paceline._cluster.messages.experiment_models import Media, MediaName, Page, RunFile
from paceline._cluster.messages.runner_messages import runner_id

file_router = ApiRouter(tags=["files"], route_class=ReadingRoute)

_PIECE_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
# What a browser shows without running anything; all else is saved as a file.
_SHOWN = ("image/", "audio/", "video/", "text/plain", "application/json")
_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; media-src 'self'"
)

FilePath = Annotated[str, Path(min_length=1, max_length=1024)]
Digest = Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="SHA-256 in hex.")]
MediaType = Annotated[str, Query(pattern=r"^[\w.+-]+/[\w.+-]+$", max_length=100)]
IsKnown = Annotated[
    bool, Query(description="Without a body: 404 `content_wanted` if the content is not here.")
]
_BODY: dict[str, Any] = {"requestBody": {"content": {"application/octet-stream": {}}}}


@file_router.put("/runs/{run_id}/files/{path:path}", status_code=204, openapi_extra=_BODY)
async def store_run_file(
    run_id: RunId,
    path: FilePath,
    request: Request,
    master: MasterOf,
    identity: IdentityOf,
    digest: Digest,
    media_type: MediaType = "application/octet-stream",
    is_known: IsKnown = False,
) -> None:
    """Store a file of a run that was registered; an earlier one of its path is replaced."""
    is_trusted = may_name_directories(identity)

    def find(connection: Connection) -> Row[Any]:
        return master.unmanaged.reported_trial(connection, run_id, is_trusted=is_trusted)

    await _store(master, find, path, digest, media_type, None if is_known else request)


@file_router.put("/attempts/{attempt_id}/files/{path:path}", status_code=204, openapi_extra=_BODY)
async def store_attempt_file(
    attempt_id: AttemptId,
    path: FilePath,
    request: Request,
    master: MasterOf,
    digest: Digest,
    media_type: MediaType = "application/octet-stream",
    is_known: IsKnown = False,
    member: Member = 0,
) -> None:
    """Store a file of an attempt's trial; an earlier one of its path is replaced."""
    master.leases.renew(runner_id(attempt_id, member))

    def find(connection: Connection) -> Row[Any]:
        attempt = read_attempt(connection, attempt_id)
        check_not_over(attempt)
        return trial_row(connection, attempt.trial_id)

    await _store(master, find, path, digest, media_type, None if is_known else request)


async def _store(
    master: Master,
    find: Callable[[Connection], Row[Any]],
    path: str,
    digest: str,
    media_type: str,
    request: Request | None,
) -> None:
    """Take a file in; without a request, one whose content is here already."""
    try:
        check_file_path(path)
    except ValueError as error:
        raise ApiError(422, "invalid_path", str(error)) from error
    size: int | None
    if request is None:
        try:
            size = await asyncio.to_thread(master.files.keep, digest)
        except OSError as error:
            raise _not_stored(error, has_limit=False) from error
        if size is None:
            raise ApiError(404, "content_wanted", f"There is no content {digest} yet.")
    else:
        _, size = await receive_file(master, find, request, digest=digest, most=MAX_FILE_BYTES)
    await name_file(master, find, path, digest, size, media_type)


async def receive_file(
    master: Master,
    find: Callable[[Connection], Row[Any]],
    request: Request,
    *,
    digest: str | None = None,
    most: int | None = None,
) -> tuple[str, int]:
    """Store the body of a request as a content; return its digest and its number of bytes.

    Args:
        master: The master.
        find: Returns the trial, whose files together keep their limit.
        request: The request.
        digest: What the digest must be.
        most: The largest number of bytes.

    Raises:
        ApiError: It is too large, has another digest, or the disk is full.
    """
    trial_id, left = await asyncio.to_thread(_bytes_left, master, find)
    limit = left if most is None else min(left, most)
    try:
        return await master.files.receive(
            request.stream(), trial_id=trial_id, max_bytes=limit, digest=digest
        )
    except (OSError, ValueError) as error:
        raise _not_stored(error, has_limit=limit == left) from error


async def name_file(
    master: Master,
    find: Callable[[Connection], Row[Any]],
    path: str,
    digest: str,
    size: int,
    media_type: str,
) -> None:
    """Name a stored content as a file of a trial."""
    await write_rows(
        master,
        lambda transaction: put_file(
            transaction.connection, find(transaction.connection), path, digest, size, media_type
        ),
    )


def _not_stored(error: OSError | ValueError, *, has_limit: bool) -> ApiError:
    if isinstance(error, FileTooLargeError):
        hint = f" {LIMIT_REACHED}" if has_limit else ""
        return ApiError(413, "file_too_large", f"{error}{hint}")
    if isinstance(error, ValueError):
        return ApiError(422, "wrong_digest", str(error))
    return ApiError(507, "not_stored", f"The file cannot be stored ({error.strerror}).")


def _bytes_left(master: Master, find: Callable[[Connection], Row[Any]]) -> tuple[int, int]:
    """Return a trial's id, and how many bytes of files it may still have."""
    with master.database.read() as connection:
        trial_id = int(find(connection).id)
        return trial_id, bytes_left(connection, trial_id)


@file_router.get("/trials/{trial_id}/media-names")
def list_media_names(trial_id: TrialId, records: RecordsOf) -> list[MediaName]:
    """List group, name and kind of the media that a trial has reported."""
    with records.database.read() as connection:
        trial_row(connection, trial_id)
        found = media_names(connection, trial_id)
    return [MediaName(group=group, name=name, kind=kind) for group, name, kind in found]


@file_router.get("/trials/{trial_id}/media")
def list_media(
    trial_id: TrialId,
    records: RecordsOf,
    name: str,
    group: str = "training",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Media]:
    """List media of a name in step order; what a later attempt repeated is left out."""
    step, row_id = position_in_rows(cursor, [-1, -1])
    with records.database.read() as connection:
        trial_row(connection, trial_id)
        rows = read_media(connection, trial_id, group, name, after=(step, row_id), limit=limit + 1)
    item = partial(Media.model_validate, from_attributes=True)
    return page_of_rows(rows, limit, item, "steps_completed", "id")


@file_router.get("/trials/{trial_id}/files")
def list_trial_files(
    trial_id: TrialId,
    records: RecordsOf,
    prefix: str = "",
    limit: Limit = MAX_PAGE,
    cursor: Cursor = None,
) -> Page[RunFile]:
    """List the files of a trial in the order of their paths."""
    [after] = position_in_rows(cursor, [""])
    with records.database.read() as connection:
        trial_row(connection, trial_id)
        rows = list_files(connection, trial_id, prefix=prefix, after=after, limit=limit + 1)
    return page_of_rows(rows, limit, partial(RunFile.model_validate, from_attributes=True), "path")


@file_router.get(
    "/trials/{trial_id}/files/{path:path}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
def read_trial_file(
    trial_id: TrialId,
    path: FilePath,
    master: MasterOf,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Read a file of a trial; scripts in it reach nothing, wherever it is shown."""
    with master.database.read() as connection:
        trial_row(connection, trial_id)
        row = get_file(connection, trial_id, path)
    return send_file(master, path, row, etag=if_none_match)


def send_file(
    master: Master,
    path: str,
    row: Row[Any] | None,
    *,
    etag: str | None = None,
    span: str | None = None,
) -> Response:
    """Return a file as an answer.

    Args:
        master: The master.
        path: How the file was asked for.
        row: Its row.
        etag: What the client has already.
        span: A range of bytes, as in the header `Range`.

    Raises:
        ApiError: There is no such file, or its content is gone.
    """
    try:
        content = None if row is None else master.files.open(row.digest)
    except FileNotFoundError:
        content = None
    if row is None or content is None:
        raise ApiError(404, "not_found", f"There is no file {path!r:.1000}.")
    is_shown = row.media_type.startswith(_SHOWN) and "svg" not in row.media_type
    way = "inline" if is_shown else "attachment"
    name = quote(row.path.rsplit("/", 1)[-1])
    headers = {
        "accept-ranges": "bytes",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "content-disposition": f"{way}; filename*=utf-8''{name}",
        # Asked for again each time, as a file may be replaced.
        "cache-control": "private, no-cache",
        "etag": f'"{row.digest}"',
    }
    if etag == headers["etag"]:
        content.close()
        return Response(status_code=304, headers=headers)
    first, end, status = 0, row.size, 200
    asked = _RANGE.fullmatch(span or "")
    if asked is not None and int(asked[1]) < end:
        first, end, status = int(asked[1]), min(int(asked[2] or end) + 1, end), 206
        headers["content-range"] = f"bytes {first}-{end - 1}/{row.size}"
    headers["content-length"] = str(max(end - first, 0))
    pieces = _pieces(content, first, end)
    return StreamingResponse(pieces, status, headers, media_type=row.media_type)


def _pieces(content: IO[bytes], first: int, end: int) -> Iterator[bytes]:
    with content:
        content.seek(first)
        while piece := content.read(max(min(end - content.tell(), _PIECE_BYTES), 0)):
            yield piece
