"""Files shared with others: atomic writes, regular files, private files, secrets."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# A name that nobody can guess, and a file that was not there before: nobody's link is followed.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def replacing_atomically(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new file to write; the file replaces `path` when the block ends.

    If the block raises, the earlier file stays, and the partial file is removed. Where others can
    write to the directory, use `replacing_below`.

    Args:
        path: The file to replace; its directory must exist.
        mode: The permissions of the new file, before the umask.
    """
    written = path.with_name(temporary_name(path.name))
    # Made here, with O_EXCL: the writer meets no link or file of somebody else under this name.
    os.close(os.open(written, _NEW_FILE, mode))
    try:
        yield written
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_below(
    directory: int, name: str, *, owner: tuple[int, int] | None = None
) -> Iterator[IO[bytes]]:
    """Yield a new file to write; the file replaces `name` when the block ends.

    Files that others put into the directory meanwhile are never written to.

    Args:
        directory: The descriptor of the directory.
        name: The name of the file in it.
        owner: The ids of the user and the group that the file is to belong to; those of this
            process by default.

    Raises:
        OSError: The file cannot be written, or not be given away; the earlier one stays.
    """
    temporary = temporary_name(name)
    descriptor = os.open(temporary, _NEW_FILE, 0o666, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            facts = os.fstat(descriptor)
            # Owner already right: `fchown` is skipped, since only root may give files away.
            if owner is not None and owner[0] != facts.st_uid:
                os.fchown(descriptor, *owner)
            yield file
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def temporary_name(name: str) -> str:
    """Return an unguessable name beside a file, so nobody can place a link there."""
    return f".{name}.{secrets.token_hex(8)}"


def sync_directory(path: Path) -> None:
    """Force the entries of a directory to disk.

    Raises:
        OSError: The disk refuses to, or the directory cannot be read.
    """
    # The fsync of a file does not cover its name: a power cut could take the entry.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Force the content of a file to disk.

    Raises:
        OSError: The disk refuses to, or the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """Write a private file atomically: readers see the whole content or none of the new file.

    Args:
        path: The file; its directory must exist.
        data: The whole content.
        is_durable: Whether the file must survive the loss of the node as well; this waits for
            the disk.

    Raises:
        OSError: The file cannot be written; the previous one is intact.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if is_durable:
        # Directory sync: without it, a power cut may undo the rename.
        sync_directory(path.parent)


_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_PATH (Linux) opens a directory that may be entered but not listed.
_ENTRY_ONLY = getattr(os, "O_PATH", None)
# Limit on the parts of a path, the parts of its links included.
_MAX_PARTS = 1000


class NotRegularFileError(OSError):
    """Raised for a link, a special file or a foreign file where a regular file must be."""


@contextmanager
def opened_directory(path: Path | str) -> Iterator[int]:
    """Yield a descriptor of a directory; links in its own path are followed, once.

    Links by which another user would lead this process to its own files are not followed: links
    of neither root nor this process's user, to a directory of this user; for root, links to a
    directory that does not belong to the owner of the link.

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
                # Empty name: Linux reads the opened link itself, whatever its name is now.
                try:
                    target = os.readlink("", dir_fd=below)
                finally:
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
            errno.EPERM, f"No link of another user must lead to a directory of user {owner}", path
        )
    return found


@contextmanager
def opened_below(directory: int, name: str) -> Iterator[int]:
    """Yield a descriptor from `open_directory_below`, with the same exceptions."""
    descriptor = open_directory_below(directory, name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_directory_below(directory: int, name: str) -> int:
    """Return a new descriptor of a directory below another; no link is followed at any level.

    Args:
        directory: The descriptor of the directory above.
        name: The relative POSIX path; "" and "." are the directory itself.

    Raises:
        NotRegularFileError: A part of the path is a link or no directory.
        OSError: The directory cannot be opened.
        ValueError: The path is absolute, or leaves the directory.
    """
    # A descriptor of its own: the caller keeps `directory`.
    current = _open(".", _DIRECTORY, directory, name)
    try:
        for part in _parts(name):
            # Part by part: O_NOFOLLOW guards only the last part of a path.
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
    """Open a regular file for unbuffered reading, without blocking.

    Links are followed: use `open_regular_below` where somebody else can write.

    Raises:
        NotRegularFileError: The file is not a regular one, or belongs to none of `owners`.
        OSError: The file cannot be opened.
    """
    return _checked(_open(os.fspath(path), _READ, None, os.fspath(path)), os.fspath(path), owners)


def regular_opener(path: str, flags: int) -> int:
    """Open a regular file for `open(path, mode, opener=regular_opener)`, without blocking.

    Links are followed. A file that is made has mode 0600.

    Raises:
        NotRegularFileError: Something else is there.
        OSError: The file cannot be opened.
    """
    # A pipe or terminal in the file's place must neither block nor become the controlling terminal.
    flags |= os.O_NONBLOCK | os.O_NOCTTY
    descriptor = _open(path, flags, None, path, mode=0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFileError(errno.EINVAL, "A regular file must be there", path)
    return descriptor


def read_regular(path: Path | str, *, max_bytes: int = 64 * 2**20) -> bytes:
    """Return the content of a regular file, opened by `open_regular`.

    Raises:
        NotRegularFileError: As for `open_regular`; also if the file has more than `max_bytes`.
        OSError: The file cannot be read.
    """
    with open_regular(path) as file:
        return read_limited(file, max_bytes)


def read_limited(file: IO[bytes], max_bytes: int) -> bytes:
    """Return the rest of a file.

    Raises:
        NotRegularFileError: More than `max_bytes` are left.
    """
    pieces: list[bytes] = []
    # One more byte than allowed: reading it shows that a file is too large.
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
        # Directory without read permission: O_PATH needs only the permission to enter.
        if error.errno == errno.EACCES and flags & os.O_DIRECTORY and _ENTRY_ONLY is not None:
            return os.open(name, flags | _ENTRY_ONLY, dir_fd=directory)
        # ENXIO: a socket. ENOTDIR: a directory must be there, and a link or file is.
        if error.errno in (errno.ELOOP, errno.ENXIO) or (
            error.errno == errno.ENOTDIR and _is_link(name, directory)
        ):
            raise NotRegularFileError(
                error.errno, "No link and no special file must be there", path
            ) from error
        # Full path in the error: calls with `dir_fd` report only the last part.
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


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file like `open`, without blocking; a new file has mode 0600.

    Raises:
        NotRegularFileError: Something else than a regular file is there.
        OSError: The file cannot be opened.
    """
    return open(path, mode, buffering, opener=regular_opener)  # the caller closes it


# No other directories have this name: a leftover without a held lock is removed.
_PREFIX = "paceline-locked-"
# Until it is locked, a directory has another name, so that nobody takes it for a killed one's.
_NEW_PREFIX = "paceline-new-"


@contextmanager
def temporary_directory(root: Path | None = None) -> Iterator[Path]:
    """Yield an empty private directory; remove the leftovers of this user's killed processes.

    A process that uses one holds its lock, which the system releases when the process ends.

    Args:
        root: Where it is made; TMPDIR by default.

    Raises:
        OSError: It cannot be made.
    """
    path, lock = make_locked_directory(Path(tempfile.gettempdir()) if root is None else root)
    try:
        yield path
    finally:
        remove_tree(path)
        os.close(lock)


def make_locked_directory(root: Path) -> tuple[Path, int]:
    """Make a directory like `temporary_directory`; return it and the descriptor with its lock.

    Raises:
        OSError: It cannot be made.
    """
    remove_leftover_directories(root)
    new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=root))
    path = new.with_name(new.name.replace(_NEW_PREFIX, _PREFIX, 1))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A file system without locks has no leftovers removed.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.rename(new, path)
    except BaseException:
        os.close(lock)
        shutil.rmtree(new, ignore_errors=True)
        raise
    return path, lock


def is_locked_directory_of(path: Path, root: Path) -> bool:
    """Return whether a path is where `make_locked_directory` makes a directory of a root."""
    return path.parent == root and path.name.startswith(_PREFIX)


def remove_leftover_directories(root: Path) -> None:
    """Remove directories of `temporary_directory` whose processes were killed; only this user's."""
    for path in root.glob(f"{_PREFIX}*"):
        # Those of other users, and those removed meanwhile, cannot be opened or locked.
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    remove_tree(path)
            finally:
                os.close(lock)


def remove_tree(path: str | Path) -> None:
    """Remove a directory as far as possible; links are removed and never followed.

    A tree too deep for Python's stack stays, and harms nobody who cleans up.
    """
    with suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)


TOKEN_PREFIX = "paceline_"  # noqa: S105 - what tokens begin with, no secret
_NUM_RANDOM_BYTES = 32
# A bit that changes can make a character that counts as none at the end, or one of the line end.
_LENGTHS = {
    len(secrets.token_urlsafe(_NUM_RANDOM_BYTES)) + 8 + length + change
    for length in (0, len(TOKEN_PREFIX))
    for change in (-1, 0, 1)
}
_PRINTABLE = re.compile(rb"[!-~]+")


class DamagedSecretError(ValueError):
    """Raised when the content of a secret's file is damaged."""


def make_secret(prefix: str = "") -> str:
    """Return a new random text of letters, digits and `_`.

    It has no `-`: clients of W&B take what comes before one for a prefix, and find the rest short.
    """
    text = prefix + secrets.token_urlsafe(_NUM_RANDOM_BYTES).replace("-", "_")
    return f"{text}{zlib.crc32(text.encode()):08x}"


def read_secret(path: Path, *, is_named: bool = False) -> str:
    """Return a file's secret without surrounding blanks; empty if there is none.

    Args:
        path: The file.
        is_named: Whether somebody has named it: it may be the output of a program then, which is
            waited for.

    Raises:
        NotRegularFileError: Something else than a regular file is there.
        OSError: The file cannot be read.
        DamagedSecretError: It is damaged.
    """
    data = (path.read_bytes() if is_named else read_regular(path)).strip()
    if not data or not _is_damaged(data):
        return data.decode()
    raise DamagedSecretError(
        f"The secret in {str(path)!r} must be as it was written, but the file is damaged."
    )


def _is_damaged(data: bytes) -> bool:
    if not _PRINTABLE.fullmatch(data):
        return True
    # Other lengths: such a secret was not made by `make_secret` and has no checksum.
    if len(data) not in _LENGTHS:
        return False
    return data[-8:] != b"%08x" % zlib.crc32(data[:-8])
