"""Errors of checkpoints, also those of writing them to a full or failing disk."""

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any


class CheckpointError(Exception):
    """The base of all errors about checkpoints.

    Attributes:
        failing_store: The URL of the store if it does not answer, which may pass; else None.
    """

    failing_store: str | None = None


class CheckpointNotFoundError(CheckpointError):
    """Raised when a storage holds no committed checkpoint with a UUID."""


class CheckpointCorruptError(CheckpointError):
    """Raised when files of a checkpoint are missing or altered; the message names each."""


class CheckpointMismatchError(ValueError):
    """Raised when a checkpoint does not fit the training resuming from the checkpoint."""


STATE_VERSION = 4
"""Version of the state in the checkpoints of all front doors.

Readers ignore unknown keys and do without new ones, so that a new key needs no new version. Each
change that an earlier Paceline would misread raises the version, and comes with an upgrade step and
a stored checkpoint of the version before in the tests.
"""
FIRST_STATE_VERSION = 4
"""State version of the first release."""


def check_state_version(owner: str, version: Any, writer: str = "") -> None:
    """Refuse a state unfit for this version of Paceline, and for an upgrade.

    Args:
        owner: The state in words, which begin the message.
        version: Its version.
        writer: The version of Paceline that stored it, for the hint if that is a later one.

    Raises:
        CheckpointMismatchError: Its version is unknown.
    """
    if version in range(FIRST_STATE_VERSION, STATE_VERSION + 1):
        return
    hint = f", {writer}" if writer and version > STATE_VERSION else ""
    allowed = f"from {FIRST_STATE_VERSION} to " * (FIRST_STATE_VERSION != STATE_VERSION)
    raise CheckpointMismatchError(
        f"{owner} must have version {allowed}{STATE_VERSION}, but has {version}. Hint: use the"
        f" version of Paceline that stored it{hint}."
    )


class CheckpointVersionError(CheckpointError):
    """Raised when a checkpoint has another format version."""


class CheckpointWriteError(CheckpointError, OSError):
    """Raised when a checkpoint cannot be written, for example on a full disk.

    Its partial files are removed, and earlier checkpoints stay as they are.
    """


_MOST_NAMES = 10


def first_names(names: Collection[str]) -> str:
    """Return the first names of many for a message, each cut to 200 characters."""
    shown = ", ".join(f"{name:.200}" for name in islice(names, _MOST_NAMES))
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


class StorageNotInstalledError(CheckpointError, ValueError):
    """Raised for a URL scheme offered by neither Paceline nor an installed package."""


def failing_store_of(error: BaseException | None) -> str | None:
    """Return the URL of the silent store at the root of an error; None for other errors."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, CheckpointError) and error.failing_store is not None:
            return error.failing_store
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


_NO_SPACE_BYTES = 256 * 1024
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors of a network file system while its server is away, besides a full disk.
_WRITE_ERRORS = _FULL_ERRORS | {
    *(errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
}


@contextmanager
def durable_write_errors(uuid: str, root: Path) -> Iterator[None]:
    """Turn errors of a full or broken disk into a single clear error.

    Raises:
        CheckpointWriteError: The body failed because `root` cannot take more.
    """
    try:
        yield
    except CheckpointWriteError:
        raise
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as a RuntimeError of its own.
        number = error.errno if isinstance(error, OSError) else None
        if number not in _WRITE_ERRORS and not (number is None and _is_full(root)):
            raise
        if number not in _FULL_ERRORS and not _is_about(error, root):
            raise  # Such as of a hook that may not read a file of its own.
        number = number or errno.ENOSPC
        raise CheckpointWriteError(
            number,
            f"Checkpoint {uuid} cannot be written to {str(root)!r} ({os.strerror(number)}); what"
            f" was written of it is removed, and earlier checkpoints are untouched."
            f" {_hint(number, root)}",
        ) from error


def _hint(number: int, root: Path) -> str:
    if number in _FULL_ERRORS:
        return (
            "Hint: free space there, or copy it to another disk and pass the copy as"
            " `checkpoint_storage`"
        )
    if number in (errno.EACCES, errno.EPERM):
        place = next((path for path in (root, *root.parents) if path.exists()), root)
        with suppress(OSError):
            facts = place.stat()
            if not os.access(place, os.W_OK | os.X_OK):
                return (
                    f"{str(place)!r} belongs to user {facts.st_uid} and has mode"
                    f" {stat.S_IMODE(facts.st_mode):o}, but this process is of user"
                    f" {os.geteuid()}. Hint: let this user write there (`chown`, a group, or `chmod"
                    " 1777` for all users)"
                )
    return "Hint: see that the directory is there and may be written to"


def _is_about(error: Exception, root: Path) -> bool:
    """Return whether an error is about a file below or above `root`, or an unnamed file."""
    name = getattr(error, "filename", None)
    if not isinstance(name, (str, os.PathLike)):
        return True
    return Path(name).is_relative_to(root) or root.is_relative_to(name)


@contextmanager
def naming_files_below(root: Path) -> Iterator[None]:
    """Put the whole path into errors about relative paths."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = str(root / error.filename)
        raise


def _is_full(root: Path) -> bool:
    space = os.statvfs(next(path for path in (root, *root.parents) if path.is_dir()))
    return space.f_bavail * space.f_frsize < _NO_SPACE_BYTES
