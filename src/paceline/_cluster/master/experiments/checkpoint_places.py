"""Places of checkpoints: their storage, and who may read and delete there."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from paceline._base.files import opened_directory
from paceline._cluster.master.experiments.attempts import checkpoint_root
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import REPORTED, config_of
from paceline._cluster.master.store.database import read_cluster_id
from paceline.storage._checkpoint_errors import CheckpointError
from paceline.storage._checkpoint_files import Manifest, origin_of
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_from_url import storage_from


class CheckpointPlace(NamedTuple):
    """Storage named by a checkpoint record, with the storage and origin required for access.

    Attributes:
        storage: The storage that its record names.
        own: The storage of its experiment; None for a run without a master, which may use any.
        origin: The `origin` that its manifest must have; None if any will do, and none as well.
        run_dir: For a run without a master, its directory: in directories, the checkpoint must
            belong to the owner of the run.
    """

    storage: str
    own: str | None = None
    origin: str | None = None
    run_dir: str | None = None

    @property
    def is_own(self) -> bool:
        """Whether the record names the storage of the experiment."""
        return self.own is None or is_same_storage(self.storage, self.own)

    def check(self, manifest: Manifest) -> None:
        """Refuse the checkpoint of another attempt, or of a run without a master.

        Raises:
            RefusedError: It is.
        """
        if self.origin is not None and manifest.origin != self.origin:
            raise RefusedError(
                "other_checkpoint",
                f"Checkpoint {manifest.uuid} in {self.storage} must be that of its record, but"
                f" {'another attempt' if manifest.origin else 'a run without a master'} has stored"
                " it.",
            )

    def opened(self, uuid: str) -> CheckpointStorage:
        """Return the storage.

        Files in directories belong to one user, whoever else can write there.

        Raises:
            RefusedError: It is not the storage of the experiment, or a directory or an object
                store that the run of another user need not own. A record alone could name any. Or
                no storage can be there.
            StorageNotInstalledError: No installed package offers its URL's scheme.
        """
        if not self.is_own:
            raise RefusedError(
                "other_storage",
                f"Checkpoint {uuid} must lie in the storage of its experiment, but lies in"
                f" {self.storage}, which the master leaves alone. Hint: read or delete its files"
                " there.",
            )
        try:
            storage = storage_for_others(self.storage)
        except CheckpointError:
            raise
        except ValueError as error:
            raise RefusedError(
                "checkpoint_unusable", f"Checkpoint {uuid} cannot be read: {error!s:.1000}"
            ) from error
        if self.run_dir is None:
            return storage
        if not isinstance(storage, DirectoryStorage) and self._is_far(self.run_dir):
            return storage
        owner = self._run_owner(self.run_dir, uuid)
        if owner == os.geteuid():
            return storage
        if not isinstance(storage, DirectoryStorage):
            raise RefusedError(
                "other_storage",
                f"The files of checkpoint {uuid} are in {self.storage}, which the master does not"
                " open with its own credentials for the run of another user. Hint: read or delete"
                " them with yours.",
            )
        # All files must be the owner's: links to files of others are refused.
        return DirectoryStorage(storage.root, has_one_owner=True, owner=owner)

    @staticmethod
    def _is_far(run_dir: str) -> bool:
        """Return whether a sender who may submit has sent a run from another machine."""
        # A run of this machine whose user has removed it, lay in a directory that is there.
        try:
            return not run_dir.startswith(REPORTED) and not Path(run_dir).parent.exists()
        except OSError:
            return False

    def _run_owner(self, run_dir: str, uuid: str) -> int:
        hint = f"Hint: read or delete its files in {self.storage}."
        if run_dir.startswith(REPORTED):
            raise RefusedError(
                "other_storage",
                f"The files of checkpoint {uuid} are not here: its run was reported with a token of"
                f" the scope `report`, for which the master opens no storage. {hint}",
            )
        try:
            with opened_directory(run_dir) as directory:
                return os.fstat(directory).st_uid
        except OSError as error:
            raise RefusedError(
                "other_storage",
                f"The master opens files of checkpoint {uuid} only if it sees the owner of its run,"
                f" but the run's directory {run_dir!r} cannot be opened ({error.strerror}). {hint}",
            ) from error


def storage_for_others(place: str) -> CheckpointStorage:
    """Return a storage for reading and deleting files possibly written by other users.

    Raises:
        ValueError: There is none at the place.
    """
    storage = storage_from(place)
    if isinstance(storage, DirectoryStorage):
        return DirectoryStorage(storage.root, has_one_owner=True)
    return storage.in_a_hurry()


def is_same_storage(place: str, other: str) -> bool:
    """Return whether two paths or URLs name the same storage."""
    try:
        return place == other or storage_from(place).url == storage_from(other).url
    except (ValueError, RuntimeError):  # such as `~` of nobody
        return False


def is_own_storage(
    connection: sa.Connection, experiment_id: int, place: str, *, default_storage: str
) -> bool:
    """Return whether an experiment keeps its checkpoints in a storage; a run may use any."""
    experiments = tables.experiments
    query = sa.select(experiments).where(experiments.c.id == experiment_id)
    experiment = connection.execute(query).first()
    if experiment is None or experiment.external_id is not None:
        return experiment is not None
    own = experiment_place(experiment, default_storage)
    return not own or is_same_storage(place, own)


def experiment_place(experiment: sa.Row[Any], default_storage: str) -> str:
    """Return where the checkpoints of an experiment go."""
    return checkpoint_root(config_of(experiment)) or default_storage


def checkpoint_place(
    connection: sa.Connection, row: sa.Row[Any], default_storage: str
) -> CheckpointPlace:
    """Return where a checkpoint lies and must lie."""
    return checkpoint_places(connection, row.experiment_id, [row], default_storage)[row.uuid]


def checkpoint_places(
    connection: sa.Connection, experiment_id: int, rows: Sequence[sa.Row[Any]], default_storage: str
) -> dict[str, CheckpointPlace]:
    """Return where the checkpoints of an experiment lie and must lie, by their UUIDs."""
    experiments = tables.experiments
    query = sa.select(experiments).where(experiments.c.id == experiment_id)
    experiment = connection.execute(query).one()
    if experiment.external_id is not None:
        run_dir = experiment.external_path or ""
        return {row.uuid: CheckpointPlace(row.storage, run_dir=run_dir) for row in rows}
    own = experiment_place(experiment, default_storage) or None
    cluster_id = read_cluster_id(connection)
    return {
        row.uuid: CheckpointPlace(
            row.storage, own, cluster_id and origin_of(cluster_id, row.trial_id, row.attempt)
        )
        for row in rows
    }
