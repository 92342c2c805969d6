"""Storage requests that a driver serves for workers without access to its run directory."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from paceline.journal import Control, RunDirectory, RunInfo
from paceline.storage import CheckpointError, CheckpointStorage, storage_from


class StorageRequests:
    """Answers a worker's `ForwardedStorage` by the driver's own storages."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenShard] = {}
        self._mark: Path | None = None

    def close(self) -> None:
        """Give up what was begun and not finished."""
        self.unmark()
        for uuid in list(self._open):
            self.abort(uuid)

    def sync(self) -> None:
        """Do nothing; that it is answered tells that what was sent before has arrived."""

    def control(self, run_dir: str) -> Control:
        """Return what the driver says to a run."""
        return RunDirectory(Path(run_dir)).read_control()

    def read_info(self, run_dir: str) -> RunInfo:
        """Return what a run is."""
        return RunDirectory(Path(run_dir)).read_info()

    def call(self, url: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a storage."""
        return getattr(storage_from(url), method)(*args, **kwargs)

    def note_checkpoint(self, run_dir: str, uuid: str, storage: str, is_part: bool) -> None:
        """Note in a run directory that a checkpoint is being written."""
        RunDirectory(Path(run_dir)).note_checkpoint(uuid, storage, is_part=is_part)

    def forget_checkpoint(self, run_dir: str, uuid: str) -> None:
        """Take that note back."""
        RunDirectory(Path(run_dir)).forget_checkpoint(uuid)

    def mark(self, url: str) -> str | None:
        """Make a file in a storage's directory, and return its path; None if that cannot be.

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
        """Remove that file."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.unlink(missing_ok=True)

    # ---- storing -------------------------------------------------------------------------

    def begin(self, url: str, uuid: str, rank: int, is_whole: bool) -> None:
        """Begin to store a rank's files of a checkpoint, or a checkpoint of one rank."""
        self._open[uuid] = _OpenShard(storage_from(url), uuid, rank, is_whole)

    def write(self, uuid: str, name: str, data: bytes) -> None:
        """Append to a file, which is made by the first call."""
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
            # The worker's own error is the one to tell.
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
    """A part of a checkpoint that is being stored."""

    def __init__(self, storage: CheckpointStorage, uuid: str, rank: int, is_whole: bool) -> None:
        self._context: AbstractContextManager[Path] = (
            storage.store_path(uuid, rank=rank) if is_whole else storage.store_shard(uuid, rank)
        )
        self.path = self._context.__enter__()

    def close(self, error: BaseException | None) -> None:
        """Make it durable; after an error remove it, and tell of a full disk."""
        self._context.__exit__(None if error is None else type(error), error, None)
