"""Directory of a checkpoint below a descriptor: made, opened and marked, safe from links."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from paceline import faults
from paceline._base.files import (
    NotRegularFileError,
    open_directory_below,
    open_regular_below,
    opened_below,
    opened_directory,
    read_limited,
)
from paceline.storage import _checkpoint_errors, _checkpoint_files
from paceline.storage._checkpoint_errors import CheckpointCorruptError, CheckpointWriteError
from paceline.storage._checkpoint_storage import OPEN_NAME, UUID_FORM, check_uuid


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

    def manifest(self) -> _checkpoint_files.Manifest:
        """Return the checkpoint's manifest.

        Raises:
            CheckpointCorruptError: It is damaged, a link, or of another checkpoint.
            CheckpointVersionError: It has another format version.
            FileNotFoundError: There is none.
        """
        return _checkpoint_files.decode_manifest(
            self._read(_checkpoint_files.MANIFEST_NAME), self.path.name
        )

    def done(self, rank: int) -> _checkpoint_files.ShardDone | None:
        """Return a rank's done file, None if there is none; raises like `manifest`."""
        try:
            data = self._read(_checkpoint_files.done_name(rank))
        except FileNotFoundError:
            return None
        return _checkpoint_files.decode_done(data, self.path.name, rank)

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the commit protocol durably.

        Where files belong to one user, it is given to the owner of the directory.
        """
        owner = None if self._owners is None else (self.facts.st_uid, self.facts.st_gid)
        _checkpoint_files.write_durably_below(self.descriptor, name, data, owner=owner)

    def problems(self, files: Mapping[str, _checkpoint_files.FileEntry]) -> dict[str, str]:
        """Return the problems of files by name, after comparing contents with the digests."""
        found = {name: self._problem(name, entry) for name, entry in files.items()}
        return {name: reason for name, reason in found.items() if reason is not None}

    def _problem(self, name: str, entry: _checkpoint_files.FileEntry) -> str | None:
        try:
            with self.open(name) as file:
                return file_problem(file, entry)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return "is missing"
        except CheckpointCorruptError as error:
            return f"is none of the checkpoint's files ({error})"

    def _read(self, name: str) -> bytes:
        with self.open(name) as file, refusing_links(self.path):
            return read_limited(file, _checkpoint_files.MAX_TEXT_BYTES)


def file_problem(file: IO[bytes], entry: _checkpoint_files.FileEntry) -> str | None:
    """Return the problem of an open file, read from its beginning; None if intact."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        return entry.difference(_checkpoint_files.FileEntry(size, ""))
    found = _checkpoint_files.digest_stream(file)
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
                    if not is_old(_checkpoint_files.newest_change(directory)):
                        return False
                    _checkpoint_files.empty_directory(directory)
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
        os.stat(_checkpoint_files.MANIFEST_NAME, dir_fd=directory, follow_symlinks=False)
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
    """Directory of a new checkpoint, or of a rank's part.

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

    def copy_in(self, source: Path, name: str) -> _checkpoint_files.FileEntry:
        """Copy a file durably."""
        folder, _, last = name.rpartition("/")
        with (
            source.open("rb") as file,
            _checkpoint_files.made_below(self.descriptor, folder) as parent,
        ):
            return _checkpoint_files.copy_stream(file, Path(last), durable=True, directory=parent)

    def sealed(self) -> dict[str, _checkpoint_files.FileEntry]:
        """Force the files to disk, and return their entries.

        Raises:
            CheckpointWriteError: Something else is in the place of the directory.
            ValueError: There is a link or a special file, or a name is one of the commit protocol.
        """
        self.check_place()
        with _checkpoint_errors.naming_files_below(self.path):
            names = []
            for found in _checkpoint_files.walk_below(self.descriptor):
                if stat.S_ISREG(found.facts.st_mode):
                    names.append(found.path)
                elif not stat.S_ISDIR(found.facts.st_mode):
                    raise _checkpoint_files.no_regular_file(found.path)
            return _checkpoint_files.seal_files(
                self.descriptor, _checkpoint_files.check_file_names(sorted(names))
            )

    def remove(self) -> None:
        """Remove the directory with its contents, as far as possible."""
        with suppress(OSError):
            _checkpoint_files.empty_directory(self.descriptor)
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
    with _checkpoint_errors.naming_files_below(path.parent):
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


def move_files_up(
    own: int, directory: int, entries: Mapping[str, _checkpoint_files.FileEntry]
) -> None:
    """Move a rank's files to where the checkpoint has them.

    If two ranks use one name at the same time, the commit notices.

    Args:
        own: The descriptor of the rank's directory.
        directory: The directory of the checkpoint.
        entries: The files.
    """
    folders = {""}
    for name, entry in entries.items():
        folder, _, last = name.rpartition("/")
        try:
            with (
                _checkpoint_files.made_below(directory, folder) as target,
                opened_below(own, folder) as source,
            ):
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
    _checkpoint_files.empty_directory(own)
    # Folders of this rank only: directories of other ranks come and go meanwhile.
    for folder in folders:
        with opened_below(directory, folder) as each:
            os.fsync(each)


def _is_there(target: int, last: str, name: str, entry: _checkpoint_files.FileEntry) -> bool:
    """Return whether a file is in a directory already.

    Raises:
        FileExistsError: Another one is.
    """
    try:
        mode = os.stat(last, dir_fd=target, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISREG(mode):
        with open_regular_below(target, last) as file:
            if _checkpoint_files.digest_stream(file) == entry:
                return True
    raise FileExistsError(
        "Files that several ranks store must have different names or the same content, but"
        f" another {name!r} is there already."
    )
