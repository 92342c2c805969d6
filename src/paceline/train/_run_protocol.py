"""Exchange between the driver and the workers of a run: jobs, outcomes, signals, checkpoints.

Also preemption, the gate of stepwise runs, and the run of this process. Loads no torch.
"""

import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from uuid import NAMESPACE_OID, uuid5

import msgspec

from paceline._base.journal_records import decode_value
from paceline._base.run_directory import Control, JournalKey, NotARunDirectoryError, RunDirectory
from paceline._training.workers.channels import DriverLink, driver_link
from paceline._training.workers.processes.signals_and_leftovers import noted_signals
from paceline._training.workers.processes.worker_process import RankInfo
from paceline._training.workers.ray.forwarded_storage import ForwardedRun, ForwardedStorage
from paceline._training.workers.worker_failures import RunDirectoryError, signal_name
from paceline.core._arguments import PreemptedError
from paceline.core._preemption_and_search import ControlFile
from paceline.core._read_runs import restorable_checkpoint
from paceline.storage._checkpoint_files import CheckpointNotFoundError, check_state_version
from paceline.storage._checkpoint_storage import (
    CheckpointStorage,
    Kept,
    checkpoint_at,
    storage_from,
)

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


# How long a signal lets a run work until its next checkpoint, in seconds; as Slurm gives a job.
_GRACE_S = 30.0


class PreemptionWatch:
    """Watch for preemption of a run: by a signal, or by a message of a master.

    A train function stores its state by itself, so the run ends with its next checkpoint. After a
    signal that may take 30 s; a run that has stored none and does not ask `should_preempt()` ends
    by the signal at once, and so does any run at the second one.

    Args:
        run: The run directory, in which a master says that the run is to make room.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._control = ControlFile(run)
        self._signum: int | None = None
        self._deadline: float | None = None
        self._num_commits: int | None = None
        self._is_moving = False
        # A driver that was killed may have left it.
        _move_path(run).unlink(missing_ok=True)

    @property
    def is_moving(self) -> bool:
        """Whether the function is to make room for workers on other nodes, and nothing else."""
        return self._is_moving and self._signum is None and self._num_commits is None

    def ask_to_move(self) -> None:
        """Ask the function to store a checkpoint now, for continuing on other workers."""
        if self._is_moving or not _listener_path(self._run).exists():
            return
        # Without the file nothing is asked, and the next call tries again.
        with suppress(OSError):
            _move_path(self._run).touch()
            self._is_moving = True

    def end_move(self) -> None:
        """Mark the move to other workers as done."""
        if self._is_moving:
            self._is_moving = False
            _move_path(self._run).unlink(missing_ok=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take over SIGTERM and SIGUSR1 for a while, if this is the main thread."""
        with noted_signals(("SIGTERM", "SIGUSR1"), self._note_signal):
            yield

    def is_due(self, num_commits: int) -> bool:
        """Tell whether the run is to end now.

        Args:
            num_commits: How many checkpoints it has stored.
        """
        is_wanted = self._signum is not None or self._control.read().should_preempt
        if is_wanted and self._num_commits is None:
            self._begin(num_commits)
        if self._num_commits is None:
            return False
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        return is_over or num_commits > self._num_commits

    def _note_signal(self, signum: int) -> None:
        if self._signum is not None:
            _end_by(signum)
        self._signum = signum

    def _begin(self, num_commits: int) -> None:
        self._num_commits = num_commits
        if self._signum is None:
            logger.info("The master wants the run to make room: it ends with its next checkpoint.")
            return
        if not num_commits and not _listener_path(self._run).exists():
            _end_by(self._signum)
        # The function may ask whether it is to store a checkpoint now.
        self._run.write_control(msgspec.structs.replace(self._control.read(), should_preempt=True))
        self._deadline = time.monotonic() + _GRACE_S
        logger.warning(
            "%s: the run ends with its next checkpoint, after %g s at the latest; the same signal"
            " again ends it at once.",
            signal_name(self._signum),
            _GRACE_S,
        )


def note_listener(run: RunDirectory) -> None:
    """Mark the function as asking `should_preempt()`, so a signal leaves time for an answer."""
    with suppress(OSError):
        # A node that does not see the run directory cannot be asked, either.
        _listener_path(run).touch()


def is_to_move(run: RunDirectory) -> bool:
    """Return whether to store a checkpoint now, to continue on workers of other nodes."""
    return _move_path(run).exists()


def _listener_path(run: RunDirectory) -> Path:
    return run.path / "asks_should_preempt"


def _move_path(run: RunDirectory) -> Path:
    return run.path / "workers_move"


def _end_by(signum: int) -> None:
    """End this process, and so its workers, by the default action of a signal."""
    # Default action: the exit status then names the signal.
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


_FIRST_INTERVAL_S = 0.001
_LONGEST_INTERVAL_S = 0.02
# How long another rank than the chief waits for the chief to come to the same report, in seconds.
_LONGEST_LAG_S = 1.0


class StoppedError(PreemptedError):
    """Raised by `report` when the driver of a stepwise run ends the run there."""


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
