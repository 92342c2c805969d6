"""Access of workers to a run: its directory and its storage, seen or forwarded."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

from paceline._base.run_directory import JournalKey, NotARunDirectoryError, RunDirectory
from paceline._training.workers.channels import DriverLink, driver_link
from paceline._training.workers.processes.rank_environment import RankInfo
from paceline._training.workers.ray.forwarded_storage import ForwardedRun, ForwardedStorage
from paceline._training.workers.worker_failures import RunDirectoryError
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._storage_from_url import storage_from
from paceline.train._run_protocol import RunSpec, StoredAt

logger = logging.getLogger(__name__)


class RunAccess:
    """Access of a worker to its journal and its checkpoints.

    That is the run directory, if this node sees it. Else it is a directory of this node, from where
    all is forwarded to the run directory. Checkpoints go to their storage directly, if this node
    reaches it, and else through the driver.

    Args:
        spec: The run.
        rank_info: The rank.

    Attributes:
        run: Where the checkpoints are noted that are being written.
        journal_path: The directory for the rank's journal.
        storage: Where checkpoints go.

    Raises:
        RunDirectoryError: This node does not see the run directory, and nothing is forwarded.
    """

    def __init__(self, spec: RunSpec, rank_info: RankInfo) -> None:
        self.run = run = RunDirectory(Path(spec.run_dir))
        key = JournalKey(spec.attempt, spec.generation, rank_info.rank)
        self.journal_path = run.journal_path(key)
        self.storage: CheckpointStorage = storage_from(spec.storage)
        self._link = None
        sees_run = _is_seen(run, spec)
        link = driver_link()
        if link is None and not sees_run:
            raise RunDirectoryError(
                f"The nodes of a launcher's workers must see the run directory {spec.run_dir!r},"
                f" but node {os.uname().nodename} (rank {rank_info.rank}) does not. Hint:"
                " Trainer(run_dir=...) on a file system that the nodes share."
            )
        if link is None:
            return
        sees_storage = _is_storage_seen(self.storage, run, link, sees_run)
        if sees_run and sees_storage:
            return
        self._link = link
        self._root = Path(tempfile.mkdtemp(prefix="paceline-run-"))
        journal_path = RunDirectory(self._root).journal_path(key)
        # Forwarding begins here: the driver then also removes the files left by a killed worker.
        link.forward(self._root, journal_path, self.journal_path)
        if not sees_run:
            self.run, self.journal_path = ForwardedRun(run.path, link), journal_path
        elif not sees_storage:
            logger.warning(
                "Node %s (rank %d) sees the run directory, but not the checkpoint storage %r of the"
                " driver: its parts of checkpoints are sent to the driver. Hint: mount the same"
                " directory there, if it is large.",
                os.uname().nodename,
                rank_info.rank,
                spec.storage,
            )
        if not sees_storage:
            self.storage = ForwardedStorage(spec.storage, link, self._root)

    def close(self) -> None:
        """Wait until the driver has every forwarded file, then remove the local directory."""
        if self._link is not None:
            self._link.ask("sync")
            shutil.rmtree(self._root, ignore_errors=True)


def storage_holding(stored: StoredAt) -> CheckpointStorage:
    """Return a checkpoint's storage, through the driver if not visible to this node."""
    storage = storage_from(stored.storage)
    link = driver_link()
    if link is None or storage.is_remote or storage.exists(stored.uuid):
        return storage
    return ForwardedStorage(stored.storage, link)


def _is_seen(run: RunDirectory, spec: RunSpec) -> bool:
    try:
        return run.read_info().run_id == spec.run_id
    except NotARunDirectoryError:
        return False


def _is_storage_seen(
    storage: CheckpointStorage, run: RunDirectory, link: DriverLink, sees_run: bool
) -> bool:
    """Tell whether this node reaches the driver's storage by itself."""
    root = storage.local_root
    if storage.is_remote or root is None:
        return storage.is_remote
    if Path(os.path.realpath(root)).is_relative_to(os.path.realpath(run.path)):
        return sees_run
    mark = link.ask("mark", storage.url)
    try:
        # Without the right to write there, the driver could not store the files it is sent.
        return mark is None or os.path.exists(mark)
    finally:
        link.ask("unmark")
