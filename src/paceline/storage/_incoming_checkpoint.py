"""Incoming checkpoint: its files arrive in pieces from another machine."""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from paceline import faults
from paceline._base.files import NotRegularFileError, opened_below, opened_directory, sync_directory
from paceline.storage import _checkpoint_errors, _checkpoint_files
from paceline.storage._checkpoint_errors import CheckpointWriteError
from paceline.storage._checkpoint_storage import check_uuid
from paceline.storage._directory_storage import DirectoryStorage

faults.register("storage.piece_written", "storage.before_moved_in")

_INCOMING_NAME = ".incoming"
_NEW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_BITS_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class IncomingCheckpoint:
    """Gathers a checkpoint's files below ``<root>/.incoming/<sender>/<uuid>/``, then commits.

    Files can be sent in any order. Files received before a crash are kept, and sending resumes from
    there. A commit compares every file with the manifest and moves the directory to its place, as
    if this machine had stored the checkpoint. Safe in any thread and process. Other users who may
    write to the storage cannot change received files.

    Args:
        storage: Where the checkpoint is to be.
        sender: The sender, as part of a file name: files of other senders are apart.
        manifest: The text of ``manifest.json``; None for a sender that brings some ranks' files of
            a checkpoint, which another sender of this name commits.
        shards: The text of ``rank-<n>.done`` by rank.

    Raises:
        CheckpointCorruptError: A text is damaged, or belongs to another checkpoint.
        ValueError: A name cannot belong to a checkpoint's file, or the texts are too large.
    """

    def __init__(
        self,
        storage: DirectoryStorage,
        sender: str,
        uuid: str,
        manifest: bytes | None,
        shards: Mapping[int, bytes],
    ) -> None:
        self._uuid = check_uuid(uuid)
        if (num_bytes := sum(map(len, shards.values()))) > _checkpoint_files.MAX_TEXT_BYTES:
            raise ValueError(
                f"The done files of checkpoint {uuid} must have at most"
                f" {_checkpoint_files.MAX_TEXT_BYTES} bytes in all, but have {num_bytes}."
            )
        self.files: dict[str, _checkpoint_files.FileEntry] = {}
        for rank, text in shards.items():
            self.files |= _checkpoint_files.decode_done(text, uuid, rank).files
        self._texts = {
            _checkpoint_files.done_name(rank): text for rank, text in sorted(shards.items())
        }
        self._manifest = (
            None if manifest is None else _checkpoint_files.decode_manifest(manifest, uuid)
        )
        if self._manifest is not None and manifest is not None:
            self.files = self._manifest.files
            # Last: without it, there is no checkpoint.
            self._texts[_checkpoint_files.MANIFEST_NAME] = manifest
        _checkpoint_files.check_file_names(list(map(_check_name, self.files)))
        self._storage = storage
        self._sender = check_uuid(sender)
        self._path = storage.root / _INCOMING_NAME / sender / uuid

    @property
    def storage_url(self) -> str:
        """The URL of the storage where the checkpoint is to be."""
        return self._storage.url

    @property
    def manifest(self) -> _checkpoint_files.Manifest:
        """The manifest of the checkpoint."""
        assert self._manifest is not None
        return self._manifest

    def missing(self) -> dict[str, int]:
        """Return the bytes present of each file still below its full size."""
        sizes: dict[str, int | None] = dict.fromkeys(self.files)
        with suppress(FileNotFoundError), self._opened() as directory:
            for name, entry in self.files.items():
                sizes[name] = _size(directory, name, entry.size)
        return {
            name: sizes[name] or 0
            for name, entry in self.files.items()
            if sizes[name] != entry.size
        }

    def write(self, name: str, offset: int, data: bytes) -> int:
        """Append a piece to a file, and return the size of the file then.

        A piece with another offset than the present size changes nothing.

        Raises:
            ValueError: The manifest has no such file, or the file would be larger than it says.
            BlockingIOError: Somebody else writes to the file now.
            CheckpointWriteError: The disk is full or broken; earlier files stay.
        """
        entry = self.files.get(name)
        if entry is None or offset + len(data) > entry.size:
            raise ValueError(
                f"Checkpoint {self._uuid} must get what its manifest names, but got"
                f" {len(data)} bytes at {offset} of {name!r}."
            )
        with self._writing(name.rpartition("/")[0]) as directory:

            def opener(path: str, flags: int) -> int:
                return os.open(path, flags | _NEW, 0o666, dir_fd=directory)

            with open(PurePosixPath(name).name, "ab", buffering=0, opener=opener) as file:
                # Lock of the file: a repeated request must not append the same piece a second time.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = os.fstat(file.fileno()).st_size
                if size == offset:
                    try:
                        size += _write_all(file.fileno(), data)
                    except BaseException:
                        # Torn piece removed: the size of the file is the offset of the next piece.
                        file.truncate(offset)
                        raise
        faults.reach("storage.piece_written")
        return size

    def seal(self) -> dict[str, str]:
        """Force all files to disk and compare them with the manifest, once nothing is missing.

        Returns:
            Problems of files, by name: these files are removed.

        Raises:
            CheckpointWriteError: The disk is full or broken.
        """
        files = self.manifest.files
        with self._writing() as directory:
            found = _checkpoint_files.seal_files(directory, list(files))
            problems = {
                name: entry.difference(found[name])
                for name, entry in files.items()
                if found[name] != entry
            }
            for name in _checkpoint_files.files_below(directory):
                # Stray files of an earlier manifest: they must not become part of the checkpoint.
                if name in problems or name not in files:
                    os.unlink(name, dir_fd=directory)
            if not problems:
                _checkpoint_files.sync_directories(directory)
                for name, text in self._texts.items():
                    _checkpoint_files.write_durably_below(directory, name, text)
        return problems

    def commit(self) -> None:
        """Move the checkpoint to its place once sealed; an existing checkpoint stays.

        Raises:
            CheckpointWriteError: The disk is full or broken.
        """
        uuid = self._uuid
        if not self._storage.exists(uuid):
            faults.reach("storage.before_moved_in")
            with _checkpoint_errors.durable_write_errors(uuid, self._storage.root):
                with _opened_incoming(self._storage.root) as (above, incoming):
                    place = f"{self._sender}/{uuid}"
                    # A single rename: nobody ever sees a part of the checkpoint.
                    os.rename(place, uuid, src_dir_fd=incoming, dst_dir_fd=above)
                sync_directory(self._storage.root)
        self.forget()

    def forget(self) -> None:
        """Remove the files arrived so far."""
        with suppress(OSError), _opened_incoming(self._storage.root) as (above, incoming):
            with suppress(OSError), opened_below(incoming, self._sender) as senders:
                _checkpoint_files.remove_below(senders, self._uuid)
            os.rmdir(self._sender, dir_fd=incoming)  # unless there are others
            os.rmdir(_INCOMING_NAME, dir_fd=above)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield the descriptor of the directory with the arrived files."""
        place = f"{self._sender}/{self._uuid}"
        with (
            _opened_incoming(self._storage.root) as (_, incoming),
            opened_below(incoming, place) as directory,
        ):
            yield directory

    @contextmanager
    def _writing(self, folder: str = "") -> Iterator[int]:
        """Yield the descriptor of a folder below the arrived files, made if missing."""
        root = self._storage.root
        existing = next(path for path in (root, *root.parents) if path.is_dir())
        with (
            _checkpoint_errors.durable_write_errors(self._uuid, existing),
            _checkpoint_errors.naming_files_below(self._path / folder),
        ):
            root.mkdir(parents=True, exist_ok=True)
            # Partial files are for their owner only.
            with suppress(FileExistsError):
                (root / _INCOMING_NAME).mkdir(mode=0o700)
            with _opened_incoming(root) as (_, incoming):
                place = PurePosixPath(self._sender, self._uuid, folder)
                with _checkpoint_files.made_below(incoming, str(place)) as directory:
                    yield directory


def forget_incoming(root: Path, is_wanted: Callable[[str], bool]) -> None:
    """Remove the arrived files of senders no longer wanted from a storage."""
    with suppress(OSError), _opened_incoming(root) as (above, incoming):
        for sender in sorted(os.listdir(incoming)):
            if not is_wanted(sender):
                with suppress(OSError):
                    _checkpoint_files.remove_below(incoming, sender)
        os.rmdir(_INCOMING_NAME, dir_fd=above)


@contextmanager
def _opened_incoming(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptors of a storage and of its private directory for arrived files.

    Raises:
        CheckpointWriteError: Others can write to it, such as through a link.
        FileNotFoundError: It is not there.
    """
    with ExitStack() as stack:
        try:
            above = stack.enter_context(opened_directory(root))
            incoming = stack.enter_context(opened_below(above, _INCOMING_NAME))
            if not _is_ours_alone(incoming):
                raise NotRegularFileError(
                    errno.EPERM, "It must belong to this user alone", _INCOMING_NAME
                )
        except (NotRegularFileError, NotADirectoryError) as error:
            raise CheckpointWriteError(
                f"{str(root / _INCOMING_NAME)!r} must be a directory that only this user can write"
                f" to, but is not ({error.strerror}). Hint: remove it."
            ) from error
        yield above, incoming


def _is_ours_alone(directory: int) -> bool:
    facts = os.fstat(directory)
    if facts.st_mode & _WRITE_BITS_OF_OTHERS:
        return False
    if facts.st_uid == os.geteuid():
        return True
    # A file server may know this user by another id.
    name = f".owner-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | _NEW, 0o600, dir_fd=directory)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == facts.st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)


def _size(directory: int, name: str, wanted: int) -> int | None:
    try:
        size = os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    if size > wanted:
        os.unlink(name, dir_fd=directory)  # of an earlier manifest
        return None
    return size


def _check_name(name: str) -> str:
    parts = name.split("/")
    is_plain = PurePosixPath(name).as_posix() == name and "\0" not in name
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"A file of a checkpoint must have a relative path, but got {name!r}.")
    return name


def _write_all(descriptor: int, data: bytes) -> int:
    left = memoryview(data)
    while left:
        num_written = os.write(descriptor, left)
        # Writing nothing again and again would never end.
        if not num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[num_written:]
    return len(data)
