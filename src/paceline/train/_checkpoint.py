"""A run's checkpoints, as its driver sees them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline import core
from paceline.journal import decode_value
from paceline.storage import CheckpointStorage, checkpoint_at, storage_from
from paceline.workers.runs import StoredAt, checked_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint of a train function.

    Attributes:
        uuid: Its name.
        storage: Where it is.
        metadata: What is known of it without reading it.
        tune_file: The file in a checkpoint of Ray Tune that says which one it has, or where.
    """

    tune_file: ClassVar[str] = "paceline.json"

    uuid: str
    storage: str
    metadata: dict[str, Any]

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Return the checkpoint in a directory, or the newest whole one of a run directory.

        Args:
            path: The directory; that of a checkpoint of Ray Tune; or the `url` of a checkpoint in
                an object store.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointCorruptError: All checkpoints of the run are damaged.
            StorageNotInstalledError: The store's package is not installed.
            ValueError: It is no checkpoint of a train function, or no URL of one.
        """
        location = Path(os.path.abspath(path))
        if (location / cls.tune_file).exists():
            facts = json.loads((location / cls.tune_file).read_text())
            if facts["uuid"] is None:
                raise FileNotFoundError(
                    f"The checkpoint of Ray Tune in {str(location)!r} must have one of the train"
                    " function, but that had saved none before."
                )
            path = facts["url"] or location / facts["uuid"]
        if (location / "run.json").exists():
            storage, uuid = core.restorable_checkpoint(location)
            if uuid is None:
                raise FileNotFoundError(
                    f"The run {str(location)!r} must have a checkpoint to load."
                )
        else:
            storage, uuid = checkpoint_at(path)
        return cls.stored(storage, uuid)

    @classmethod
    def stored(cls, storage: CheckpointStorage, uuid: str) -> "Checkpoint":
        """Return a checkpoint of a storage.

        Raises:
            CheckpointNotFoundError: There is none of this name.
            ValueError: It is no checkpoint of a train function.
        """
        metadata = checked_metadata(uuid, storage.manifest(uuid).metadata)
        return cls(uuid=uuid, storage=storage.url, metadata=metadata)

    @property
    def number(self) -> int:
        """Which one it is of those that the run saved, from 1; counted anew after a restart."""
        return int(self.metadata["number"])

    @property
    def score(self) -> float | None:
        """The value by which the best is chosen, or None without one."""
        score: float | None = self.metadata["score"]
        return score

    @property
    def metrics(self) -> dict[str, Any]:
        """What the chief had reported last."""
        metrics: dict[str, Any] = decode_value(self.metadata["metrics"])
        return metrics

    @property
    def url(self) -> str:
        """The place of its files, as `from_path` takes it: a path, or the URL of a store."""
        return f"{self.storage}/{self.uuid}"

    @property
    def path(self) -> Path:
        """The directory of its files.

        Raises:
            ValueError: Its storage is no directory; `load` and `copy_files` work for any.
        """
        root = storage_from(self.storage).local_root
        if root is None:
            raise ValueError(
                f"Checkpoints in {self.storage!r} have no path on this machine. Hint: `load()`"
                " returns the state, and `copy_files` copies the files."
            )
        return root / self.uuid

    def load(self) -> Any:
        """Return the saved state, with tensors on the CPU.

        Raises:
            CheckpointNotFoundError: It was deleted.
            CheckpointCorruptError: Files are missing or altered.
        """
        from paceline.engine import UserStateReader

        with UserStateReader(self._stored) as stored:
            return stored.state()

    def copy_files(self, target: str | os.PathLike[str]) -> None:
        """Copy what was saved with `files` into a directory.

        Raises:
            CheckpointNotFoundError: It was deleted.
            CheckpointCorruptError: Files are missing or altered.
        """
        from paceline.engine import UserStateReader

        with UserStateReader(self._stored) as stored:
            stored.copy_files(Path(target))

    @property
    def _stored(self) -> StoredAt:
        return StoredAt(self.storage, self.uuid)
