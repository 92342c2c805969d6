"""Pieces of remote files on the disk of this machine, within a number of bytes."""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from paceline._atomic_files import replacing_below
from paceline._regular_files import open_regular_below, opened_directory, read_limited

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
        try:
            with (
                opened_directory(self._directory) as directory,
                open_regular_below(directory, _name(key)) as file,
            ):
                data = read_limited(file, self._limit_bytes)
                os.utime(file.fileno())
        except OSError:
            return None
        return data

    def put(self, data: bytes, *key: object) -> None:
        """Keep a piece, unless it is larger than the limit or the disk does not take it."""
        if len(data) > self._limit_bytes:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with opened_directory(self._directory) as directory:
                if self._num_bytes is None:
                    self._num_bytes = sum(size for _, size, _ in _pieces(directory))
                with replacing_below(directory, _name(key)) as file:
                    file.write(data)
                self._num_bytes += len(data)
                if self._num_bytes > self._limit_bytes:
                    self._remove_oldest(directory)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Pieces of files are not kept in %s: %s.", self._directory, error)

    def _remove_oldest(self, directory: int) -> None:
        # Other processes add and remove as well.
        pieces = sorted(_pieces(directory))
        total = sum(size for _, size, _ in pieces)
        for _, size, name in pieces:
            if total <= _SHARE_LEFT * self._limit_bytes:
                break
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)
            total -= size
        self._num_bytes = total


def _pieces(directory: int) -> list[tuple[int, int, str]]:
    """Return when each was used last, its size and its name."""
    found = []
    for name in os.listdir(directory):
        with suppress(OSError):
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
            found.append((facts.st_mtime_ns, facts.st_size, name))
    return found


def _name(key: tuple[object, ...]) -> str:
    text = "\0".join(map(str, key))
    return hashlib.sha256(text.encode()).hexdigest()[:40]
