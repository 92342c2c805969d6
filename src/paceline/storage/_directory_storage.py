"""Checkpoints in a directory of a local or shared file system."""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline import faults
from paceline._atomic_files import sync_directory
from paceline.storage import _durable_files
from paceline.storage._checkpoint_storage import (
    CheckpointStorage,
    UuidList,
    check_uuid,
    raise_if_damaged,
)
from paceline.storage._errors import CheckpointCorruptError, CheckpointNotFoundError
from paceline.storage._manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Selector,
    ShardDone,
    check_file_names,
    decode_done,
    decode_manifest,
    done_name,
    encode_with_checksum,
)

# One empty file per checkpoint that was begun, or whose deletion was, and is not finished.
OPEN_NAME = ".open"


class DirectoryStorage(CheckpointStorage):
    """Keep each checkpoint under ``<root>/<uuid>/``.

    Args:
        root: The directory; it is made at the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(os.path.abspath(Path(root).expanduser()))

    def __repr__(self) -> str:
        return f"DirectoryStorage({str(self._root)!r})"

    @property
    def root(self) -> Path:
        """The directory that holds the checkpoints, as an absolute path."""
        return self._root

    @property
    def local_root(self) -> Path:
        """The directory that holds the checkpoints, as an absolute path."""
        return self._root

    @property
    def url(self) -> str:
        """The absolute path of the directory."""
        return str(self._root)

    @contextmanager
    def store_path(self, uuid: str, *, rank: int = 0) -> Iterator[Path]:
        """Yield ``<root>/<uuid>/``, empty, and finish the shard afterwards."""
        with self._storing(uuid, is_shared=False) as path:
            yield path
            names = check_file_names(_durable_files.list_files(path))
            self._finish_shard(path, rank, _durable_files.seal_files(path, names))

    def copy_in(self, uuid: str, source: Path, *, rank: int = 0) -> None:
        """Copy a directory's files; links to regular files are copied as what they refer to."""
        source = Path(source)
        if not source.is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be stored from a directory, but got {str(source)!r}."
            )
        names = check_file_names(_durable_files.list_files(source, follow_links=True))
        self._check_uncommitted(self._path(uuid), rank)
        # Several ranks may bring their shards of one checkpoint, each its own files.
        with self._storing(uuid, is_shared=True) as path:
            entries: dict[str, FileEntry] = {}
            for name in names:
                if entries:
                    faults.reach("storage.between_files")
                entries[name] = _durable_files.copy_file(source / name, path / name, durable=True)
            self._finish_shard(path, rank, entries)

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a directory of its own within the checkpoint's; its files move up afterwards."""
        path = self._path(uuid)
        own = path / f".rank-{rank}"
        with _durable_files.durable_write_errors(uuid, self._root):
            self._check_uncommitted(path, rank)
            self._make_root()
            self._mark_open(uuid)
            own.mkdir(parents=True)
        faults.reach("storage.begun")
        try:
            with _durable_files.durable_write_errors(uuid, own):
                yield own
                entries = _durable_files.seal_files(
                    own, check_file_names(_durable_files.list_files(own))
                )
                _move_files_up_in_directory(own, path, entries)
                faults.reach("storage.before_done")
                self._write_done(path, rank, entries)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise

    @contextmanager
    def _storing(self, uuid: str, *, is_shared: bool) -> Iterator[Path]:
        """Make the checkpoint's directory; remove it if the body fails."""
        path = self._path(uuid)
        with _durable_files.durable_write_errors(uuid, self._root):
            self._make_root()
            self._mark_open(uuid)
            path.mkdir(exist_ok=is_shared)
        faults.reach("storage.begun")
        try:
            with _durable_files.durable_write_errors(uuid, path):
                yield path
        except BaseException:
            # Not `discard`: a file of the user's may be named like a manifest.
            shutil.rmtree(path, ignore_errors=True)
            self._mark_closed(uuid)
            raise

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

    def _finish_shard(self, path: Path, rank: int, entries: dict[str, FileEntry]) -> None:
        _durable_files.sync_tree(path)
        faults.reach("storage.before_done")
        self._write_done(path, rank, entries)

    def _write_done(self, path: Path, rank: int, entries: dict[str, FileEntry]) -> None:
        done = ShardDone(rank=rank, files=entries)
        _durable_files.write_durably(path / done_name(rank), encode_with_checksum(done))
        faults.reach("storage.after_done")

    def discard(self, uuid: str) -> None:
        """Remove what is there of a checkpoint that has no manifest."""
        path = self._path(uuid)
        if not (path / MANIFEST_NAME).exists():
            shutil.rmtree(path, ignore_errors=True)
            self._mark_closed(uuid)

    def manifest(self, uuid: str) -> Manifest:
        """Read ``manifest.json``."""
        try:
            data = (self._path(uuid) / MANIFEST_NAME).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(
                f"Checkpoint {uuid} must be committed in {self.url!r}, but there is none."
            ) from error
        return decode_manifest(data, uuid)

    def problems(self, manifest: Manifest) -> dict[str, str]:
        """Compare the size and digest of every file with the manifest's."""
        root = self._path(manifest.uuid)
        reasons = {
            path: _problem_of_file(root / path, entry) for path, entry in manifest.files.items()
        }
        return {path: reason for path, reason in reasons.items() if reason is not None}

    @contextmanager
    def restore_path(self, uuid: str, *, selects: Selector | None = None) -> Iterator[Path]:
        """Verify the checkpoint, yield its own directory, and see that it stayed whole."""
        manifest = self.manifest(uuid).selected(selects)
        raise_if_damaged(uuid, self.problems(manifest))
        path = self._path(uuid)
        before = {name: _state_of_file(path / name) for name in manifest.files}
        yield path
        is_touched = any(_state_of_file(path / name) != before[name] for name in before)
        # Somebody else may have deleted the whole checkpoint meanwhile.
        if is_touched and self.exists(uuid) and (changed := self.problems(manifest)):
            details = ", ".join(f"{name} {reason}" for name, reason in changed.items())
            raise CheckpointCorruptError(
                "The files of a checkpoint must stay as they are, but in the block of"
                f" `restore_path` {details}: checkpoint {uuid} can no longer be used. Hint:"
                " `download` gives a copy that may be changed."
            )

    def read_file(self, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file of a checkpoint."""
        with (self._path(uuid) / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def download(self, uuid: str, target: Path, *, selects: Selector | None = None) -> Manifest:
        """Copy the files and compare what was read with the manifest."""
        manifest = self.manifest(uuid).selected(selects)
        root = self._path(uuid)
        target = Path(target)
        target.mkdir(parents=True, exist_ok=True)
        problems: dict[str, str] = {}
        for path, entry in manifest.files.items():
            try:
                copied = _durable_files.copy_file(root / path, target / path)
            except FileNotFoundError:
                problems[path] = "is missing"
                continue
            if copied != entry:
                problems[path] = "was altered"
        raise_if_damaged(uuid, problems)
        return manifest

    def delete(self, uuid: str) -> None:
        """Remove the manifest, then the files."""
        path = self._path(uuid)
        if (path / MANIFEST_NAME).exists():
            self._mark_open(uuid)
        try:
            (path / MANIFEST_NAME).unlink()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(
                f"Checkpoint {uuid} must be committed in {self.url!r} to be deleted, but there is"
                " none."
            ) from error
        sync_directory(path)
        faults.reach("storage.after_manifest_deleted")
        shutil.rmtree(path)
        self._mark_closed(uuid)

    def replace_manifest(self, manifest: Manifest) -> None:
        """Replace ``manifest.json``, then remove the files that it does not name any more."""
        root = self._path(manifest.uuid)
        with _durable_files.durable_write_errors(manifest.uuid, self._root):
            _durable_files.write_durably(root / MANIFEST_NAME, encode_with_checksum(manifest))
        faults.reach("storage.after_manifest_replaced")
        for name in manifest.deleted:
            (root / name).unlink(missing_ok=True)

    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove what was begun or being deleted here, has no manifest and is old enough."""
        swept = []
        now = None
        markers = self._root / OPEN_NAME
        for marker in sorted(markers.iterdir()) if markers.is_dir() else ():
            if among is not None and marker.name not in among:
                continue
            path = self._path(marker.name)
            if (path / MANIFEST_NAME).exists():
                self._mark_closed(marker.name)
                continue
            changed = (
                _durable_files.newest_change(path) if path.is_dir() else marker.stat().st_mtime
            )
            now = self._time_there() if now is None else now
            if now - changed >= older_than_s:
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    continue  # Something in it cannot be removed now.
                self._mark_closed(marker.name)
                swept.append(marker.name)
        return swept

    def _time_there(self) -> float:
        """Return the time by the clock of the file server, which tells when files have changed."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._root, prefix=".clock-") as file:
                return Path(file.name).stat().st_mtime
        except OSError:
            return time.time()

    def _mark_open(self, uuid: str) -> None:
        """Note that a directory is ours and not whole: others may keep UUIDs here as well."""
        marker = self._root / OPEN_NAME / check_uuid(uuid)
        while True:
            marker.parent.mkdir(exist_ok=True)
            try:
                marker.touch()
            except FileNotFoundError:
                continue  # another process has just removed the empty directory
            return

    def _mark_closed(self, uuid: str) -> None:
        marker = self._root / OPEN_NAME / uuid
        marker.unlink(missing_ok=True)
        with suppress(OSError):  # there are others
            marker.parent.rmdir()

    def list(self) -> UuidList:
        """Return the names of the directories that have a manifest."""
        return [p.name for p in self._checkpoint_directories() if (p / MANIFEST_NAME).exists()]

    def _checkpoint_directories(self) -> Iterator[Path]:
        if self._root.is_dir():
            yield from sorted(path for path in self._root.iterdir() if path.is_dir())

    def _read_done(self, uuid: str, rank: int) -> ShardDone | None:
        try:
            data = (self._path(uuid) / done_name(rank)).read_bytes()
        except FileNotFoundError:
            return None
        return decode_done(data, uuid, rank)

    def _write_manifest(self, manifest: Manifest) -> None:
        path = self._path(manifest.uuid)
        faults.reach("storage.before_manifest")
        try:
            with _durable_files.durable_write_errors(manifest.uuid, self._root):
                _durable_files.write_durably(path / MANIFEST_NAME, encode_with_checksum(manifest))
                sync_directory(self._root)
        except BaseException:
            self.discard(manifest.uuid)
            raise
        faults.reach("storage.after_manifest")
        self._mark_closed(manifest.uuid)

    def _path(self, uuid: str) -> Path:
        return self._root / check_uuid(uuid)


def _state_of_file(path: Path) -> tuple[int, int] | None:
    """Return what differs once a file was written to; None if it is gone."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_mtime_ns, facts.st_size


def _problem_of_file(path: Path, entry: FileEntry) -> str | None:
    try:
        found = _durable_files.digest_file(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return "is missing"
    return None if found == entry else entry.difference(found)


def _move_files_up_in_directory(own: Path, path: Path, entries: Mapping[str, FileEntry]) -> None:
    """Move a rank's files to where the checkpoint has them.

    If two ranks do so at once with one name, the commit finds out.
    """
    folders = {path}
    for name, entry in entries.items():
        target = path / name
        if target.exists():
            if target.is_file() and _durable_files.digest_file(target) == entry:
                continue
            raise FileExistsError(
                "Files that several ranks store must have different names or the same content, but"
                f" another {name!r} is there already."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            faults.reach("storage.before_move")
            (own / name).rename(target)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            # Another rank may have made it since it was looked at.
            is_file = isinstance(error, IsADirectoryError)
            other = "a directory of" if is_file else "below the file of"
            raise FileExistsError(
                "What several ranks store must be a file or a directory on all of them, but"
                f" {name!r} is {other} another rank."
            ) from error
        inner = Path(name).parents[:-1]  # all but the checkpoint's own directory
        folders.update(path / folder for folder in inner)
    shutil.rmtree(own)
    # Not the whole tree: directories of other ranks come and go meanwhile.
    for folder in folders:
        sync_directory(folder)
