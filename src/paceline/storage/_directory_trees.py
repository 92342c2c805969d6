"""Walks below the descriptor of a directory: they follow no link and open no file."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from paceline._base.files import NotRegularFileError, open_directory_below, opened_below

# More than checkpoints have. Each level takes a descriptor while it is walked through.
_MAX_DEPTH = 64


class Found(NamedTuple):
    """Entry below a directory: its path, the descriptor of its parent, and facts."""

    path: str
    parent: int
    name: str
    facts: os.stat_result


def walk_below(
    directory: int, _above: tuple[str, ...] = (), *, owner: int | None = None
) -> Iterator[Found]:
    """Yield all entries below a directory, directories after their contents.

    The descriptor of a parent is open until the next one is yielded.

    Args:
        directory: The descriptor of the directory.
        owner: The id of the user to whom all directories must belong; any by default.

    Raises:
        OSError: A directory cannot be read or belongs to another user, or there are more than 64 in
            each other.
    """
    if len(_above) > _MAX_DEPTH:
        raise OSError(errno.ELOOP, "Directories must not be so deep", "/".join(_above))
    for name in sorted(os.listdir(directory)):
        path = (*_above, name)
        with suppress(FileNotFoundError):
            facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                # One that was replaced meanwhile by something else is yielded as that.
                with suppress(NotRegularFileError, NotADirectoryError):
                    below = open_directory_below(directory, name)
                    try:
                        if owner not in (None, found := os.fstat(below).st_uid):
                            raise PermissionError(
                                errno.EPERM,
                                f"Must belong to user {owner}, not to {found}",
                                "/".join(path),
                            )
                        yield from walk_below(below, path, owner=owner)
                    finally:
                        os.close(below)
            yield Found("/".join(path), directory, name, facts)


def files_below(directory: int) -> list[str]:
    """Return the sorted relative POSIX paths of everything below a directory except directories."""
    return sorted(
        found.path for found in walk_below(directory) if not stat.S_ISDIR(found.facts.st_mode)
    )


def no_regular_file(name: str) -> ValueError:
    """Return the error for a checkpoint's entry being neither file nor directory."""
    return ValueError(
        f"A checkpoint must consist of regular files and directories, but {name!r} is a link or a"
        " special file. Hint: copy what it refers to."
    )


@contextmanager
def made_below(directory: int, name: str) -> Iterator[int]:
    """Yield a descriptor of a directory below another directory; make the directory if missing.

    Raises:
        OSError: It cannot be made, or a part of the path is a link or a file.
    """
    part, _, rest = name.partition("/")
    if part:
        # Other ranks make the same directory at the same time.
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=directory)
    with opened_below(directory, part) as below:
        if not rest:
            yield below
            return
        with made_below(below, rest) as deepest:
            yield deepest


def empty_directory(directory: int) -> None:
    """Remove everything below a directory; links are removed, not their targets.

    Directories of another user stay: a user who shares the storage may have moved them there.

    Raises:
        OSError: Something cannot be removed.
    """
    for found in walk_below(directory, owner=os.fstat(directory).st_uid):
        # Others may remove the same leftovers.
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(found.facts.st_mode):
                os.rmdir(found.name, dir_fd=found.parent)
            else:
                os.unlink(found.name, dir_fd=found.parent)


def remove_below(directory: int, name: str) -> None:
    """Remove a directory below another directory, with its contents.

    Raises:
        NotRegularFileError: A link is there; it stays.
        OSError: It is not there, or something in it cannot be removed.
    """
    with opened_below(directory, name) as below:
        empty_directory(below)
    os.rmdir(name, dir_fd=directory)


def newest_change(directory: int) -> float:
    """Return the time of the last change of a directory and anything below it.

    In seconds since the epoch.
    """
    own = os.fstat(directory).st_mtime
    return max([own, *(found.facts.st_mtime for found in walk_below(directory))])


def sync_directories(directory: int) -> None:
    """Force the entries of a directory, and of all directories below it, to disk."""
    for found in walk_below(directory):
        if stat.S_ISDIR(found.facts.st_mode):
            with opened_below(found.parent, found.name) as below:
                os.fsync(below)
    os.fsync(directory)
