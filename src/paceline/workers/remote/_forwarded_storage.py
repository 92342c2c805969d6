"""The driver's checkpoint storage, as a worker sees it on a node that does not."""

import errno
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.journal import RunDirectory, RunInfo
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointStorage,
    CheckpointWriteError,
    DirectoryStorage,
    Manifest,
    Selector,
    UuidList,
)
from paceline.workers.remote._driver_link import DriverLink

# What is in memory at a time, here and in the driver.
_CHUNK_BYTES = 4 * 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ForwardedRun(RunDirectory):
    """The driver's run directory, in which a worker notes the checkpoints that it writes.

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
        """Have the driver note that a checkpoint is being written."""
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
        """Fetch the files, verify them, and yield the directory that has them."""
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

    # ---- what the driver does ------------------------------------------------------------

    def commit(
        self, uuid: str, metadata: dict[str, Any], *, num_shards: int = 1, origin: str = ""
    ) -> Manifest:
        """Make a checkpoint exist, once all its shards are stored."""
        manifest: Manifest = self._ask(
            "commit", uuid, metadata, num_shards=num_shards, origin=origin
        )
        return manifest

    def missing_shards(self, uuid: str, num_shards: int) -> list[int]:
        """Return the ranks that have not finished their shard of a checkpoint."""
        missing: list[int] = self._ask("missing_shards", uuid, num_shards)
        return missing

    def discard(self, uuid: str) -> None:
        """Remove what is there of a checkpoint that was not committed."""
        self._ask("discard", uuid)

    def manifest(self, uuid: str) -> Manifest:
        """Return the manifest of a committed checkpoint."""
        manifest: Manifest = self._ask("manifest", uuid)
        return manifest

    def problems(self, manifest: Manifest) -> dict[str, str]:
        """Return what is wrong with the driver's files."""
        problems: dict[str, str] = self._ask("problems", manifest)
        return problems

    def delete(self, uuid: str) -> None:
        """Delete a checkpoint."""
        self._ask("delete", uuid)

    def replace_manifest(self, manifest: Manifest) -> None:
        """Write a manifest that names fewer files than the present one, and remove the others."""
        self._ask("replace_manifest", manifest)

    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove leftovers of checkpoints that were never committed."""
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
