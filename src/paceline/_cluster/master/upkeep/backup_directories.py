"""Backups of a home as directories: each named by its time, complete with its content list."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from paceline._base.files import regular_opener
from paceline._cluster.master.store.upgrades import KnownFiles
from paceline.storage._checkpoint_files import FileEntry

BACKUP_VERSION = 1
CONTENT_NAME = "backup.json"
_PART = ".part"


class BackupError(RuntimeError):
    """Raised when a backup cannot be made, read or restored."""


class BackedUp(msgspec.Struct, frozen=True, kw_only=True):
    """File of a backup, with the size in bytes and change time of its source."""

    size: int
    digest: str
    source_size: int
    source_time_ns: int

    @property
    def entry(self) -> FileEntry:
        """Expected size and digest of the copy."""
        return FileEntry(self.size, self.digest)


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Content list of a backup.

    `created` is in seconds since the epoch, `files` maps relative POSIX paths to their entries,
    `left_out` lists files of the home that the backup lacks.
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
    """Return the name of a new backup: the time, numbered if the second is already taken."""
    stamp = time.strftime("%Y-%m-%dT%H%M%S")
    taken = [_order(path)[1] for path in to.glob(f"{stamp}*")]
    return f"{stamp}-{max(taken) + 1}" if taken else stamp


def backup_part(to: Path, name: str) -> Path:
    """Return the path of a backup in progress."""
    return to / f".{name}{_PART}"


def backup_parts(to: Path) -> list[Path]:
    """Return the remains of interrupted backups."""
    return sorted(to.glob(f".*{_PART}"))


def whole_backups(to: Path) -> list[Path]:
    """Return the complete backups, oldest first."""
    if not to.is_dir():
        return []
    found = [path for path in to.iterdir() if not path.name.startswith(".")]
    return sorted((path for path in found if (path / CONTENT_NAME).is_file()), key=_order)


def find_backup(source: Path) -> Path:
    """Return a backup: `source` itself, or the newest complete backup in the directory.

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
    # A forged backup must not write outside of the home.
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


DATABASE = "master.sqlite"
CHECKPOINTS = "checkpoints"
CONTENTS = "files"

# Nobody finds them in a backup: a stolen backup must not open a master.
# The two files hold secrets of the provider and of channels.
_SECRET = re.compile(r"secret|token|password|key|^(oidc|notify)\.yaml$", re.IGNORECASE)
# Files never backed up: state of a running master, derived files, and copies. The newest
# attempt is noted again with the next attempt, and a restored database writes its own records.
_OWN = re.compile(
    r"master\.(sqlite.*|json|lock|log.*|version-.*)|set_aside(/.*)?|restoring|records/.*"
    r"|attempts/newest|logs/.*\.index"
)
# Files of a running attempt worth keeping: its start, its reports and output, and its end.
_OF_ATTEMPT = re.compile(r"started|exit\.json|output\.jsonl|run/.*")
# Files that grow; the line that is just being written is not whole.
_GROWS = re.compile(r".*\.(jsonl|journal)")


@dataclass(slots=True)
class BackupSelection:
    """Files belonging to a backup, and descriptions of the omitted files."""

    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def select_files(
    home: Path,
    known: KnownFiles,
    attempts: set[int],
    contents: set[str],
    *,
    checkpoints: bool,
) -> BackupSelection:
    """Return the files of a home belonging to a copy of its database.

    Args:
        home: The home; a master may be at work in it.
        known: The files that the copy knows. Others are newer than it.
        attempts: The attempts that have not ended by the copy.
        contents: The digests of the files of runs that the copy names.
        checkpoints: Whether to take the home's checkpoints.
    """
    selection = BackupSelection()
    for name in _files_below(home):
        top = name.partition("/")[0]
        if top == CHECKPOINTS:
            continue
        # A checkpoint or a script may have such names below; secrets lie at the top.
        if "/" not in name and _SECRET.search(name):
            selection.left_out.append(f"{name} (a secret)")
        elif top == CONTENTS:
            if PurePosixPath(name).name in contents:
                selection.names.append(name)
        elif not _OWN.fullmatch(name) and _belongs(name, known, attempts):
            selection.names.append(name)
    stored = list(_checkpoint_files(home)) if (home / CHECKPOINTS).is_dir() else []
    if checkpoints:
        selection.names += stored
    elif stored:
        number = len({name.split("/")[1] for name in stored})
        selection.left_out.append(f"{number} checkpoint{'s' * (number > 1)} (see `--checkpoints`)")
    return selection


def grows(name: str) -> bool:
    """Return whether lines are added to a file."""
    return _GROWS.fullmatch(name) is not None


def _files_below(home: Path) -> Iterator[str]:
    """Yield the names of all files present; files vanishing meanwhile are left out."""
    waiting = [home]
    while waiting:
        directory = waiting.pop()
        try:
            entries = sorted(directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            name = entry.relative_to(home).as_posix()
            if entry.name.startswith(".") or entry.is_symlink():
                continue  # being written, or not the home's own
            if entry.is_dir():
                if name not in (CHECKPOINTS, "set_aside"):
                    waiting.append(entry)
            elif entry.is_file():
                yield name


def _belongs(name: str, known: KnownFiles, attempts: set[int]) -> bool:
    path = PurePosixPath(name)
    top = path.parts[0]
    if top == "contexts":
        return path.name.split(".")[0] in known.contexts
    if top == "logs":
        trial = path.parts[1].removeprefix("trial-")
        return not trial.isdecimal() or int(trial) <= known.newest_trial
    if top != "attempts" or len(path.parts) < 2:
        return True
    number = path.parts[1].split(".")[0]
    if not number.isdecimal():
        return True
    if len(path.parts) == 2:
        return int(number) <= known.newest_attempt
    inner = "/".join(path.parts[2:])
    return int(number) in attempts and _OF_ATTEMPT.fullmatch(inner) is not None


def _checkpoint_files(home: Path) -> Iterator[str]:
    """Yield the files of whole checkpoints."""
    for directory in sorted((home / CHECKPOINTS).iterdir()):
        if not directory.name.startswith(".") and (directory / "manifest.json").is_file():
            for path in sorted(directory.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(home).as_posix()
