"""Checkpoints in directories of a local or shared file system: opened, marked, deleted safely."""

import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from paceline import faults
from paceline._base.files import (
    NotRegularFileError,
    open_directory_below,
    open_regular_below,
    opened_below,
    opened_directory,
    read_limited,
    replacing_below,
    sync_directory,
)
from paceline.storage import _checkpoint_files as _durable_files
from paceline.storage._checkpoint_files import (
    MANIFEST_NAME,
    MAX_TEXT_BYTES,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    FileEntry,
    Manifest,
    Selector,
    ShardDone,
    check_file_names,
    decode_done,
    decode_manifest,
    done_name,
    empty_directory,
    encode_with_checksum,
    made_below,
    newest_change,
    no_regular_file,
    sync_directories,
    walk_below,
)
from paceline.storage._checkpoint_storage import (
    OPEN_NAME,
    PROBE_BYTES,
    UUID_FORM,
    CheckpointStorage,
    UuidList,
    check_uuid,
    raise_if_damaged,
)


class CheckpointDirectory:
    """Reads and writes files of a checkpoint below the descriptor of its directory.

    No link is followed at any level, special files are refused, and nothing waits for others.

    Args:
        descriptor: The descriptor; the caller closes it.
        path: Where the directory is, for messages.
        has_one_owner: Whether files that belong to another user than the directory are refused.
    """

    def __init__(self, descriptor: int, path: Path, *, has_one_owner: bool) -> None:
        self.descriptor = descriptor
        self.path = path
        self.facts = os.fstat(descriptor)
        self._owners = [self.facts.st_uid] if has_one_owner else None

    def open(self, name: str) -> IO[bytes]:
        """Open a file for unbuffered reading.

        Raises:
            CheckpointCorruptError: It is a link or a special file, or belongs to another user.
            FileNotFoundError: There is no such file.
        """
        with refusing_links(self.path):
            return open_regular_below(self.descriptor, name, owners=self._owners)

    def has(self, name: str) -> bool:
        """Return whether something of a name is there."""
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def manifest(self) -> Manifest:
        """Return the checkpoint's manifest.

        Raises:
            CheckpointCorruptError: It is damaged, a link, or of another checkpoint.
            CheckpointVersionError: It has another format version.
            FileNotFoundError: There is none.
        """
        return decode_manifest(self._read(MANIFEST_NAME), self.path.name)

    def done(self, rank: int) -> ShardDone | None:
        """Return a rank's done file, None if there is none; raises like `manifest`."""
        try:
            data = self._read(done_name(rank))
        except FileNotFoundError:
            return None
        return decode_done(data, self.path.name, rank)

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the commit protocol durably.

        Where files belong to one user, it is given to the owner of the directory.
        """
        owner = None if self._owners is None else (self.facts.st_uid, self.facts.st_gid)
        _durable_files.write_durably_below(self.descriptor, name, data, owner=owner)

    def problems(self, files: Mapping[str, FileEntry]) -> dict[str, str]:
        """Return the problems of files by name, after comparing contents with the digests."""
        found = {name: self._problem(name, entry) for name, entry in files.items()}
        return {name: reason for name, reason in found.items() if reason is not None}

    def _problem(self, name: str, entry: FileEntry) -> str | None:
        try:
            with self.open(name) as file:
                return file_problem(file, entry)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return "is missing"
        except CheckpointCorruptError as error:
            return f"is none of the checkpoint's files ({error})"

    def _read(self, name: str) -> bytes:
        with self.open(name) as file, refusing_links(self.path):
            return read_limited(file, MAX_TEXT_BYTES)


def file_problem(file: IO[bytes], entry: FileEntry) -> str | None:
    """Return the problem of an open file, read from its beginning; None if intact."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        return entry.difference(FileEntry(size, ""))
    found = _durable_files.digest_stream(file)
    return None if found == entry else entry.difference(found)


@contextmanager
def opened_checkpoint(
    root: Path, uuid: str, *, has_one_owner: bool = False, owner: int | None = None
) -> Iterator[CheckpointDirectory]:
    """Yield the directory of a checkpoint; links in the path of the root are followed, once.

    Raises:
        CheckpointCorruptError: A link is in its place, or it belongs to another user than `owner`.
        FileNotFoundError: There is no such directory.
        NotADirectoryError: A file is there.
    """
    with refusing_links(root / uuid), opened_directory(root) as above:
        opened = opened_below(above, uuid)
        with opened as descriptor:
            found = os.fstat(descriptor).st_uid
            if owner is not None and found != owner:
                text = f"The directory must belong to user {owner}, not to user {found}"
                raise NotRegularFileError(errno.EPERM, text, str(root / uuid))
            yield CheckpointDirectory(descriptor, root / uuid, has_one_owner=has_one_owner)


@contextmanager
def refusing_links(path: Path) -> Iterator[None]:
    """Turn links and special files among a checkpoint's files into a clear error.

    Raises:
        CheckpointCorruptError: The body has met a link, a special file or a foreign file.
    """
    try:
        yield
    except NotRegularFileError as error:
        raise CheckpointCorruptError(
            f"Checkpoint {path.name} must consist of regular files and directories of one user, but"
            f" {error.filename!r} is something else ({error.strerror}). Hint: copy what it is to"
            " hold, and see who can write there."
        ) from error


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def mark_open(root: Path, uuid: str) -> None:
    """Mark a checkpoint's directory as created by Paceline and not complete yet."""
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
        # Mark of another rank, perhaps of another user: its time may not be ours to change.
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
    """Return the marked UUIDs, sorted."""
    names: list[str] = []
    with _missing_is_fine(), opened_directory(root) as above, opened_below(above, OPEN_NAME) as one:
        names = [name for name in os.listdir(one) if UUID_FORM.fullmatch(name)]
    return sorted(names)


def remove_leftover(
    root: Path, uuid: str, is_old: Callable[[float], bool], *, has_one_owner: bool
) -> bool:
    """Remove the remains of a marked checkpoint without a manifest, and the mark.

    Args:
        root: The directory of the storage.
        uuid: The checkpoint.
        is_old: Tells by the time of the last change, in seconds since the epoch, whether to.
        has_one_owner: Whether to only if the mark says this UUID, and belongs to the user of the
            directory.

    Returns:
        Whether the checkpoint is gone completely.
    """
    try:
        with opened_directory(root) as above, opened_below(above, OPEN_NAME) as markers:
            marked_s = os.stat(uuid, dir_fd=markers, follow_symlinks=False).st_mtime
            try:
                with opened_below(above, uuid) as directory:
                    if _has_manifest(directory):
                        mark_closed(root, uuid)
                        return False
                    if has_one_owner and not _is_owner_mark(markers, uuid, directory):
                        return False
                    if not is_old(newest_change(directory)):
                        return False
                    empty_directory(directory)
                os.rmdir(uuid, dir_fd=above)
            except FileNotFoundError:
                # Directory not made yet, or gone: the mark alone has an age.
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


def _is_owner_mark(markers: int, uuid: str, directory: int) -> bool:
    owner = os.fstat(directory).st_uid
    try:
        with open_regular_below(markers, uuid, owners=[owner]) as file:
            # Another user can make a hard link to a file of this owner.
            is_alone = os.fstat(file.fileno()).st_nlink == 1
            return is_alone and read_limited(file, len(uuid)) == uuid.encode()
    except OSError:
        return False


@contextmanager
def _missing_is_fine() -> Iterator[None]:
    with suppress(FileNotFoundError, NotADirectoryError, NotRegularFileError):
        yield


class NewDirectory(CheckpointDirectory):
    """The directory of a new checkpoint, or of one rank's part.

    Args:
        descriptor: The descriptor; the caller closes it.
        path: Where the directory is. A script writes to it by this path.
        parent: The descriptor of the directory that it is in.
    """

    def __init__(self, descriptor: int, path: Path, parent: int) -> None:
        super().__init__(descriptor, path, has_one_owner=False)
        self._parent = parent

    def check_place(self) -> None:
        """Refuse the written files if the directory may have moved.

        Raises:
            CheckpointWriteError: Something else is in the place of the directory.
        """
        with suppress(OSError):
            found = os.stat(self.path.name, dir_fd=self._parent, follow_symlinks=False)
            if os.path.samestat(found, self.facts):
                return
        raise CheckpointWriteError(
            f"The directory {str(self.path)!r} must stay in its place while a checkpoint is written"
            " to it, but was moved or replaced. Hint: see who can write there; the sticky bit"
            f" (chmod +t {self.path.parent}) forbids it to other users."
        )

    def copy_in(self, source: Path, name: str) -> FileEntry:
        """Copy a file durably."""
        folder, _, last = name.rpartition("/")
        with source.open("rb") as file, made_below(self.descriptor, folder) as parent:
            return _durable_files.copy_stream(file, Path(last), durable=True, directory=parent)

    def sealed(self) -> dict[str, FileEntry]:
        """Force the files to disk, and return their entries.

        Raises:
            CheckpointWriteError: Something else is in the place of the directory.
            ValueError: There is a link or a special file, or a name is one of the commit protocol.
        """
        self.check_place()
        with _durable_files.naming_files_below(self.path):
            names = []
            for found in walk_below(self.descriptor):
                if stat.S_ISREG(found.facts.st_mode):
                    names.append(found.path)
                elif not stat.S_ISDIR(found.facts.st_mode):
                    raise no_regular_file(found.path)
            return _durable_files.seal_files(self.descriptor, check_file_names(sorted(names)))

    def remove(self) -> None:
        """Remove the directory with its contents, as far as possible."""
        with suppress(OSError):
            empty_directory(self.descriptor)
            os.rmdir(self.path.name, dir_fd=self._parent)


@contextmanager
def made_directory(parent: int, path: Path, *, exist_ok: bool = False) -> Iterator[NewDirectory]:
    """Make a directory in another directory, and yield the new directory.

    Args:
        parent: The descriptor of the other one.
        path: The path of the directory.
        exist_ok: Whether another process may have made it.

    Raises:
        CheckpointWriteError: A link is there.
        FileExistsError: It exists.
    """
    with _durable_files.naming_files_below(path.parent):
        try:
            os.mkdir(path.name, dir_fd=parent)
        except FileExistsError:
            if not exist_ok:
                raise
        try:
            descriptor = open_directory_below(parent, path.name)
        except NotRegularFileError as error:
            raise CheckpointWriteError(
                f"The directory of checkpoint {path.name} must be no link, but {str(path)!r} is"
                " one. Hint: see who can write there."
            ) from error
    try:
        yield NewDirectory(descriptor, path, parent)
    finally:
        os.close(descriptor)


class DirectoryStorage(CheckpointStorage):
    """Keep each checkpoint under ``<root>/<uuid>/``.

    Links in the path of the root are followed. Below it, none is, and special files are refused.

    Args:
        root: The directory; it is made at the first write.
        has_one_owner: Whether files that belong to another user than the directory of their
            checkpoint are refused, and leftovers of checkpoints stay unless the user who began them
            owns them: for who reads and deletes for others.
        owner: The id of the user to whom the directories of checkpoints must belong; any by
            default.
    """

    def __init__(
        self, root: str | Path, *, has_one_owner: bool = False, owner: int | None = None
    ) -> None:
        self._root = Path(os.path.abspath(Path(root).expanduser()))
        self._has_one_owner = has_one_owner
        self._owner = owner
        self._made_here: dict[str, os.stat_result] = {}

    def __repr__(self) -> str:
        return f"DirectoryStorage({str(self._root)!r})"

    @property
    def root(self) -> Path:
        """Directory with the checkpoints, as an absolute path."""
        return self._root

    @property
    def local_root(self) -> Path:
        """Directory with the checkpoints, as an absolute path."""
        return self._root

    @property
    def url(self) -> str:
        """The absolute path of the directory."""
        return str(self._root)

    @contextmanager
    def store_path(self, uuid: str, *, rank: int = 0) -> Iterator[Path]:
        """Yield ``<root>/<uuid>/``, empty, and finish the shard afterwards."""
        with self._storing(uuid, is_shared=False) as directory:
            yield directory.path
            _finish_shard(directory, rank, directory.sealed())

    def copy_in(self, uuid: str, source: Path, *, rank: int = 0) -> None:
        """Copy a directory's files; a link to a regular file is copied as its target."""
        source = Path(source)
        if not source.is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be stored from a directory, but got {str(source)!r}."
            )
        names = check_file_names(_durable_files.list_files(source, follow_links=True))
        self._check_uncommitted(self._path(uuid), rank)
        # Several ranks may bring their shards of one checkpoint, each its own files.
        with self._storing(uuid, is_shared=True) as directory:
            entries: dict[str, FileEntry] = {}
            for name in names:
                if entries:
                    faults.reach("storage.between_files")
                entries[name] = directory.copy_in(source / name, name)
            _finish_shard(directory, rank, entries)

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a directory of its own within the checkpoint's; its files move up afterwards."""
        path = self._path(uuid)
        with ExitStack() as stack:
            with _durable_files.durable_write_errors(uuid, self._root):
                self._check_uncommitted(path, rank)
                directory = stack.enter_context(self._made(uuid, exist_ok=True))
                opened_own = made_directory(directory.descriptor, path / f".rank-{rank}")
                own = stack.enter_context(opened_own)
            faults.reach("storage.begun")
            try:
                with _durable_files.durable_write_errors(uuid, own.path):
                    yield own.path
                    directory.check_place()
                    entries = own.sealed()
                    _durable_files.move_files_up(own.descriptor, directory.descriptor, entries)
                    own.remove()
                    faults.reach("storage.before_done")
                    # Last: the done file vouches for files in their place.
                    _write_done(directory, rank, entries)
            except BaseException:
                own.remove()
                raise

    @contextmanager
    def _storing(self, uuid: str, *, is_shared: bool) -> Iterator[NewDirectory]:
        """Make the checkpoint's directory; remove the directory if the body fails."""
        with ExitStack() as stack:
            with _durable_files.durable_write_errors(uuid, self._root):
                directory = stack.enter_context(self._made(uuid, exist_ok=is_shared))
            faults.reach("storage.begun")
            try:
                with _durable_files.durable_write_errors(uuid, directory.path):
                    yield directory
            except BaseException:
                # Plain removal instead of `discard`: a user's file may have the manifest's name.
                directory.remove()
                mark_closed(self._root, uuid)
                raise

    @contextmanager
    def _made(self, uuid: str, *, exist_ok: bool) -> Iterator[NewDirectory]:
        """Make and yield the directory of a checkpoint."""
        path = self._path(uuid)
        self._make_root()
        with _durable_files.naming_files_below(self._root):
            mark_open(self._root, uuid)
        with (
            opened_directory(self._root) as root,
            made_directory(root, path, exist_ok=exist_ok) as directory,
        ):
            self._made_here[uuid] = directory.facts
            yield directory

    def _make_root(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
        self._root.mkdir(parents=True, exist_ok=True)
        # A power cut must not take the directory away from under a checkpoint that was committed.
        for path in missing:
            sync_directory(path.parent)

    def _check_uncommitted(self, path: Path, rank: int) -> None:
        if (path / MANIFEST_NAME).exists() or (path / done_name(rank)).exists():
            raise FileExistsError(
                f"A checkpoint is immutable, but {path.name} has a shard of rank {rank} already."
                " Hint: store under a new UUID."
            )

    def discard(self, uuid: str) -> None:
        """Remove the files of a checkpoint without a manifest.

        Another directory than this storage has made stays.
        """
        made = self._made_here.pop(uuid, None)
        with suppress(OSError, CheckpointCorruptError), self._opened(uuid) as directory:
            if directory.has(MANIFEST_NAME):
                return
            # A directory that somebody has put in its place is not ours to empty.
            if made is None or os.path.samestat(made, directory.facts):
                empty_directory(directory.descriptor)
                with opened_directory(self._root) as root:
                    os.rmdir(uuid, dir_fd=root)
        mark_closed(self._root, uuid)

    def manifest(self, uuid: str) -> Manifest:
        """Read ``manifest.json``."""
        try:
            with self._opened(uuid) as directory:
                return directory.manifest()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_found(uuid) from error

    def problems(self, manifest: Manifest) -> dict[str, str]:
        """Compare the size and digest of every file with the manifest's."""
        try:
            with self._opened(manifest.uuid) as directory:
                return directory.problems(manifest.files)
        except (FileNotFoundError, NotADirectoryError):
            return dict.fromkeys(manifest.files, "is missing")

    @contextmanager
    def restore_path(self, uuid: str, *, selects: Selector | None = None) -> Iterator[Path]:
        """Verify the checkpoint, yield its own directory, and check for changes afterwards."""
        manifest = self.manifest(uuid).selected(selects)
        raise_if_damaged(uuid, self.problems(manifest))
        path = self._path(uuid)
        before = {name: _file_state(path / name) for name in manifest.files}
        yield path
        is_touched = any(_file_state(path / name) != before[name] for name in before)
        # Somebody else may have deleted the whole checkpoint meanwhile.
        if is_touched and self.exists(uuid) and (changed := self.problems(manifest)):
            details = ", ".join(f"{name} {reason}" for name, reason in changed.items())
            raise CheckpointCorruptError(
                "The files of a checkpoint must stay as they are, but in the block of"
                f" `restore_path` {details}: checkpoint {uuid} can no longer be used. Hint:"
                " `download` gives a copy that may be changed."
            )

    def open_file(self, uuid: str, name: str) -> IO[bytes]:
        """Open a file of a checkpoint for unbuffered reading; nothing is verified.

        Raises:
            CheckpointCorruptError: It is a link, a special file, or one of a user who is refused.
            FileNotFoundError: There is no such file.
        """
        with self._opened(uuid) as directory:
            return directory.open(name)

    def read_file(self, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file of a checkpoint."""
        with self.open_file(uuid, name) as file:
            file.seek(offset)
            pieces = []
            while size and (piece := file.read(size)):
                pieces.append(piece)
                size -= len(piece)
        return b"".join(pieces)

    def download(self, uuid: str, target: Path, *, selects: Selector | None = None) -> Manifest:
        """Copy the files and compare the bytes read with the manifest."""
        manifest = self.manifest(uuid).selected(selects)
        target = Path(target)
        target.mkdir(parents=True, exist_ok=True)
        problems: dict[str, str] = {}
        for path, entry in manifest.files.items():
            try:
                with self.open_file(uuid, path) as file:
                    copied = _durable_files.copy_stream(file, target / path)
            except FileNotFoundError:
                problems[path] = "is missing"
                continue
            if copied != entry:
                problems[path] = "was altered"
        raise_if_damaged(uuid, problems)
        return manifest

    def delete(self, uuid: str) -> None:
        """Remove the manifest, then the files."""
        self._delete(uuid, lambda directory: None)

    def delete_checked(self, uuid: str, check: Callable[[Manifest], None]) -> None:
        """Remove the manifest, if readable and passing the check, then the files."""
        self._delete(uuid, lambda directory: check(directory.manifest()))

    def _delete(self, uuid: str, check: Callable[[CheckpointDirectory], None]) -> None:
        try:
            with self._opened(uuid) as directory:
                check(directory)
                if directory.has(MANIFEST_NAME):
                    mark_open(self._root, uuid)
                os.unlink(MANIFEST_NAME, dir_fd=directory.descriptor)
                # Removal of the manifest on disk first: no power cut leaves it without its files.
                os.fsync(directory.descriptor)
                faults.reach("storage.after_manifest_deleted")
                empty_directory(directory.descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_found(uuid, " to be deleted") from error
        with opened_directory(self._root) as root:
            os.rmdir(uuid, dir_fd=root)
        mark_closed(self._root, uuid)

    def _not_found(self, uuid: str, purpose: str = "") -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"Checkpoint {uuid} must be committed in {self.url!r}{purpose}, but there is none."
        )

    def replace_manifest(self, manifest: Manifest) -> None:
        """Replace ``manifest.json``, then remove the files no longer named there."""
        with (
            _durable_files.durable_write_errors(manifest.uuid, self._root),
            self._opened(manifest.uuid) as directory,
        ):
            directory.write(MANIFEST_NAME, encode_with_checksum(manifest))
        faults.reach("storage.after_manifest_replaced")
        with self._opened(manifest.uuid) as directory:
            for name in manifest.deleted:
                folder, _, last = name.rpartition("/")
                with (
                    suppress(FileNotFoundError),
                    opened_below(directory.descriptor, folder) as parent,
                ):
                    os.unlink(last, dir_fd=parent)

    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove marked checkpoints without a manifest and without recent changes."""
        now: list[float] = []

        def is_old(changed_s: float) -> bool:
            now[:] = now or [self._time_there()]
            return now[0] - changed_s >= older_than_s

        return [
            uuid
            for uuid in marked(self._root)
            if (among is None or uuid in among)
            and remove_leftover(self._root, uuid, is_old, has_one_owner=self._has_one_owner)
        ]

    def _time_there(self) -> float:
        """Return the file server's time: its clock stamps the changes of files."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._root, prefix=".clock-") as file:
                return Path(file.name).stat().st_mtime
        except OSError:
            return time.time()

    def probe(self) -> None:
        """Write, read and remove a file in the directory, which must be there."""
        name, data = f".probe-{uuid4()}", bytes(PROBE_BYTES)
        with opened_directory(self._root) as directory:
            with replacing_below(directory, name) as file:
                file.write(data)
            try:
                with open_regular_below(directory, name) as found:
                    is_same = found.read(len(data)) == data
            finally:
                os.unlink(name, dir_fd=directory)
        if not is_same:
            raise CheckpointError(f"{self._root} must give back what was written, but does not.")

    def list(self) -> UuidList:
        """Return the names of the directories with a manifest."""
        if not self._root.is_dir():
            return []
        names = sorted(name for name in os.listdir(self._root) if UUID_FORM.fullmatch(name))
        return [name for name in names if self._has_manifest(name)]

    def _has_manifest(self, uuid: str) -> bool:
        try:
            with self._opened(uuid) as directory:
                return directory.has(MANIFEST_NAME)
        except (OSError, CheckpointCorruptError):
            return False

    def _read_done(self, uuid: str, rank: int) -> ShardDone | None:
        try:
            with self._opened(uuid) as directory:
                return directory.done(rank)
        except FileNotFoundError:
            return None

    def _write_manifest(self, manifest: Manifest) -> None:
        faults.reach("storage.before_manifest")
        try:
            with _durable_files.durable_write_errors(manifest.uuid, self._root):
                with self._opened(manifest.uuid) as directory:
                    directory.write(MANIFEST_NAME, encode_with_checksum(manifest))
                # A power cut could otherwise take the checkpoint's own entry.
                sync_directory(self._root)
        except BaseException:
            self.discard(manifest.uuid)
            raise
        self._made_here.pop(manifest.uuid, None)
        faults.reach("storage.after_manifest")
        mark_closed(self._root, manifest.uuid)

    def _path(self, uuid: str) -> Path:
        return self._root / check_uuid(uuid)

    def _opened(self, uuid: str) -> AbstractContextManager[CheckpointDirectory]:
        return opened_checkpoint(
            self._root, check_uuid(uuid), has_one_owner=self._has_one_owner, owner=self._owner
        )


def _finish_shard(directory: NewDirectory, rank: int, entries: dict[str, FileEntry]) -> None:
    sync_directories(directory.descriptor)
    faults.reach("storage.before_done")
    _write_done(directory, rank, entries)


def _write_done(directory: NewDirectory, rank: int, entries: dict[str, FileEntry]) -> None:
    done = ShardDone(rank=rank, files=entries)
    directory.write(done_name(rank), encode_with_checksum(done))
    directory.check_place()
    faults.reach("storage.after_done")


def _file_state(path: Path) -> tuple[int, int] | None:
    """Return modification time and size to detect writes to a file; None if the file is gone."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_mtime_ns, facts.st_size
