"""Files and media of runs: contents by digest below `files`, their rows, sizes of images."""

import asyncio
import hashlib
import io
import os
import re
import secrets
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import sqlalchemy as sa

from paceline._base.files import open_regular, sync_directory
from paceline._base.journal_records import MediaReported
from paceline._base.process_and_network import integer_setting
from paceline._base.run_directory import check_file_path
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.series_reader import is_visible, visible_series_limits

_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_FILE_BYTES = 1024 * 2**20
"""Largest file of a run: an artifact, a model."""
LIMIT_REACHED = "The files of the run have reached their limit, PACELINE_MAX_RUN_FILES_MIB."
_INCOMING = "incoming"
_CHUNK_BYTES = 1024 * 1024
_DEFAULT_TRIAL_MIB = 20 * 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Leftovers and contents without a row are kept for so long: a request may be about to name them.
_YOUNG_S = 24 * 3600.0


class FileTooLargeError(ValueError):
    """The content of a file has more bytes than allowed."""


class FileContents:
    """Contents of files by their SHA-256, each stored once: ``<root>/<2 digits>/<digest>``.

    Args:
        root: The directory, which is the master's alone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # Bytes received by trial and hour: contents that no row names are kept for a day.
        self._received = Counter[tuple[int, int]]()

    async def receive(
        self,
        chunks: AsyncIterator[bytes],
        *,
        trial_id: int,
        max_bytes: int,
        digest: str | None = None,
    ) -> tuple[str, int]:
        """Store a content for a trial as it arrives; return its digest and its number of bytes.

        Nothing is stored of one that is cut off.

        Raises:
            FileTooLargeError: It has more than `max_bytes`.
            ValueError: Its digest is not `digest`.
            OSError: The disk is full, for example.
        """
        found, size, kept = hashlib.sha256(), 0, None
        part, key = self._root / _INCOMING / secrets.token_hex(16), (trial_id, _hour())
        try:
            part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(part, _NEW, 0o600), "wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    self._received[key] += len(chunk)
                    if size > max_bytes:
                        raise FileTooLargeError(
                            f"A file must have at most {max_bytes:,} bytes, but this has more."
                        )
                    if self._num_received(trial_id) > _allowed_bytes():
                        raise FileTooLargeError(
                            f"A run must send at most {_allowed_bytes():,} bytes of files a day."
                        )
                    found.update(chunk)
                    file.write(chunk)
                file.flush()
                # Other requests must not wait for the disk.
                await asyncio.to_thread(os.fsync, file.fileno())
            kept = await asyncio.to_thread(self._keep, part, found.hexdigest(), digest)
            return kept, size
        except (OSError, FileTooLargeError):
            # A client that sends all before it reads would see a broken connection.
            async for _ in chunks:
                pass
            raise
        finally:
            if kept is None:
                self._received[key] -= size
            with suppress(OSError):
                part.unlink()

    def put(self, data: bytes) -> str:
        """Store a content and return its digest."""
        return self.copy(io.BytesIO(data))

    def copy(self, source: IO[bytes], digest: str | None = None) -> str:
        """Store the rest of a file and return its digest.

        Raises:
            ValueError: Its digest is not `digest`.
            OSError: The disk is full, for example.
        """
        part, found = self._new_part(), hashlib.sha256()
        try:
            with os.fdopen(os.open(part, _NEW, 0o600), "wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    found.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            return self._keep(part, found.hexdigest(), digest)
        finally:
            with suppress(OSError):
                part.unlink()

    def open(self, digest: str) -> IO[bytes]:
        """Return a content, opened.

        Raises:
            FileNotFoundError: There is none of this digest.
        """
        return open_regular(self._path(digest))

    def has(self, digest: str) -> bool:
        """Return whether a content is there."""
        return self._path(digest).is_file()

    def keep(self, digest: str) -> int | None:
        """Return the size of a content that is about to be named; None if it is not there."""
        path = self._path(digest)
        try:
            # Before it is looked at: a sweep must not take it.
            os.utime(path)
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def sweep(self, used: set[str]) -> int:
        """Delete contents that no row names, unless they are young; return the bytes freed."""
        freed, old = 0, time.time() - _YOUNG_S
        for key in [key for key in self._received if key[1] < old // 3600]:
            del self._received[key]
        for directory in [*self._root.iterdir()] if self._root.is_dir() else []:
            for path in directory.iterdir():
                with suppress(OSError):
                    facts = path.lstat()
                    if path.name not in used and facts.st_mtime < old:
                        path.unlink()
                        freed += facts.st_size
        return freed

    def _num_received(self, trial_id: int) -> int:
        """Return the bytes received for a trial for as long as unnamed contents are kept."""
        hours = range(_hour() - int(_YOUNG_S // 3600), _hour() + 1)
        return sum(self._received.get((trial_id, hour), 0) for hour in hours)

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise FileNotFoundError(f"No content has the digest {digest!r:.100}.")
        return self._root / digest[:2] / digest

    def _new_part(self) -> Path:
        incoming = self._root / _INCOMING
        incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        return incoming / secrets.token_hex(16)

    def _keep(self, part: Path, found: str, wanted: str | None) -> str:
        if wanted not in (None, found):
            raise ValueError(f"The digest of the file must be {wanted}, but is {found}.")
        path = self._path(found)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.is_file():
            # Used anew: a sweep must not take it.
            os.utime(path)
        else:
            part.replace(path)
            sync_directory(path.parent)
        return found


def put_file(
    connection: sa.Connection,
    trial: sa.Row[Any],
    path: str,
    digest: str,
    size: int,
    media_type: str,
) -> None:
    """Name a content as a file of a trial, in place of an earlier one of this path.

    Raises:
        ValueError: See `check_file_path`.
    """
    files = tables.run_files
    key = (files.c.trial_id == trial.id) & (files.c.path == check_file_path(path))
    connection.execute(sa.delete(files).where(key))
    connection.execute(
        sa.insert(files).values(
            trial_id=trial.id,
            path=path,
            experiment_id=trial.experiment_id,
            digest=digest,
            size=size,
            media_type=media_type,
            created_at=time.time(),
        )
    )


def bytes_left(connection: sa.Connection, trial_id: int) -> int:
    """Return how many bytes of files a trial may still have, by the setting of the environment."""
    files = tables.run_files.c
    query = sa.select(sa.func.coalesce(sa.func.sum(files.size), 0)).where(
        files.trial_id == trial_id
    )
    return max(0, _allowed_bytes() - int(connection.execute(query).scalar_one()))


def _allowed_bytes() -> int:
    return integer_setting("PACELINE_MAX_RUN_FILES_MIB", _DEFAULT_TRIAL_MIB) * 1024 * 1024


def _hour() -> int:
    return int(time.time() // 3600)


def get_file(connection: sa.Connection, trial_id: int, path: str) -> sa.Row[Any] | None:
    """Return the row of a trial's file, None if there is none."""
    files = tables.run_files
    return connection.execute(
        sa.select(files).where(files.c.trial_id == trial_id, files.c.path == path)
    ).first()


def list_files(
    connection: sa.Connection,
    trial_id: int,
    *,
    prefix: str = "",
    after: str = "",
    limit: int = 1000,
) -> list[sa.Row[Any]]:
    """Return rows of a trial's files in the order of their paths, those beyond `after`."""
    files = tables.run_files
    query = sa.select(files).where(files.c.trial_id == trial_id, files.c.path > after)
    if prefix:
        query = query.where(files.c.path >= prefix, files.c.path < prefix + "\U0010ffff")
    return list(connection.execute(query.order_by(files.c.path).limit(limit)))


def used_digests(connection: sa.Connection) -> set[str]:
    """Return the digests of all files."""
    return set(connection.execute(sa.select(tables.run_files.c.digest).distinct()).scalars())


def add_media(
    connection: sa.Connection, trial: sa.Row[Any], attempt: int, records: list[MediaReported]
) -> None:
    """Store media reports of an attempt."""
    rows = [
        {
            "trial_id": trial.id,
            "experiment_id": trial.experiment_id,
            "attempt": attempt,
            "group": record.group,
            "name": record.name,
            "kind": record.kind,
            "steps_completed": record.steps_completed,
            "time": record.time,
            "files": msgspec.to_builtins(record.files),
            "value": record.value,
        }
        for record in records
    ]
    if rows:
        connection.execute(sa.insert(tables.media), rows)


def read_media(
    connection: sa.Connection,
    trial_id: int,
    group: str,
    name: str,
    *,
    steps: list[int] | None = None,
    after: tuple[int, int] = (-1, -1),
    limit: int = 100,
) -> list[sa.Row[Any]]:
    """Return rows of the visible media of a name, by step; those beyond a step and an id.

    What a later attempt repeats is left out, as with metrics. With `steps`, only media of these.
    """
    media, limits = tables.media, visible_series_limits(connection, trial_id)
    step, row_id = after
    query = (
        sa.select(media)
        .where(
            media.c.trial_id == trial_id,
            sa.true() if steps is None else media.c.steps_completed.in_(steps),
            media.c.group == group,
            media.c.name == name,
            (media.c.steps_completed > step)
            | ((media.c.steps_completed == step) & (media.c.id > row_id)),
        )
        .order_by(media.c.steps_completed, media.c.id)
    )
    found: list[sa.Row[Any]] = []
    for row in connection.execute(query):
        if is_visible(limits, row.attempt, row.steps_completed):
            found.append(row)
        if len(found) == limit:
            break
    return found


def media_names(connection: sa.Connection, trial_id: int) -> list[tuple[str, str, str]]:
    """Return group, name and kind of the visible media of a trial, in order."""
    columns, limits = tables.media.c, visible_series_limits(connection, trial_id)
    named = (columns.group, columns.name, columns.kind, columns.attempt)
    query = sa.select(*named, sa.func.min(columns.steps_completed).label("first_step"))
    rows = connection.execute(query.where(columns.trial_id == trial_id).group_by(*named))
    shown = (row for row in rows if is_visible(limits, row.attempt, row.first_step))
    return sorted({(row.group, row.name, row.kind) for row in shown})


def media_steps(
    connection: sa.Connection, trial_id: int, group: str | None = None, name: str | None = None
) -> list[int]:
    """Return the steps at which a trial has visible media, in order; of a group and name alone."""
    columns, limits = tables.media.c, visible_series_limits(connection, trial_id)
    query = sa.select(columns.steps_completed, columns.attempt).where(columns.trial_id == trial_id)
    for column, wanted in ((columns.group, group), (columns.name, name)):
        query = query if wanted is None else query.where(column == wanted)
    rows = connection.execute(query.distinct())
    return sorted({step for step, attempt in rows if is_visible(limits, attempt, step)})


_HEAD_BYTES = 32
# Markers of JPEG's frames, which begin with the size.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MAX_SEGMENTS = 1000


def image_size(content: IO[bytes]) -> tuple[int, int] | None:
    """Return width and height of a PNG, GIF, WebP or JPEG in pixels, None for all else.

    The content is read from where it stands, and stands anywhere afterwards.
    """
    head = content.read(_HEAD_BYTES)
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", head, 16)
            return width, height
        if head.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", head, 6)
            return width, height
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp_size(head)
        if head.startswith(b"\xff\xd8"):
            content.seek(2 - len(head), 1)
            return _jpeg_size(content)
    except struct.error:
        pass
    return None


def _webp_size(head: bytes) -> tuple[int, int]:
    if head[12:16] == b"VP8X":
        return (
            1 + int.from_bytes(head[24:27], "little"),
            1 + int.from_bytes(head[27:30], "little"),
        )
    if head[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_size(content: IO[bytes]) -> tuple[int, int] | None:
    for _ in range(_MAX_SEGMENTS):
        mark, kind, length = struct.unpack(">BBH", content.read(4))
        if mark != 0xFF or length < 2:
            return None
        if kind in _FRAMES:
            height, width = struct.unpack(">xHH", content.read(5))
            return width, height
        content.seek(length - 2, 1)
    return None
