"""Exchange between the driver and the workers of a run: jobs, outcomes, checkpoints.

Also the gate of stepwise runs, and the run of this process. Loads no torch.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from paceline._base.journal_records import decode_value
from paceline._base.run_directory import Control, RunDirectory
from paceline._training.workers.channels import driver_link
from paceline._training.workers.processes.rank_environment import RankInfo
from paceline.core._preemption_and_search import ControlFile
from paceline.core._read_runs import restorable_checkpoint
from paceline.storage._checkpoint_errors import CheckpointNotFoundError, check_state_version
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._retention_rules import Kept
from paceline.storage._storage_from_url import checkpoint_at, storage_from
from paceline.train._preemption_watch import StoppedError

logger = logging.getLogger(__name__)


METRICS_GROUP = "training"
# Their times differ from run to run, so they stay apart from the metrics of training.
TIMINGS_GROUP = "profiling"
FILES_FOLDER = "files"


def checked_metadata(uuid: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a train function's checkpoint.

    Raises:
        ValueError: It is none, or one of an unknown version.
    """
    version = metadata.get("version")
    if "num_shards" not in metadata or not isinstance(version, int):
        raise ValueError(
            f"Checkpoint {uuid} must be one that a train function has saved, but has the metadata"
            f" {sorted(metadata)}."
        )
    check_state_version(f"Checkpoint {uuid}", version)
    return metadata


def checkpoint_uuid(run_id: str, attempt: int, generation: int, number: Any) -> str:
    """Return a checkpoint's name, derived alike on every rank without communication."""
    return str(uuid5(NAMESPACE_OID, f"{run_id}/{attempt}/{generation}/{number}"))


class StoredAt(NamedTuple):
    """Name of a checkpoint with the URL of its storage."""

    storage: str
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Specification of a generation of a run, from the driver to its workers.

    Attributes:
        run_id: The run's identity.
        run_dir: The run directory.
        storage: Where checkpoints go.
        attempt: The attempt.
        generation: The generation of its workers.
        seed: The seed of data order and of the workers' generators.
        is_seed_given: Whether the user has asked for this seed.
        num_shards: The shards of a global batch; 0 until the first workers are there.
        first_report: The number after which reports begin.
        checkpoint: The result of `load_checkpoint()`, if it is a stored state.
        num_to_keep: How many checkpoints to keep, or None for all.
        score_attribute: The metric by which the best are kept, or None to keep the newest.
        is_score_minimized: Whether a smaller one is better.
        kept: The checkpoints that earlier generations have left.
        is_stepwise: Whether the function waits at each report until its driver lets it continue.
        storage_per_node: Whether `storage` is a directory of this node alone.
        check_ranks: Whether workers are compared, see `RankCheck`.
        restart_causes: The causes that ended the workers of earlier starts, see `AttemptStarted`.
        judged_metrics: The metrics that a master's search needs to judge a report; None without
            such a search.
        searched_metrics: The metrics that must be numbers for a master's search.
    """

    run_id: str
    run_dir: str
    storage: str
    attempt: int
    generation: int
    seed: int
    num_shards: int
    first_report: int = 0
    checkpoint: StoredAt | None = None
    num_to_keep: int | None = None
    score_attribute: str | None = None
    is_score_minimized: bool = False
    kept: tuple[Kept, ...] = ()
    is_stepwise: bool = False
    storage_per_node: bool = False
    check_ranks: bool | tuple[str, ...] = True
    is_seed_given: bool = False
    restart_causes: tuple[str, ...] = ()
    judged_metrics: tuple[str, ...] | None = None
    searched_metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of a worker in a run: the user's function and its arguments."""

    function: Any
    spec: RunSpec
    config: dict[str, Any] | None = None
    dataset: Any = None
    state: Any = None


class Instance(NamedTuple):
    """Instance to be made once by each worker, for the class API."""

    kind: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> Any:
        """Return the instance."""
        return self.kind(*self.args, **self.kwargs)


class WorkerFacts(NamedTuple):
    """Facts about a worker, for the driver's table."""

    node: str
    pid: int
    device: str
    node_rank: int = 0


class RankOutcome(NamedTuple):
    """Outcome of the function on a single rank.

    Attributes:
        value: Its result.
        num_reports: How often it reported.
        num_saves: How often it saved a checkpoint.
        num_pending: Of these, how many wait for parts of other ranks.
        is_stopped: Whether the driver of a stepwise run has stopped it at a report.
        is_preempted: Whether it has ended because it was asked to make room.
        is_to_compare: Whether the ranks are compared yet, as they were trained since the last
            checkpoint.
    """

    value: Any
    num_reports: int
    num_saves: int
    num_pending: int
    is_stopped: bool = False
    is_preempted: bool = False
    is_to_compare: bool = False


_FIRST_INTERVAL_S = 0.001
_LONGEST_INTERVAL_S = 0.02
# How long another rank than the chief waits for the chief to come to the same report, in seconds.
_LONGEST_LAG_S = 1.0


class ReportGate:
    """Gate for a rank's reports: each waits for a release by the driver of a stepwise run.

    The chief waits at each of its reports. Another rank waits beside it only as long as it reports
    as often as the chief, so that a stop ends all ranks at the same report. A rank that reports
    more often may be needed by the chief, so it stops to wait after a second.

    Args:
        spec: The run.
        rank_info: The rank.
    """

    def __init__(self, spec: RunSpec, rank_info: RankInfo) -> None:
        self._read = _control_reader(Path(spec.run_dir))
        self._is_chief = rank_info.rank == 0
        self._is_in_step = True

    def wait(self, number: int) -> None:
        """Wait at a report.

        Args:
            number: The number of this rank's report.

        Raises:
            StoppedError: The driver ends the run.
        """
        began, interval_s = time.monotonic(), _FIRST_INTERVAL_S
        while True:
            control = self._read()
            if control.is_stopped:
                raise StoppedError
            released = control.reports_released or 0
            if number <= released or not self._is_in_step:
                return
            if not self._is_chief and time.monotonic() - began > _LONGEST_LAG_S:
                # The chief may have come meanwhile, but then it has to be waited for anyway.
                self._is_in_step = False
                return
            time.sleep(interval_s)
            # Short at first, as most reports are answered at once.
            interval_s = min(2 * interval_s, _LONGEST_INTERVAL_S)


def _control_reader(run_dir: Path) -> Callable[[], Control]:
    run = RunDirectory(run_dir)
    link = driver_link()
    if link is None or run.control_path.parent.exists():
        return ControlFile(run).read

    def ask() -> Control:
        control: Control = link.ask("control", str(run_dir))
        return control

    return ask


_sessions: list[Any] = []
_is_pool_worker: list[bool] = []


def current_session() -> Any:
    """Return the session of this process's run, or None outside of a run."""
    return _sessions[-1] if _sessions else None


def enter_session(session: Any) -> None:
    """Make a run this process's.

    Raises:
        RuntimeError: It works for one already.
    """
    if _sessions:
        raise RuntimeError("A train function must not start another run in its own process.")
    _sessions.append(session)


def leave_session() -> None:
    """End the session begun by `enter_session`."""
    _sessions.clear()


def become_pool_worker() -> None:
    """Mark this process as a worker of a trainer in another process."""
    _is_pool_worker.append(True)


def is_pool_worker() -> bool:
    """Tell whether this process is a worker of a trainer in another process."""
    return bool(_is_pool_worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint of a train function.

    Attributes:
        uuid: Its name.
        storage: Where it is.
        metadata: The facts known without reading the state.
        tune_file: The file in a checkpoint of Ray Tune that says which one it has, or where.
    """

    tune_file: ClassVar[str] = "paceline.json"

    uuid: str
    storage: str
    metadata: dict[str, Any]

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Return the checkpoint in a directory, or the newest complete checkpoint of a run.

        Args:
            path: The directory; or the directory of a checkpoint of Ray Tune; or the `url` of a
                checkpoint in an object store.

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
                raise CheckpointNotFoundError(
                    f"The checkpoint of Ray Tune in {str(location)!r} must have one of the train"
                    " function, but that had saved none before."
                )
            path = facts["url"] or location / facts["uuid"]
        if (location / "run.json").exists():
            storage, uuid = restorable_checkpoint(location)
            if uuid is None:
                raise CheckpointNotFoundError(
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
        """The number of the checkpoint in its run, from 1; restarts at 1 after a restart."""
        return int(self.metadata["number"])

    @property
    def score(self) -> float | None:
        """The score for choosing the best checkpoint, or None without a score."""
        score: float | None = self.metadata["score"]
        return score

    @property
    def metrics(self) -> dict[str, Any]:
        """The chief's last reported metrics before the checkpoint."""
        metrics: dict[str, Any] = decode_value(self.metadata["metrics"])
        return metrics

    @property
    def url(self) -> str:
        """The location of the files, as accepted by `from_path`: a path or a store's URL."""
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
        from paceline.train._rank_checkpoints import UserStateReader

        with UserStateReader(self._stored) as stored:
            return stored.state()

    def copy_files(self, target: str | os.PathLike[str]) -> None:
        """Copy the files saved by the user with `files` into a directory.

        Raises:
            CheckpointNotFoundError: It was deleted.
            CheckpointCorruptError: Files are missing or altered.
        """
        from paceline.train._rank_checkpoints import UserStateReader

        with UserStateReader(self._stored) as stored:
            stored.copy_files(Path(target))

    @property
    def _stored(self) -> StoredAt:
        return StoredAt(self.storage, self.uuid)
