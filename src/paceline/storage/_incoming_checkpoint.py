"""A checkpoint whose files arrive in pieces from another machine."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from paceline import faults
from paceline._atomic_files import sync_directory
from paceline.storage import _durable_files
from paceline.storage._checkpoint_storage import check_uuid
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    check_file_names,
    decode_done,
    decode_manifest,
    done_name,
)

faults.register("storage.piece_written", "storage.before_moved_in")

_INCOMING_NAME = ".incoming"


class IncomingCheckpoint:
    """Gather a checkpoint's files below ``<root>/.incoming/<sender>/<uuid>/``, then commit it.

    Files can be sent in any order. What is there after a crash is kept, and sending goes on from
    there. A commit compares every file with the manifest and moves the directory to its place, so
    that it is as if this machine had stored the checkpoint. For any thread and process.

    Args:
        storage: Where the checkpoint is to be.
        sender: Whose it is, as part of a file name: what others send is apart.
        manifest: The text of ``manifest.json``; None for a sender that brings some ranks' files of
            a checkpoint, which another sender of this name commits.
        shards: The text of ``rank-<n>.done`` by rank.

    Raises:
        CheckpointCorruptError: A text is damaged, or belongs to another checkpoint.
        ValueError: A name cannot be that of a checkpoint's file.
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
        self.files: dict[str, FileEntry] = {}
        for rank, text in shards.items():
            self.files |= decode_done(text, uuid, rank).files
        self._texts = {done_name(rank): text for rank, text in sorted(shards.items())}
        self._manifest = None if manifest is None else decode_manifest(manifest, uuid)
        if self._manifest is not None and manifest is not None:
            self.files = self._manifest.files
            # Last: without it, there is no checkpoint.
            self._texts[MANIFEST_NAME] = manifest
        check_file_names(list(map(_check_name, self.files)))
        self._storage = storage
        self._path = storage.root / _INCOMING_NAME / check_uuid(sender) / uuid

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint."""
        assert self._manifest is not None
        return self._manifest

    def missing(self) -> dict[str, int]:
        """Return how many bytes are there of each file that does not have its size."""
        sizes = {name: self._size(name, entry.size) for name, entry in self.files.items()}
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
            CheckpointWriteError: The disk is full or broken; what was there before stays.
        """
        entry = self.files.get(name)
        if entry is None or offset + len(data) > entry.size:
            raise ValueError(
                f"Checkpoint {self._uuid} must get what its manifest names, but got"
                f" {len(data)} bytes at {offset} of {name!r}."
            )
        path = self._path / name
        with _durable_files.durable_write_errors(self._uuid, self._existing_root()):
            self._make_directory(path.parent)
            with open(path, "ab", buffering=0, opener=_open_new) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = os.fstat(file.fileno()).st_size
                if size == offset:
                    try:
                        size += _write_all(file.fileno(), data)
                    except BaseException:
                        file.truncate(offset)
                        raise
        faults.reach("storage.piece_written")
        return size

    def seal(self) -> dict[str, str]:
        """Force all files to disk and compare them with the manifest, once nothing is missing.

        Returns:
            What is wrong with files, by their name: these are removed.

        Raises:
            CheckpointWriteError: The disk is full or broken.
        """
        files = self.manifest.files
        with _durable_files.durable_write_errors(self._uuid, self._existing_root()):
            self._make_directory(self._path)
            found = _durable_files.seal_files(self._path, list(files))
            problems = {
                name: entry.difference(found[name])
                for name, entry in files.items()
                if found[name] != entry
            }
            for name in _durable_files.list_files(self._path):
                if name in problems or name not in files:
                    (self._path / name).unlink()
            if not problems:
                _durable_files.sync_tree(self._path)
                for name, text in self._texts.items():
                    _durable_files.write_durably(self._path / name, text)
        return problems

    def commit(self) -> None:
        """Make the checkpoint exist once it is sealed; one that exists already stays.

        Raises:
            CheckpointWriteError: The disk is full or broken.
        """
        uuid = self._uuid
        if not self._storage.exists(uuid):
            faults.reach("storage.before_moved_in")
            with _durable_files.durable_write_errors(uuid, self._storage.root):
                os.rename(self._path, self._storage.root / uuid)
                sync_directory(self._storage.root)
        self.forget()

    def forget(self) -> None:
        """Remove what has arrived."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._remove_empty()

    def _size(self, name: str, wanted: int) -> int | None:
        path = self._path / name
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        if size > wanted:
            path.unlink()  # of an earlier manifest
            return None
        return size

    def _make_directory(self, path: Path) -> None:
        # Nobody else needs to see what is not whole.
        incoming = self._storage.root / _INCOMING_NAME
        if not path.is_dir():
            self._storage.root.mkdir(parents=True, exist_ok=True)
            incoming.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(parents=True, exist_ok=True)

    def _existing_root(self) -> Path:
        root = self._storage.root
        return next(path for path in (root, *root.parents) if path.is_dir())

    def _remove_empty(self) -> None:
        for path in (self._path.parent, self._path.parent.parent):
            with suppress(OSError):  # there are others
                path.rmdir()


def forget_incoming(root: Path, is_wanted: Callable[[str], bool]) -> None:
    """Remove what has arrived in a storage from senders that are not wanted any more."""
    incoming = root / _INCOMING_NAME
    for path in sorted(incoming.iterdir()) if incoming.is_dir() else ():
        if not is_wanted(path.name):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        incoming.rmdir()


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
        if not num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[num_written:]
    return len(data)


def _open_new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
