"""Marks of checkpoints that were begun in a directory, or whose deletion was, and are not finished.

Each is a file in `.open` with the UUID as its name and its content: others may keep directories of
UUIDs at the same place. Whoever may write there can rename a mark, but not change that of another
user.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline._regular_files import (
    NotRegularFileError,
    open_regular_below,
    opened_below,
    opened_directory,
    read_limited,
)
from paceline.storage._checkpoint_storage import UUID_FORM, check_uuid
from paceline.storage._directory_trees import empty_directory, newest_change
from paceline.storage._manifest import MANIFEST_NAME

OPEN_NAME = ".open"

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def mark_open(root: Path, uuid: str) -> None:
    """Note that a directory is ours and not whole."""
    check_uuid(uuid)
    while True:
        with opened_directory(root) as above:
            with suppress(FileExistsError):
                os.mkdir(OPEN_NAME, dir_fd=above)
            # Another process may just have removed the empty directory.
            with suppress(FileNotFoundError), opened_below(above, OPEN_NAME) as markers:
                _write_mark(markers, uuid)
                return


def _write_mark(markers: int, uuid: str) -> None:
    try:
        descriptor = os.open(uuid, _NEW, 0o666, dir_fd=markers)
    except FileExistsError:
        # That of another rank, perhaps of another user.
        with suppress(PermissionError):
            os.utime(uuid, dir_fd=markers, follow_symlinks=False)
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(uuid.encode())


def mark_closed(root: Path, uuid: str) -> None:
    """Take a mark back."""
    with _missing_is_fine(), opened_directory(root) as above:
        with opened_below(above, OPEN_NAME) as markers, suppress(FileNotFoundError):
            os.unlink(uuid, dir_fd=markers)
        with suppress(OSError):  # there are others
            os.rmdir(OPEN_NAME, dir_fd=above)


def marked(root: Path) -> list[str]:
    """Return the UUIDs that have a mark, sorted."""
    names: list[str] = []
    with _missing_is_fine(), opened_directory(root) as above, opened_below(above, OPEN_NAME) as one:
        names = [name for name in os.listdir(one) if UUID_FORM.fullmatch(name)]
    return sorted(names)


def remove_leftover(
    root: Path, uuid: str, is_old: Callable[[float], bool], *, has_one_owner: bool
) -> bool:
    """Remove what is there of a marked checkpoint without a manifest, and its mark.

    Args:
        root: The directory of the storage.
        uuid: The checkpoint.
        is_old: Tells by the time of the last change, in seconds since the epoch, whether to.
        has_one_owner: Whether to only if the mark says this UUID, and belongs to the user of the
            directory.

    Returns:
        Whether nothing is left of it.
    """
    try:
        with opened_directory(root) as above, opened_below(above, OPEN_NAME) as markers:
            marked_s = os.stat(uuid, dir_fd=markers, follow_symlinks=False).st_mtime
            try:
                with opened_below(above, uuid) as directory:
                    if _has_manifest(directory):
                        mark_closed(root, uuid)
                        return False
                    if has_one_owner and not _is_mark_of_owner(markers, uuid, directory):
                        return False
                    if not is_old(newest_change(directory)):
                        return False
                    empty_directory(directory)
                os.rmdir(uuid, dir_fd=above)
            except FileNotFoundError:
                if not is_old(marked_s):
                    return False
    except OSError:
        # Something in it cannot be removed now, or a link is there.
        return False
    mark_closed(root, uuid)
    return True


def _has_manifest(directory: int) -> bool:
    try:
        os.stat(MANIFEST_NAME, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_mark_of_owner(markers: int, uuid: str, directory: int) -> bool:
    owner = os.fstat(directory).st_uid
    try:
        with open_regular_below(markers, uuid, owners=[owner]) as file:
            is_alone = os.fstat(file.fileno()).st_nlink == 1
            return is_alone and read_limited(file, len(uuid)) == uuid.encode()
    except OSError:
        return False


@contextmanager
def _missing_is_fine() -> Iterator[None]:
    with suppress(FileNotFoundError, NotADirectoryError, NotRegularFileError):
        yield
