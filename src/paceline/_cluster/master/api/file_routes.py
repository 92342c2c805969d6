"""Files and media of runs: received from reporters and runners, shown to readers."""

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Annotated, Any
from urllib.parse import quote

import sqlalchemy as sa
from fastapi import Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from paceline._base.run_directory import check_file_path
from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.access_guard import IdentityOf
from paceline._cluster.master.api.attempt_and_log_routes import (
    AttemptId,
    Member,
    RunId,
    may_name_directories,
)
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.attempts import check_not_over, read_attempt
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.run_files import (
    LIMIT_REACHED,
    MAX_FILE_BYTES,
    FileTooLargeError,
    bytes_left,
    get_file,
    image_size,
    list_files,
    media_names,
    media_steps,
    put_file,
    read_media,
)
from paceline._cluster.messages.experiment_models import Media, MediaName, Page, RunFile
from paceline._cluster.messages.runner_messages import runner_id

file_router = ApiRouter(tags=["files"], route_class=ReadingRoute)

_PIECE_BYTES = 256 * 1024
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
MaxPixels = Annotated[int | None, Query(ge=1, le=2**62)]
MediaSteps = Annotated[
    list[Annotated[int, Field(ge=0, le=2**62)]] | None,
    Query(max_length=500, description="Steps whose media are wanted; without one, all."),
]
_BODY: dict[str, Any] = {"requestBody": {"content": {"application/octet-stream": {}}}}


@file_router.put("/runs/{run_id}/files/{path:path}", status_code=204, openapi_extra=_BODY)
async def store_run_file(
    run_id: RunId,
    path: FilePath,
    request: Request,
    master: models.MasterOf,
    identity: IdentityOf,
    digest: Digest,
    media_type: MediaType = "application/octet-stream",
    is_known: IsKnown = False,
) -> None:
    """Store a file of a run that was registered; an earlier one of its path is replaced."""
    is_trusted = may_name_directories(identity)

    def find(connection: sa.Connection) -> sa.Row[Any]:
        return master.unmanaged.reported_trial(connection, run_id, is_trusted=is_trusted)

    await _store(master, find, path, digest, media_type, None if is_known else request)


@file_router.put("/attempts/{attempt_id}/files/{path:path}", status_code=204, openapi_extra=_BODY)
async def store_attempt_file(
    attempt_id: AttemptId,
    path: FilePath,
    request: Request,
    master: models.MasterOf,
    digest: Digest,
    media_type: MediaType = "application/octet-stream",
    is_known: IsKnown = False,
    member: Member = 0,
) -> None:
    """Store a file of an attempt's trial; an earlier one of its path is replaced."""
    master.leases.renew(runner_id(attempt_id, member))

    def find(connection: sa.Connection) -> sa.Row[Any]:
        attempt = read_attempt(connection, attempt_id)
        check_not_over(attempt)
        return models.trial_row(connection, attempt.trial_id)

    await _store(master, find, path, digest, media_type, None if is_known else request)


async def _store(
    master: Master,
    find: Callable[[sa.Connection], sa.Row[Any]],
    path: str,
    digest: str,
    media_type: str,
    request: Request | None,
) -> None:
    """Take a file in; without a request, one whose content is here already."""
    try:
        check_file_path(path)
    except ValueError as error:
        raise models.ApiError(422, "invalid_path", str(error)) from error
    size: int | None
    if request is None:
        try:
            size = await asyncio.to_thread(master.files.keep, digest)
        except OSError as error:
            raise _not_stored(error, has_limit=False) from error
        if size is None:
            raise models.ApiError(404, "content_wanted", f"There is no content {digest} yet.")
    else:
        _, size = await receive_file(master, find, request, digest=digest, most=MAX_FILE_BYTES)
    await name_file(master, find, path, digest, size, media_type)


async def receive_file(
    master: Master,
    find: Callable[[sa.Connection], sa.Row[Any]],
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
    find: Callable[[sa.Connection], sa.Row[Any]],
    path: str,
    digest: str,
    size: int,
    media_type: str,
) -> None:
    """Name a stored content as a file of a trial."""
    await models.write_rows(
        master,
        lambda transaction: put_file(
            transaction.connection, find(transaction.connection), path, digest, size, media_type
        ),
    )


def _not_stored(error: OSError | ValueError, *, has_limit: bool) -> models.ApiError:
    if isinstance(error, FileTooLargeError):
        hint = f" {LIMIT_REACHED}" if has_limit else ""
        return models.ApiError(413, "file_too_large", f"{error}{hint}")
    if isinstance(error, ValueError):
        return models.ApiError(422, "wrong_digest", str(error))
    return models.ApiError(507, "not_stored", f"The file cannot be stored ({error.strerror}).")


def _bytes_left(master: Master, find: Callable[[sa.Connection], sa.Row[Any]]) -> tuple[int, int]:
    """Return a trial's id, and how many bytes of files it may still have."""
    with master.database.read() as connection:
        trial_id = int(find(connection).id)
        return trial_id, bytes_left(connection, trial_id)


@file_router.get("/trials/{trial_id}/media-names")
def list_media_names(trial_id: models.TrialId, records: models.RecordsOf) -> list[MediaName]:
    """List group, name and kind of the media that a trial has reported."""
    with records.database.read() as connection:
        models.trial_row(connection, trial_id)
        found = media_names(connection, trial_id)
    return [MediaName(group=group, name=name, kind=kind) for group, name, kind in found]


@file_router.get("/trials/{trial_id}/media-steps")
def list_media_steps(
    trial_id: models.TrialId,
    records: models.RecordsOf,
    name: str | None = None,
    group: str | None = None,
) -> list[int]:
    """List the steps at which a trial has media, of one name and group or of all, in order."""
    with records.database.read() as connection:
        models.trial_row(connection, trial_id)
        return media_steps(connection, trial_id, group, name)


@file_router.get("/trials/{trial_id}/media")
def list_media(
    trial_id: models.TrialId,
    records: models.RecordsOf,
    name: str,
    group: str = "training",
    step: MediaSteps = None,
    limit: models.Limit = 100,
    cursor: models.Cursor = None,
) -> Page[Media]:
    """List media of a name in step order; what a later attempt repeated is left out."""
    last_step, row_id = models.position_in_rows(cursor, [-1, -1])
    after = (last_step, row_id)
    with records.database.read() as connection:
        models.trial_row(connection, trial_id)
        rows = read_media(
            connection, trial_id, group, name, steps=step, after=after, limit=limit + 1
        )
    item = partial(Media.model_validate, from_attributes=True)
    return models.page_of_rows(rows, limit, item, "steps_completed", "id")


@file_router.get("/trials/{trial_id}/files")
def list_trial_files(
    trial_id: models.TrialId,
    records: models.RecordsOf,
    prefix: str = "",
    limit: models.Limit = models.MAX_PAGE,
    cursor: models.Cursor = None,
) -> Page[RunFile]:
    """List the files of a trial in the order of their paths."""
    [after] = models.position_in_rows(cursor, [""])
    with records.database.read() as connection:
        models.trial_row(connection, trial_id)
        rows = list_files(connection, trial_id, prefix=prefix, after=after, limit=limit + 1)
    return models.page_of_rows(
        rows, limit, partial(RunFile.model_validate, from_attributes=True), "path"
    )


@file_router.get(
    "/trials/{trial_id}/files/{path:path}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
def read_trial_file(
    trial_id: models.TrialId,
    path: FilePath,
    master: models.MasterOf,
    if_none_match: Annotated[str | None, Header()] = None,
    byte_range: Annotated[str | None, Header(alias="range")] = None,
    if_range: Annotated[str | None, Header()] = None,
    max_pixels: MaxPixels = None,
) -> Response:
    """Read a file of a trial, or one range of its bytes.

    Scripts in it reach nothing, wherever it is shown. With `max_pixels`, an image of more pixels is
    refused with `too_many_pixels`.
    """
    with master.database.read() as connection:
        models.trial_row(connection, trial_id)
        row = get_file(connection, trial_id, path)
    return send_file(
        master,
        path,
        row,
        etag=if_none_match,
        span=byte_range,
        if_range=if_range,
        max_pixels=max_pixels,
    )


def send_file(
    master: Master,
    path: str,
    row: sa.Row[Any] | None,
    *,
    etag: str | None = None,
    span: str | None = None,
    if_range: str | None = None,
    max_pixels: int | None = None,
) -> Response:
    """Return a file as an answer.

    Args:
        master: The master.
        path: How the file was asked for.
        row: Its row.
        etag: What the client has already.
        span: A range of bytes, as in the header `Range`.
        if_range: The file that the range is of, as in the header `If-Range`.
        max_pixels: Refuse an image of more pixels.

    Raises:
        ApiError: There is no such file, its content is gone, or it has too many pixels.
    """
    try:
        content = None if row is None else master.files.open(row.digest)
    except FileNotFoundError:
        content = None
    if row is None or content is None:
        raise models.ApiError(404, "not_found", f"There is no file {path!r:.1000}.")
    size = None if max_pixels is None else image_size(content)
    if size is not None and max_pixels is not None and size[0] * size[1] > max_pixels:
        content.close()
        text = f"The image has {size[0]:,} x {size[1]:,} pixels."
        raise models.ApiError(413, "too_many_pixels", text)
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
    found = _range_of(span, row.size) if if_range in (None, headers["etag"]) else None
    first, last = found or (0, row.size - 1)
    headers["content-length"] = str(last + 1 - first)
    if found is not None:
        headers["content-range"] = f"bytes {first}-{last}/{row.size}"
    pieces, status = _pieces(content, first, last + 1 - first), 206 if found else 200
    return StreamingResponse(pieces, status, headers, media_type=row.media_type)


def _range_of(wanted: str | None, size: int) -> tuple[int, int] | None:
    """Return the first and last byte of a header `Range`; None for all that is not one range."""
    found = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", wanted or "")
    if found is None or found.group() == "bytes=-":
        return None
    first, last = found.groups()
    begin = int(first) if first else max(0, size - int(last))
    end = min(size - 1, int(last)) if first and last else size - 1
    return (begin, end) if begin <= end else None


def _pieces(content: IO[bytes], first: int, count: int) -> Iterator[bytes]:
    with content:
        content.seek(first)
        while count > 0 and (piece := content.read(min(count, _PIECE_BYTES))):
            count -= len(piece)
            yield piece
