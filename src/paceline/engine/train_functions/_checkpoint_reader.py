"""Reader of checkpoints, for workers and for the driver."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.engine.formats._values_without_pickle import unpacked_without_pickle
from paceline.engine.formats._versioned_checkpoint import read_versioned_files
from paceline.engine.tensors._stored_tensors import lazy_stored_tensors, whole
from paceline.workers.runs import FILES_FOLDER, StoredAt, checked_metadata, storage_holding


class UserStateReader:
    """A checkpoint whose files were verified; close it when they are no longer needed.

    Args:
        stored: Where it is.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointCorruptError: Files are missing or altered.
        ValueError: It is no checkpoint of a train function, or of a later version.
    """

    def __init__(self, stored: StoredAt) -> None:
        storage = storage_holding(stored)
        self.uuid = stored.uuid
        self.metadata = checked_metadata(stored.uuid, storage.manifest(stored.uuid).metadata)
        self._stack = ExitStack()
        self._path = Path(self._stack.enter_context(storage.restore_path(stored.uuid)))

    def state(self, *, is_lazy: bool = False) -> Any:
        """Return what the user saved, with tensors on the CPU.

        Args:
            is_lazy: Whether sharded tensors are read when they are used.
        """
        state = read_versioned_files(self._path, "state")
        return unpacked_without_pickle(lazy_stored_tensors(state) if is_lazy else whole(state))

    def of_rank(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank alone knew, or None if there was no such rank.

        Pieces of sharded tensors are read later, see `StoredTensor`.
        """
        if not (self._path / f"rank_{rank}.json").exists():
            return None
        return read_versioned_files(self._path, f"rank_{rank}")

    def copy_files(self, target: Path) -> None:
        """Copy the user's files into a directory."""
        target.mkdir(parents=True, exist_ok=True)
        source = self._path / FILES_FOLDER
        if source.is_dir():
            # A copy is the user's to change, unlike the files of a checkpoint.
            shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)

    def close(self) -> None:
        """Let go of the files."""
        self._stack.close()

    def __enter__(self) -> "UserStateReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
