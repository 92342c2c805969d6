"""Backups of a home as directories: one per time, whole once it has its content list.

``<to>/<time>/backup.json`` is written last. A directory whose name begins with a dot is not whole.
"""

import time
from pathlib import Path
from typing import Any

import msgspec

from paceline._regular_files import regular_opener
from paceline.storage import FileEntry

BACKUP_VERSION = 1
CONTENT_NAME = "backup.json"
_PART = ".part"


class BackupError(RuntimeError):
    """Raised when a backup cannot be made, read or restored."""


class BackedUp(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a backup, and the size in bytes and change time of what it was copied from."""

    size: int
    digest: str
    source_size: int
    source_time_ns: int

    @property
    def entry(self) -> FileEntry:
        """What the copy must be."""
        return FileEntry(self.size, self.digest)


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Content list of a backup.

    `created` is in seconds since the epoch, `files` maps relative POSIX paths to their entries,
    `left_out` says what the home has that the backup has not.
    """

    version: int = BACKUP_VERSION
    created: float
    paceline: str
    schema_version: int
    home: str
    files: dict[str, BackedUp]
    left_out: list[str] = []

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files.values())


def new_name(to: Path) -> str:
    """Return the name of a new backup: the time, with a number if the second has one already."""
    stamp = time.strftime("%Y-%m-%dT%H%M%S")
    taken = [_order(path)[1] for path in to.glob(f"{stamp}*")]
    return f"{stamp}-{max(taken) + 1}" if taken else stamp


def part_of_backup(to: Path, name: str) -> Path:
    """Return where a backup lies until it is whole."""
    return to / f".{name}{_PART}"


def parts_of_backups(to: Path) -> list[Path]:
    """Return what interrupted backups left."""
    return sorted(to.glob(f".*{_PART}"))


def whole_backups(to: Path) -> list[Path]:
    """Return the backups that are whole, oldest first."""
    if not to.is_dir():
        return []
    found = [path for path in to.iterdir() if not path.name.startswith(".")]
    return sorted((path for path in found if (path / CONTENT_NAME).is_file()), key=_order)


def find_backup(source: Path) -> Path:
    """Return a backup: `source` itself, or the newest whole one in it.

    Raises:
        BackupError: There is none.
    """
    if (source / CONTENT_NAME).is_file():
        return source
    found = whole_backups(source)
    if not source.exists():
        raise BackupError(
            f"A backup must exist to be restored, but {str(source)!r} does not. Hint: is its disk"
            " mounted? A copy that an upgrade has kept is gone once it is restored."
        )
    if not found:
        raise BackupError(
            f"{str(source)!r} must be a backup, or have one that is whole, but has none. Hint:"
            " `paceline restore` takes the directory that `paceline backup` was given."
        )
    return found[-1]


def _order(path: Path) -> tuple[str, int]:
    stamp, _, number = path.name.partition("T")
    second, _, count = number.partition("-")
    return f"{stamp}T{second}", int(count) if count.isdecimal() else 1


def read_backup_content(path: Path) -> Content:
    """Return the content list of a backup.

    Raises:
        BackupError: It is missing, damaged, or of another format version.
    """
    try:
        with open(path / CONTENT_NAME, "rb", opener=regular_opener) as file:
            data = file.read()
        version: Any = msgspec.json.decode(data, type=dict[str, Any])["version"]
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise _unreadable(path, error) from error
    if version != BACKUP_VERSION:
        raise BackupError(
            f"A backup must have format version {BACKUP_VERSION}, but {str(path)!r} has"
            f" {version!r}. Hint: use the Paceline version that wrote it."
        )
    try:
        content = msgspec.json.decode(data, type=Content)
    except msgspec.DecodeError as error:
        raise _unreadable(path, error) from error
    for name in content.files:
        if name.startswith("/") or ".." in name.split("/"):
            raise _unreadable(path, ValueError(f"it names the file {name!r} outside"))
    return content


def _unreadable(path: Path, error: Exception) -> BackupError:
    return BackupError(
        f"{str(path)!r} must be a whole backup, but its {CONTENT_NAME} cannot be read ({error})."
        " Hint: `paceline restore` takes the directory that `paceline backup` was given, or one of"
        " the dated directories in it."
    )
