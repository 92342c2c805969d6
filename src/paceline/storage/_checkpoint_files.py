"""Files of a checkpoint: safe walks, durable writes, digests, and the committing manifest."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from paceline import faults
from paceline._base.files import (
    NotRegularFileError,
    open_directory_below,
    open_regular_below,
    opened_below,
    opened_directory,
    replacing_below,
    sync_directory,
)
from paceline._base.journal_records import check_seal, seal
from paceline.storage._checkpoint_errors import CheckpointCorruptError, CheckpointVersionError

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
    """Return the time of the last change of a directory and its contents.

    In seconds since the epoch.
    """
    own = os.fstat(directory).st_mtime
    return max([own, *(found.facts.st_mtime for found in walk_below(directory))])


def sync_directories(directory: int) -> None:
    """Force the entries of a directory, and of all directories below, to disk."""
    for found in walk_below(directory):
        if stat.S_ISDIR(found.facts.st_mode):
            with opened_below(found.parent, found.name) as below:
                os.fsync(below)
    os.fsync(directory)


MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_TEXT_BYTES = 16 * 2**20
"""How large a manifest or a done file may be: who may write it could fill a reader's memory."""

# Tells by a file's relative POSIX path whether it is wanted.
Selector: TypeAlias = Callable[[str], bool]


class FileEntry(msgspec.Struct, frozen=True):
    """Size in bytes and xxh3_128 digest of a file."""

    size: int
    digest: str

    def difference(self, found: "FileEntry") -> str:
        """Return the difference between the file found and this expected file, as text."""
        if found.size != self.size:
            return f"was altered ({found.size} bytes instead of {self.size})"
        return "was altered (other content of the same size)"


class ShardDone(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `rank-<n>.done`: the files written by a rank, by relative path."""

    version: int = MANIFEST_VERSION
    rank: int
    files: dict[str, FileEntry]


class _Version(msgspec.Struct):
    version: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content list of a committed checkpoint.

    `created` is in seconds since the epoch; `files` maps relative POSIX paths to their entries.
    `deleted` names the files that were deleted on purpose, by `delete_files`. `origin` tells which
    attempt of which master has stored the checkpoint; it is empty without one.
    """

    version: int = MANIFEST_VERSION
    uuid: str
    created: float
    metadata: dict[str, Any]
    files: dict[str, FileEntry]
    deleted: list[str] = []
    origin: str = ""

    @property
    def resources(self) -> dict[str, int]:
        """The size in bytes of each file."""
        return {path: entry.size for path, entry in self.files.items()}

    def selected(self, selects: Selector | None) -> "Manifest":
        """Return a manifest of the selected files alone; of all of them for None."""
        if selects is None:
            return self
        files = {path: entry for path, entry in self.files.items() if selects(path)}
        return msgspec.structs.replace(self, files=files)


def origin_of(cluster_id: str, trial_id: int, attempt: int) -> str:
    """Return the manifest's name for the attempt storing a checkpoint."""
    return f"{cluster_id}.{trial_id}.{attempt}"


def glob_selector(globs: Sequence[str]) -> Selector:
    """Return a selector of the files matching patterns, as in a ``.gitignore``.

    Raises:
        TypeError: `globs` is no list of patterns.
        ValueError: It is empty, or a pattern is not valid.
    """
    from pathspec import GitIgnoreSpec

    if isinstance(globs, str) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"`globs` must be a list of patterns, but got {globs!r}. Hint: globs=['optimizer_*']."
        )
    if not any(globs):
        raise ValueError("`globs` must hold a pattern, but is empty.")
    return GitIgnoreSpec.from_lines(globs).match_file


def done_name(rank: int) -> str:
    """Return the name of a rank's done file."""
    return f"rank-{rank}.done"


def is_reserved(path: str) -> bool:
    """Return whether a relative path inside a checkpoint belongs to the commit protocol."""
    name, _, suffix = path.partition(".")
    is_done_file = suffix == "done" and name.startswith("rank-") and name[5:].isdecimal()
    return path == MANIFEST_NAME or is_done_file


def check_file_names(names: list[str]) -> list[str]:
    """Return the names of a checkpoint's own files.

    Raises:
        ValueError: One path belongs to the commit protocol.
    """
    for name in names:
        if is_reserved(name):
            raise ValueError(
                "A checkpoint's own files must not be named like those of the commit protocol,"
                f" but got {name!r}. Hint: rename it."
            )
    return names


def encode_with_checksum(document: Manifest | ShardDone) -> bytes:
    """Return the document as indented JSON with a checksum.

    Raises:
        ValueError: It is too large.
    """
    data = seal(msgspec.json.format(msgspec.json.encode(document), indent=1))
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(
            f"The metadata and the list of files of a checkpoint must have at most {MAX_TEXT_BYTES}"
            f" bytes, but have {len(data)}, for {len(document.files)} files. Hint: store fewer"
            " files, such as archives."
        )
    return data


def decode_manifest(data: bytes, uuid: str) -> Manifest:
    """Return the manifest after checking its version, its UUID and its paths.

    Raises:
        CheckpointVersionError: It has another format version.
        CheckpointCorruptError: It is damaged, or belongs to another checkpoint.
    """
    _check_version(data, uuid, MANIFEST_NAME)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(uuid, MANIFEST_NAME, str(error)) from error
    if manifest.uuid != uuid:
        raise _damaged(uuid, MANIFEST_NAME, f"it names checkpoint {manifest.uuid!r}")
    # Others may be able to write to the storage: the paths are claims.
    for path in (*manifest.files, *manifest.deleted):
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise _damaged(uuid, MANIFEST_NAME, f"it names the file {path!r} outside")
    return manifest


def decode_done(data: bytes, uuid: str, rank: int) -> ShardDone:
    """Return the done file's content.

    Raises:
        CheckpointVersionError: It has another format version.
        CheckpointCorruptError: It is damaged.
    """
    _check_version(data, uuid, done_name(rank))
    try:
        return msgspec.json.decode(data, type=ShardDone)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(uuid, done_name(rank), str(error)) from error


def _check_version(data: bytes, uuid: str, name: str) -> None:
    if len(data) > MAX_TEXT_BYTES:
        raise _damaged(uuid, name, f"it has {len(data)} bytes, more than {MAX_TEXT_BYTES}")
    try:
        # All else is skipped: as objects, it would take many times its size.
        version = msgspec.json.decode(data, type=_Version).version
        if version == MANIFEST_VERSION:
            check_seal(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(uuid, name, str(error)) from error
    if version != MANIFEST_VERSION:
        raise CheckpointVersionError(
            f"Checkpoint {uuid} must have format version {MANIFEST_VERSION}, but {name} has"
            f" {version!r}. Hint: use the Paceline version that wrote it."
        )


def _damaged(uuid: str, name: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"Checkpoint {uuid} must be whole to be used, but {name} is damaged ({reason})."
    )


# Points at the boundaries of writes, shared by all storages, in the order of storing and deleting.
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
# Chunk size for digests: small enough for a core's cache.
_DIGEST_BYTES = 256 * 1024
_FILES_AT_ONCE = 4
_WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


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
    """Read an open file from its current position; return the size and digest of the content.

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

    Several files are forced at once, as a disk takes them almost as quickly as one.

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
    """Copy a file's content and return the size and digest of the bytes read.

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


def _piece(num_bytes: int | None, num_read: int) -> int:
    return _CHUNK_BYTES if num_bytes is None else min(_CHUNK_BYTES, num_bytes - num_read)


def copy_files(source: Path, target: Path, selects: Callable[[str], bool] | None = None) -> None:
    """Copy the regular files of a directory, or those with selected relative POSIX paths.

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
    """Write a file atomically; after the return, the file survives a power cut."""
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
    # The rename lasts only with its directory.
    os.fsync(directory)


def sync_tree(root: Path) -> None:
    """Force the entries of all directories below `root`, and its own, to disk."""
    for folder, _, _ in os.walk(root, topdown=False):
        sync_directory(Path(folder))


def _raise(error: OSError) -> None:
    raise error
