"""Regular files where others can write: opened without following links, without waiting."""

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Linux: to reach what is below a directory that may be entered but not be listed.
_ENTRY_ONLY = getattr(os, "O_PATH", None)
# Of a path, with those of its links.
_MAX_PARTS = 1000


class NotRegularFileError(OSError):
    """Raised for a link, a special file or a foreign file where a regular file must be."""


@contextmanager
def opened_directory(path: Path | str) -> Iterator[int]:
    """Yield a descriptor of a directory; links in its own path are followed, once.

    Not followed are links by which another user would lead this process to what is its own: those
    of neither root nor this process's user, to a directory of this user; for root, to a directory
    that does not belong to the owner of the link.

    Raises:
        NotRegularFileError: There is such a link in the path.
        OSError: There is no such directory, or it cannot be read.
    """
    descriptor = _open_following(os.fspath(path))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_following(path: str) -> int:
    """Open a directory; each link is looked at and followed by its descriptor, not by its name."""
    if _ENTRY_ONLY is None:
        return _open(path, _DIRECTORY, None, path)
    enter = _ENTRY_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    parts, owners = path.split("/"), set()
    current = _open("/" if path.startswith("/") else ".", _DIRECTORY, None, path)
    try:
        for _ in range(_MAX_PARTS):
            if not parts:
                break
            part = parts.pop(0) or "."
            below = _open(part, enter, current, path)
            facts = os.fstat(below)
            if stat.S_ISLNK(facts.st_mode):
                owners.add(facts.st_uid)
                target = os.readlink("", dir_fd=below)
                os.close(below)
                parts = [*target.split("/"), *parts]
                if not target.startswith("/"):
                    continue
                below = _open("/", _DIRECTORY, None, path)
            os.close(current)
            current = below
        if parts:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        found = _open(".", _DIRECTORY, current, path)
    finally:
        os.close(current)
    owner, user = os.fstat(found).st_uid, os.geteuid()
    if any(user == owner or user == 0 for one in owners - {0, user, owner}):
        os.close(found)
        raise NotRegularFileError(
            errno.EPERM,
            f"No link of another user must lead to a directory of user {owner}",
            path,
        )
    return found


@contextmanager
def opened_below(directory: int, name: str) -> Iterator[int]:
    """Yield a descriptor of a directory as `open_directory_below` returns it; raises the same."""
    descriptor = open_directory_below(directory, name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_directory_below(directory: int, name: str) -> int:
    """Return a new descriptor of a directory below another one; no link is followed at any level.

    Args:
        directory: The descriptor of the directory above.
        name: The relative POSIX path; "" and "." are the directory itself.

    Raises:
        NotRegularFileError: A part of the path is a link or no directory.
        OSError: The directory cannot be opened.
        ValueError: The path is absolute, or leaves the directory.
    """
    current = _open(".", _DIRECTORY, directory, name)
    try:
        for part in _parts(name):
            below = _open(part, _DIRECTORY | os.O_NOFOLLOW, current, name)
            os.close(current)
            current = below
    except BaseException:
        os.close(current)
        raise
    return current


def open_regular_below(
    directory: int, name: str, *, owners: Collection[int] | None = None
) -> IO[bytes]:
    """Open a regular file below a directory for unbuffered reading.

    No link is followed at any level, and nothing waits: not for the writer of a FIFO either.

    Args:
        directory: The descriptor of the directory.
        name: The relative POSIX path of the file.
        owners: User ids of which the file must belong to one; any by default.

    Raises:
        NotRegularFileError: A part of the path is a link, the file is not a regular one, or it
            belongs to none of `owners`.
        OSError: The file cannot be opened, such as `FileNotFoundError`.
        ValueError: The path is absolute, or leaves the directory.
    """
    *folders, last = _parts(name) or ["."]
    parent = open_directory_below(directory, "/".join(folders))
    try:
        descriptor = _open(last, _READ | os.O_NOFOLLOW, parent, name)
    finally:
        os.close(parent)
    return _checked(descriptor, name, owners)


def open_regular(path: Path | str, *, owners: Collection[int] | None = None) -> IO[bytes]:
    """Open a regular file for unbuffered reading, without waiting for it.

    Links are followed: use `open_regular_below` where somebody else can write.

    Raises:
        NotRegularFileError: The file is not a regular one, or belongs to none of `owners`.
        OSError: The file cannot be opened.
    """
    return _checked(_open(os.fspath(path), _READ, None, os.fspath(path)), os.fspath(path), owners)


def regular_opener(path: str, flags: int) -> int:
    """Open a regular file for `open(path, mode, opener=regular_opener)`, without waiting for it.

    Links are followed. A file that is made has mode 0600.

    Raises:
        NotRegularFileError: Something else is there.
        OSError: The file cannot be opened.
    """
    flags |= os.O_NONBLOCK | os.O_NOCTTY
    descriptor = _open(path, flags, None, path, mode=0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFileError(errno.EINVAL, "A regular file must be there", path)
    return descriptor


def read_regular(path: Path | str, *, max_bytes: int = 64 * 2**20) -> bytes:
    """Return the content of a regular file as `open_regular` opens it.

    Raises:
        NotRegularFileError: As for `open_regular`; also if the file has more than `max_bytes`.
        OSError: The file cannot be read.
    """
    with open_regular(path) as file:
        return read_limited(file, max_bytes)


def read_limited(file: IO[bytes], max_bytes: int) -> bytes:
    """Return all that is left of a file.

    Raises:
        NotRegularFileError: More than `max_bytes` are left.
    """
    pieces: list[bytes] = []
    left = max_bytes + 1
    while left and (piece := file.read(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise NotRegularFileError(
            errno.EFBIG, f"The file must have at most {max_bytes} bytes", file.name
        )
    return b"".join(pieces)


def _open(name: str, flags: int, directory: int | None, path: str, mode: int = 0o777) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.EACCES and flags & os.O_DIRECTORY and _ENTRY_ONLY is not None:
            return os.open(name, flags | _ENTRY_ONLY, dir_fd=directory)
        # ENXIO: a socket. ENOTDIR: a directory must be there, and a link or file is.
        if error.errno in (errno.ELOOP, errno.ENXIO) or (
            error.errno == errno.ENOTDIR and _is_link(name, directory)
        ):
            raise NotRegularFileError(
                error.errno, "No link and no special file must be there", path
            ) from error
        raise type(error)(error.errno, os.strerror(error.errno or 0), path) from error


def _is_link(name: str, directory: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _checked(descriptor: int, path: str, owners: Collection[int] | None) -> IO[bytes]:
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise NotRegularFileError(errno.EINVAL, "A regular file must be there", path)
        if owners is not None and facts.st_uid not in owners:
            raise NotRegularFileError(
                errno.EPERM,
                f"The file must belong to one of the users {sorted(owners)}, not to {facts.st_uid}",
                path,
            )
    except BaseException:
        os.close(descriptor)
        raise

    def opener(_path: str, _flags: int) -> int:
        return descriptor

    return open(path, "rb", buffering=0, opener=opener)  # the caller closes it


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part != "."]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"A path must be relative and stay below its directory, but got {name!r}.")
    return [part for part in parts if part]
