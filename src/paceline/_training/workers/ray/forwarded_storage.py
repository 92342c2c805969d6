"""Driver's checkpoint storage for workers on nodes without access: both sides."""

import errno
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from paceline._base.run_directory import Control, RunDirectory, RunInfo
from paceline._training.workers.channels import DriverLink
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
)
from paceline.storage._checkpoint_files import Manifest, Selector
from paceline.storage._checkpoint_storage import CheckpointStorage, UuidList
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_from_url import storage_from

# Size of the pieces in memory, here and in the driver.
_CHUNK_BYTES = 4 * 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ForwardedRun(RunDirectory):
    """Run directory of the driver, for a worker to note its checkpoints.

    Args:
        path: The run directory.
        link: Leads to the driver, whose handler is a `StorageRequests`.
    """

    def __init__(self, path: Path, link: DriverLink) -> None:
        super().__init__(path)
        self._link = link

    def read_info(self) -> RunInfo:
        """Have the driver read `run.json`."""
        info: RunInfo = self._link.ask("read_info", str(self.path))
        return info

    def note_checkpoint(self, uuid: str, storage: str, *, is_part: bool = False) -> None:
        """Ask the driver to note the writing of a checkpoint."""
        self._link.ask("note_checkpoint", str(self.path), uuid, storage, is_part)

    def forget_checkpoint(self, uuid: str) -> None:
        """Have the driver take the note back."""
        self._link.ask("forget_checkpoint", str(self.path), uuid)


class ForwardedStorage(CheckpointStorage):
    """Send files to a storage of the driver's in pieces, and fetch them from there.

    A checkpoint is written to a directory of this node first, and exists once the driver has it
    all. Its files are verified again after they were fetched.

    Args:
        url: The place of the driver's storage.
        link: Leads to the driver, whose handler is a `StorageRequests`.
        scratch: Where this node has room; by default where temporary files go.
    """

    def __init__(self, url: str, link: DriverLink, scratch: Path | None = None) -> None:
        self._url = url
        self._link = link
        self._scratch = scratch

    @property
    def url(self) -> str:
        """The place of the driver's storage."""
        return self._url

    # ---- storing -------------------------------------------------------------------------

    @contextmanager
    def store_path(self, uuid: str, *, rank: int = 0) -> Iterator[Path]:
        """Yield a directory of this node, and send its files afterwards."""
        with self._storing(uuid, rank, is_whole=True) as path:
            yield path

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a directory of this node, and send its files afterwards."""
        with self._storing(uuid, rank, is_whole=False) as path:
            yield path

    def copy_in(self, uuid: str, source: Path, *, rank: int = 0) -> None:
        """Send a directory's files."""
        if not Path(source).is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be stored from a directory, but got {str(source)!r}."
            )
        self._send(uuid, rank, Path(source), is_whole=False)

    @contextmanager
    def _storing(self, uuid: str, rank: int, *, is_whole: bool) -> Iterator[Path]:
        with self._directory() as path:
            try:
                yield path
            except OSError as error:
                if error.errno not in _FULL or isinstance(error, CheckpointWriteError):
                    raise
                raise CheckpointWriteError(
                    error.errno,
                    f"Checkpoint {uuid} cannot be written to {str(path)!r} on its way to the"
                    f" driver ({error.strerror}). Hint: TMPDIR names a directory with more room",
                ) from error
            self._send(uuid, rank, path, is_whole=is_whole)

    def _send(self, uuid: str, rank: int, source: Path, *, is_whole: bool) -> None:
        self._link.ask("begin", self._url, uuid, rank, is_whole)
        try:
            for path in sorted(source.rglob("*")):
                if path.is_file():
                    self._send_file(uuid, path, path.relative_to(source).as_posix())
        except BaseException:
            self._link.ask("abort", uuid)
            raise
        self._link.ask("finish", uuid)

    def _send_file(self, uuid: str, path: Path, name: str) -> None:
        with path.open("rb") as file:
            # First piece is sent even if empty: an empty file has to exist too.
            data = file.read(_CHUNK_BYTES)
            self._link.ask("write", uuid, name, data)
            while data := file.read(_CHUNK_BYTES):
                self._link.ask("write", uuid, name, data)

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="paceline-checkpoint-", dir=self._scratch) as name:
            yield Path(name)

    # ---- restoring -----------------------------------------------------------------------

    @contextmanager
    def restore_path(self, uuid: str, *, selects: Selector | None = None) -> Iterator[Path]:
        """Fetch and verify the files, and yield their directory."""
        manifest = self.manifest(uuid).selected(selects)
        with self._directory() as root:
            for name, entry in manifest.files.items():
                self._fetch(uuid, name, entry.size, root / uuid / name)
            problems = DirectoryStorage(root).problems(manifest)
            if problems:
                details = ", ".join(f"{name!r} {reason}" for name, reason in problems.items())
                raise CheckpointCorruptError(
                    f"Checkpoint {uuid} must arrive whole from the driver, but {details}."
                )
            (root / uuid).mkdir(exist_ok=True)
            yield root / uuid

    def read_file(self, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Fetch a piece of a file."""
        data: bytes = self._link.ask("read", self._url, uuid, name, offset, size)
        return data

    def download(self, uuid: str, target: Path, *, selects: Selector | None = None) -> Manifest:
        """Fetch and verify the files, and put them into a directory."""
        with self.restore_path(uuid, selects=selects) as path:
            shutil.copytree(path, target, dirs_exist_ok=True)
        return self.manifest(uuid).selected(selects)

    def _fetch(self, uuid: str, name: str, size: int, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for offset in range(0, size, _CHUNK_BYTES):
                file.write(self.read_file(uuid, name, offset, _CHUNK_BYTES))

    # ---- side of the driver ------------------------------------------------------------

    def commit(
        self, uuid: str, metadata: dict[str, Any], *, num_shards: int = 1, origin: str = ""
    ) -> Manifest:
        """Make a checkpoint exist, once all its shards are stored."""
        manifest: Manifest = self._ask(
            "commit", uuid, metadata, num_shards=num_shards, origin=origin
        )
        return manifest

    def missing_shards(self, uuid: str, num_shards: int) -> list[int]:
        """Return the ranks without a finished shard of a checkpoint."""
        missing: list[int] = self._ask("missing_shards", uuid, num_shards)
        return missing

    def discard(self, uuid: str) -> None:
        """Remove the files of an uncommitted checkpoint."""
        self._ask("discard", uuid)

    def manifest(self, uuid: str) -> Manifest:
        """Return the manifest of a committed checkpoint."""
        manifest: Manifest = self._ask("manifest", uuid)
        return manifest

    def problems(self, manifest: Manifest) -> dict[str, str]:
        """Return the problems of the driver's files, by file name."""
        problems: dict[str, str] = self._ask("problems", manifest)
        return problems

    def delete(self, uuid: str) -> None:
        """Delete a checkpoint."""
        self._ask("delete", uuid)

    def replace_manifest(self, manifest: Manifest) -> None:
        """Write a manifest with fewer files than the present, and remove the other files."""
        self._ask("replace_manifest", manifest)

    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove leftovers of checkpoints never committed, and return their UUIDs."""
        swept: UuidList = self._ask("sweep", older_than_s=older_than_s, among=among)
        return swept

    def list(self) -> UuidList:
        """Return the UUIDs of all committed checkpoints."""
        uuids: UuidList = self._ask("list")
        return uuids

    def _read_done(self, uuid: str, rank: int) -> Any:
        return self._ask("_read_done", uuid, rank)

    def _write_manifest(self, manifest: Manifest) -> None:
        self._ask("_write_manifest", manifest)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self._url, method, args, kwargs)


class StorageRequests:
    """Answers a worker's `ForwardedStorage` by the driver's own storages."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenShard] = {}
        self._mark: Path | None = None

    def close(self) -> None:
        """Abandon all unfinished work."""
        self.unmark()
        for uuid in list(self._open):
            self.abort(uuid)

    def sync(self) -> None:
        """Do nothing: an answer confirms the arrival of everything sent before."""

    def control(self, run_dir: str) -> Control:
        """Return the driver's control settings for a run."""
        return RunDirectory(Path(run_dir)).read_control()

    def read_info(self, run_dir: str) -> RunInfo:
        """Return the facts of a run."""
        return RunDirectory(Path(run_dir)).read_info()

    def call(self, url: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a storage."""
        return getattr(storage_from(url), method)(*args, **kwargs)

    def note_checkpoint(self, run_dir: str, uuid: str, storage: str, is_part: bool) -> None:
        """Note the writing of a checkpoint in a run directory."""
        RunDirectory(Path(run_dir)).note_checkpoint(uuid, storage, is_part=is_part)

    def forget_checkpoint(self, run_dir: str, uuid: str) -> None:
        """Remove the note of a checkpoint from a run directory."""
        RunDirectory(Path(run_dir)).forget_checkpoint(uuid)

    def mark(self, url: str) -> str | None:
        """Create a marker file in a storage's directory; return its path, or None on failure.

        A node that finds it there sees the same directory.
        """
        root = storage_from(url).local_root
        assert root is not None
        self._mark = root / f".paceline-{uuid4().hex}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._mark.touch(exist_ok=False)
        except OSError:
            self._mark = None
        return None if self._mark is None else str(self._mark)

    def unmark(self) -> None:
        """Remove the marker file."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.unlink(missing_ok=True)

    # ---- storing -------------------------------------------------------------------------

    def begin(self, url: str, uuid: str, rank: int, is_whole: bool) -> None:
        """Begin to store a rank's shard, or the whole checkpoint of a single rank."""
        self._open[uuid] = _OpenShard(storage_from(url), uuid, rank, is_whole)

    def write(self, uuid: str, name: str, data: bytes) -> None:
        """Append to a file, made by the first call."""
        path = self._open[uuid].path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._open.pop(uuid).close(error)
            raise

    def finish(self, uuid: str) -> None:
        """Make the files durable, and the rank's part count."""
        self._open.pop(uuid).close(None)

    def abort(self, uuid: str) -> None:
        """Remove the files."""
        shard = self._open.pop(uuid, None)
        if shard is not None:
            # The worker's own error is the one to report.
            with suppress(CheckpointError):
                shard.close(ConnectionError("The worker must send all files, but did not."))

    # ---- restoring -----------------------------------------------------------------------

    def read(self, url: str, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file of a checkpoint."""
        try:
            return storage_from(url).read_file(uuid, name, offset, size)
        except FileNotFoundError:
            # The worker finds that it is not whole.
            return b""


class _OpenShard:
    """Shard of a checkpoint being stored."""

    def __init__(self, storage: CheckpointStorage, uuid: str, rank: int, is_whole: bool) -> None:
        self._context: AbstractContextManager[Path] = (
            storage.store_path(uuid, rank=rank) if is_whole else storage.store_shard(uuid, rank)
        )
        self.path = self._context.__enter__()

    def close(self, error: BaseException | None) -> None:
        """Make the shard durable; after an error remove the files, and report a full disk."""
        self._context.__exit__(None if error is None else type(error), error, None)
