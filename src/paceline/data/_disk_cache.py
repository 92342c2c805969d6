"""Pieces of remote files on the disk of this machine, within a number of bytes."""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from paceline._atomic_files import replacing_below
from paceline._regular_files import opened_directory

logger = logging.getLogger(__name__)

# So much is left of the limit when the oldest pieces are removed.
_SHARE_LEFT = 0.9


class DiskCache:
    """A directory of pieces that the processes of a machine share.

    The pieces that were used longest ago are removed.

    Args:
        directory: The directory.
        limit_bytes: How much it may hold.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._num_bytes: int | None = None
        self._has_warned = False

    def get(self, *key: object) -> bytes | None:
        """Return what was kept under a key, or None."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def put(self, data: bytes, *key: object) -> None:
        """Keep a piece, unless it is larger than the limit or the disk does not take it."""
        if len(data) > self._limit_bytes:
            return
        path = self._path(key)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._num_bytes is None:
                self._num_bytes = sum(size for _, size, _ in self._pieces())
            with (
                opened_directory(self._directory) as directory,
                replacing_below(directory, path.name) as file,
            ):
                file.write(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Pieces of files are not kept in %s: %s.", self._directory, error)
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._limit_bytes:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        # Other processes add and remove as well.
        pieces = sorted(self._pieces())
        total = sum(size for _, size, _ in pieces)
        for _, size, path in pieces:
            if total <= _SHARE_LEFT * self._limit_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size
        self._num_bytes = total

    def _pieces(self) -> list[tuple[int, int, Path]]:
        found = []
        for path in self._directory.iterdir():
            with suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        return found

    def _path(self, key: tuple[object, ...]) -> Path:
        text = "\0".join(map(str, key))
        return self._directory / hashlib.sha256(text.encode()).hexdigest()[:40]
