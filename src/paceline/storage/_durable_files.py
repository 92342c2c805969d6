"""Durable writes, digests and listings of plain files."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

import xxhash

from paceline import faults
from paceline._atomic_files import replacing_below, sync_directory
from paceline._regular_files import (
    NotRegularFileError,
    open_regular_below,
    opened_below,
    opened_directory,
)
from paceline.storage._directory_trees import empty_directory, made_below, no_regular_file
from paceline.storage._errors import CheckpointWriteError
from paceline.storage._manifest import FileEntry

# At the boundaries of what is written: those of all storages, in the order of storing and deleting.
faults.register(
    "storage.begun",
    "storage.between_files",
    "storage.before_move",
    "storage.before_rename",
    "storage.before_done",
    "storage.after_done",
    "storage.before_manifest",
    "storage.after_manifest",
    "storage.after_manifest_deleted",
    "storage.after_manifest_replaced",
)

_CHUNK_BYTES = 4 * 1024 * 1024
# It stays in a core's cache.
_DIGEST_BYTES = 256 * 1024
_FILES_AT_ONCE = 4
_WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_NO_SPACE_BYTES = 256 * 1024
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What a network file system raises too while its server is away.
_WRITE_ERRORS = _FULL_ERRORS | {
    *(errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
}


def list_files(root: Path, *, follow_links: bool = False) -> list[str]:
    """Return the relative POSIX paths of all regular files below `root`, sorted.

    Raises:
        ValueError: There is a link or a special file; with `follow_links`, links to regular
            files count as those.
    """
    found: list[str] = []
    for folder, directories, names in os.walk(root, onerror=_raise):
        for name in [*directories, *names]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if follow_links and stat.S_ISLNK(mode) and path.is_file():
                mode = stat.S_IFREG
            relative = path.relative_to(root).as_posix()
            if stat.S_ISREG(mode):
                found.append(relative)
            elif not stat.S_ISDIR(mode):
                raise no_regular_file(relative)
    return sorted(found)


def digest_file(path: Path) -> FileEntry:
    """Read a file and return its size and digest."""
    with path.open("rb", buffering=0) as file:
        return digest_stream(file)


def digest_stream(file: Any, num_bytes: int | None = None) -> FileEntry:
    """Read an open file from where it is, and return the size and digest of what was read.

    Args:
        file: The file; it has `readinto`.
        num_bytes: How much to read at most; all by default.
    """
    hasher = xxhash.xxh3_128()
    size = 0
    chunk = memoryview(bytearray(_DIGEST_BYTES))
    while num_read := file.readinto(chunk if num_bytes is None else chunk[: num_bytes - size]):
        hasher.update(chunk[:num_read])
        size += num_read
    return FileEntry(size, hasher.hexdigest())


def seal_files(directory: int, names: Sequence[str]) -> dict[str, FileEntry]:
    """Force files to disk, forbid writes to them, and return their sizes and digests.

    The disk is asked for several at once, as it takes them almost as quickly as one.

    Args:
        directory: The descriptor of the directory.
        names: The relative POSIX paths of the files in it.
    """

    def size_of(name: str) -> int:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size

    largest_first = sorted(names, key=size_of, reverse=True)
    entries: dict[str, FileEntry] = {}
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="paceline-disk") as pool:
        forced = [pool.submit(_force, directory, name) for name in largest_first]
        for name in names:
            if entries:
                faults.reach("storage.between_files")
            with open_regular_below(directory, name) as file:
                entries[name] = digest_stream(file)
        for each in forced:
            each.result()
    return entries


def _force(directory: int, name: str) -> None:
    with open_regular_below(directory, name) as file:
        _forbid_writes(file.fileno())
        os.fsync(file.fileno())


def copy_file(
    source: Path,
    target: Path,
    *,
    durable: bool = False,
    writable: bool = False,
    num_bytes: int | None = None,
) -> FileEntry:
    """Copy a file's content and return the size and digest of what was read.

    Args:
        source: The file.
        target: Its copy, whose directory is made if there is none.
        durable: Force the copy to disk; nobody may write to it any more.
        writable: With `durable`: writing to it stays allowed.
        num_bytes: Copy no more than so many bytes, all of the file by default.
    """
    with source.open("rb") as reader:
        return copy_stream(reader, target, durable=durable, writable=writable, num_bytes=num_bytes)


def copy_stream(
    reader: IO[bytes],
    target: Path,
    *,
    durable: bool = False,
    writable: bool = False,
    num_bytes: int | None = None,
    directory: int | None = None,
) -> FileEntry:
    """Copy the content of an open file as `copy_file` does.

    With the descriptor of an open `directory`, `target` is the name of a file in it.
    """
    hasher = xxhash.xxh3_128()
    size = 0
    if directory is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    # Another rank may have copied one of the same name, which the commit finds out.
    with suppress(FileNotFoundError):
        os.unlink(target, dir_fd=directory)

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666, dir_fd=directory)

    with open(target, "wb", opener=opener) as writer:
        while chunk := reader.read(_piece(num_bytes, size)):
            writer.write(chunk)
            hasher.update(chunk)
            size += len(chunk)
        if durable:
            writer.flush()
            if not writable:
                _forbid_writes(writer.fileno())
            os.fsync(writer.fileno())
    return FileEntry(size, hasher.hexdigest())


def move_files_up(own: int, directory: int, entries: Mapping[str, FileEntry]) -> None:
    """Move a rank's files to where the checkpoint has them.

    If two ranks do so at once with one name, the commit finds out.

    Args:
        own: The descriptor of the rank's directory.
        directory: That of the checkpoint's.
        entries: The files.
    """
    folders = {""}
    for name, entry in entries.items():
        folder, _, last = name.rpartition("/")
        try:
            with made_below(directory, folder) as target, opened_below(own, folder) as source:
                if _is_there(target, last, name, entry):
                    continue
                faults.reach("storage.before_move")
                os.rename(last, last, src_dir_fd=source, dst_dir_fd=target)
        except (IsADirectoryError, NotADirectoryError, NotRegularFileError) as error:
            # Another rank may have made it since it was looked at.
            is_file = isinstance(error, IsADirectoryError)
            other = "a directory of" if is_file else "below the file of"
            raise FileExistsError(
                "What several ranks store must be a file or a directory on all of them, but"
                f" {name!r} is {other} another rank."
            ) from error
        # All but the checkpoint's own directory.
        folders.update(str(path) for path in PurePosixPath(name).parents[:-1])
    empty_directory(own)
    # Not the whole tree: directories of other ranks come and go meanwhile.
    for folder in folders:
        with opened_below(directory, folder) as each:
            os.fsync(each)


def _is_there(target: int, last: str, name: str, entry: FileEntry) -> bool:
    """Tell whether a file is in a directory already.

    Raises:
        FileExistsError: Another one is.
    """
    try:
        mode = os.stat(last, dir_fd=target, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISREG(mode):
        with open_regular_below(target, last) as file:
            if digest_stream(file) == entry:
                return True
    raise FileExistsError(
        "Files that several ranks store must have different names or the same content, but"
        f" another {name!r} is there already."
    )


def _piece(num_bytes: int | None, num_read: int) -> int:
    return _CHUNK_BYTES if num_bytes is None else min(_CHUNK_BYTES, num_bytes - num_read)


def copy_files(source: Path, target: Path, selects: Callable[[str], bool] | None = None) -> None:
    """Copy the regular files of a directory, or those whose relative POSIX paths are selected.

    Raises:
        ValueError: There is a special file or a link to a directory.
    """
    for name in list_files(source, follow_links=True):
        if selects is None or selects(name):
            copy_file(source / name, target / name)


def _forbid_writes(descriptor: int) -> None:
    # Some file systems know no such permissions.
    with suppress(PermissionError):
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~_WRITE_BITS)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that appears as a whole and survives a power cut once this returns."""
    with opened_directory(path.parent) as directory:
        write_durably_below(directory, path.name, data)


def write_durably_below(
    directory: int, name: str, data: bytes, *, owner: tuple[int, int] | None = None
) -> None:
    """Write a file into an open directory as `write_durably` does; `owner` as `replacing_below`."""
    with replacing_below(directory, name, owner=owner) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        faults.reach("storage.before_rename")
    os.fsync(directory)


def sync_tree(root: Path) -> None:
    """Force the entries of all directories below `root`, and its own, to disk."""
    for folder, _, _ in os.walk(root, topdown=False):
        sync_directory(Path(folder))


@contextmanager
def durable_write_errors(uuid: str, root: Path) -> Iterator[None]:
    """Turn what a full or broken disk raises into one clear error.

    Raises:
        CheckpointWriteError: The body failed because `root` cannot take more.
    """
    try:
        yield
    except CheckpointWriteError:
        raise
    except (OSError, RuntimeError) as error:
        # torch.save tells of a full disk by a RuntimeError of its own.
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
    """Tell whether an error is about a file below or above `root`, or does not say about which."""
    name = getattr(error, "filename", None)
    if not isinstance(name, (str, os.PathLike)):
        return True
    return Path(name).is_relative_to(root) or root.is_relative_to(name)


@contextmanager
def naming_files_below(root: Path) -> Iterator[None]:
    """Have errors about relative paths tell the whole path."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = str(root / error.filename)
        raise


def _is_full(root: Path) -> bool:
    space = os.statvfs(next(path for path in (root, *root.parents) if path.is_dir()))
    return space.f_bavail * space.f_frsize < _NO_SPACE_BYTES


def _raise(error: OSError) -> None:
    raise error
