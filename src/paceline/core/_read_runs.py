"""Summaries of runs without a master, and the history of their attempts, from the journals."""

import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from paceline._base import journal_records as records
from paceline._base.journal_reading_and_writing import Entry
from paceline._base.run_directory import (
    JournalKey,
    NotARunDirectoryError,
    RunDirectory,
    RunInfo,
    RunVersionError,
)
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageNotInstalledError,
)
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_from_url import storage_from

logger = logging.getLogger(__name__)

_METRICS_START = records.encode_record(
    records.MetricsReported(time=0, group="", steps_completed=0, metrics={})
)[: len(b'{"type":"metrics",')]
_ALERT = b'"type":"alert"'
_NUM_ALERTS = 20
_INVALID_HP = "invalid_hp"


class MetricsRow(NamedTuple):
    """Metrics of a report as recorded in a journal; later rows of the same step add metrics.

    `is_superseded` says that a later attempt went back to an earlier step.
    """

    attempt: int
    steps_completed: int
    metrics: dict[str, Any]
    is_superseded: bool
    group: str = ""


@dataclass(slots=True, kw_only=True)
class History:
    """A summary of all chief's journals of a run; superseded rows are left out.

    Attributes:
        num_attempts: The number of the next attempt.
        last_steps: The last step of each metric group.
        checkpoints: The checkpoints that were stored and not deleted by the run, oldest first.
        completed_length: The length of the last completed search operation, or 0.
        metadata: The run's last metadata, by `set_metadata`; None without any.
        restart_causes: The reasons for restarts of the workers, oldest first.
        finished: How the last attempt ended, or None if it did not say. Any rank can end it for
            all by invalid hyperparameters.
    """

    num_attempts: int = 0
    last_steps: dict[str, int] = field(default_factory=dict)
    checkpoints: list[records.CheckpointStored] = field(default_factory=list)
    completed_length: int = 0
    metadata: dict[str, Any] | None = None
    restart_causes: list[str] = field(default_factory=list)
    finished: records.AttemptFinished | None = None


def read_history(run: RunDirectory | str | os.PathLike[str]) -> History:
    """Return the history of a run, read from all journals of its chiefs.

    Args:
        run: The run directory.

    Raises:
        NotARunDirectoryError: There is none at the path `run`.
    """
    run = _run_at(run)
    history = History()
    stored: dict[str, records.CheckpointStored] = {}
    for key, last_step in standing_journals(run):
        history.num_attempts = key.attempt + 1
        history.finished = None
        for entry in run.reader(key):
            record = entry.decode()
            if isinstance(record, records.MetricsReported):
                step = record.steps_completed
                if history.last_steps.get(record.group, -1) < step <= last_step:
                    history.last_steps[record.group] = step
            elif isinstance(record, records.CheckpointStored):
                stored[record.uuid] = record
            elif isinstance(record, records.CheckpointDeleted):
                stored.pop(record.uuid, None)
            elif isinstance(record, records.OperationCompleted):
                history.completed_length = max(history.completed_length, record.length)
            elif isinstance(record, records.AttemptStarted):
                history.restart_causes.extend(record.restart_causes)
            elif isinstance(record, records.RunMetadataSet):
                history.metadata = record.metadata
            elif isinstance(record, records.AttemptFinished):
                history.finished = record
    history.checkpoints = list(stored.values())
    finished = history.finished
    if history.num_attempts and (
        finished is None
        or finished.outcome == "error"
        or (finished.outcome == _INVALID_HP and finished.error is None)
    ):
        history.finished = _attempt_refusal(run, history.num_attempts - 1) or finished
    return history


def read_checkpoints(run: RunDirectory | str | os.PathLike[str]) -> list[records.CheckpointStored]:
    """Return a run's stored and not deleted checkpoints, oldest first; see `read_history`."""
    return read_history(run).checkpoints


def read_metrics(
    run: RunDirectory | str | os.PathLike[str], group: str | None = None, *, rank: int = 0
) -> Iterator[MetricsRow]:
    """Yield a rank's reported metrics, of a single group or of all, in order of writing.

    Args:
        run: The run directory; it may still be written to.
        group: The metric group, such as "training", or "training_rank_2" for rank 2.
        rank: Who has reported them.

    Raises:
        NotARunDirectoryError: There is none at the path `run`.
    """
    run = _run_at(run)
    for key, last_step in standing_journals(run, rank):
        for record in _metrics_records(run, key):
            if group is None or record.group == group:
                yield MetricsRow(
                    key.attempt,
                    record.steps_completed,
                    records.decode_value(record.metrics),
                    record.steps_completed > last_step,
                    record.group,
                )


def _run_at(run: RunDirectory | str | os.PathLike[str]) -> RunDirectory:
    return run if isinstance(run, RunDirectory) else RunDirectory.open(Path(run))


def read_alerts(run: RunDirectory) -> list[records.AlertRaised]:
    """Return the newest alerts of a run, from all ranks, oldest first; 20 at most."""
    alerts = [
        record
        for key in run.journal_keys()
        for entry in run.reader(key)
        if _ALERT in entry.payload and isinstance(record := entry.decode(), records.AlertRaised)
    ]
    return sorted(alerts, key=lambda alert: alert.time)[-_NUM_ALERTS:]


def last_steps(run: RunDirectory, rank: int) -> dict[str, int]:
    """Return the last valid step of each metric group reported by a rank."""
    found: dict[str, int] = {}
    for key, last_step in standing_journals(run, rank):
        for record in _metrics_records(run, key):
            if found.get(record.group, -1) < record.steps_completed <= last_step:
                found[record.group] = record.steps_completed
    return found


def standing_metrics(
    run: RunDirectory, group: str, steps_completed: int, rank: int
) -> dict[str, Any]:
    """Return a rank's valid metrics of a group and step, merged, in encoded form."""
    merged: dict[str, Any] = {}
    for key, last_step in standing_journals(run, rank):
        if steps_completed <= last_step:
            for record in _metrics_records(run, key):
                if record.steps_completed == steps_completed and record.group == group:
                    merged.update(record.metrics)
    return merged


def standing_journals(run: RunDirectory, rank: int = 0) -> list[tuple[JournalKey, float]]:
    """Return a rank's journals, each with the last step not superseded by a later attempt."""
    standing: list[tuple[JournalKey, float]] = []
    last_step = inf
    # Backwards: each attempt limits the valid steps of all journals before it.
    for key in reversed([key for key in run.journal_keys() if key.rank == rank]):
        standing.append((key, last_step))
        last_step = min(last_step, _first_attempt_step(run, key))
    return standing[::-1]


def _attempt_refusal(run: RunDirectory, attempt: int) -> records.AttemptFinished | None:
    """Return the end record of a rank with invalid hyperparameters in an attempt, or None."""
    found: records.AttemptFinished | None = None
    for key in run.journal_keys():
        if key.attempt == attempt and key.rank != 0:
            for entry in run.reader(key):
                record = entry.decode()
                if isinstance(record, records.AttemptFinished) and record.outcome == _INVALID_HP:
                    # A record with an error is preferred: ranks that merely followed do not know
                    # the reason.
                    found = record if found is None or found.error is None else found
    return found


def _first_attempt_step(run: RunDirectory, key: JournalKey) -> float:
    """Return the first step of a journal's attempt; infinity if not recorded."""
    for entry in run.reader(key).read(1):
        record = entry.decode()
        if isinstance(record, records.AttemptStarted):
            return record.steps_completed
    # A journal that was cut off at its very start has reported nothing and replaces nothing.
    return inf


def _metrics_records(run: RunDirectory, key: JournalKey) -> Iterator[records.MetricsReported]:
    for entry in run.reader(key):
        if _is_metrics(entry):
            record = entry.decode()
            assert isinstance(record, records.MetricsReported)
            yield record


def _is_metrics(entry: Entry) -> bool:
    return entry.payload.startswith(_METRICS_START)


RUNS_DIRECTORY = "paceline_runs"

# Limit for the runs of a name to read: there may be thousands.
_NUM_LOOKED_AT = 100
_DIRECTORY_NAME = re.compile(r"(\d{8}-\d{6})-(.+?)(?:-(\d+))?")


class RunState(Enum):
    """State of a run; `CRASHED` covers errors as well as vanished processes."""

    RUNNING = "running"
    COMPLETED = "completed"
    PREEMPTED = "preempted"
    INVALID_HP = "invalid_hp"
    CRASHED = "crashed"


_STATES_OF_OUTCOMES = {
    "completed": RunState.COMPLETED,
    "preempted": RunState.PREEMPTED,
    "invalid_hp": RunState.INVALID_HP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Row of `paceline runs list`.

    `last_step` is None before the first metric; `error` is the type and text of the exception
    that ended the last attempt, if the workers could still record it; `created` is in seconds since
    the epoch. `restart_causes` has the reasons for restarts of the workers, oldest first.
    """

    name: str
    path: Path
    state: RunState
    created: float
    num_attempts: int
    last_step: int | None
    latest_checkpoint: str | None
    error: str | None
    restart_causes: tuple[str, ...] = ()


def find_run(run: str | os.PathLike[str]) -> Path:
    """Return the directory of a run, named by its path, its name or a part of the name.

    Args:
        run: A run directory; for a run in ./paceline_runs its name, the start or end of its name,
            or "last".

    Raises:
        NotARunDirectoryError: There is no such run, or the part fits several.
    """
    root, given, part = Path(RUNS_DIRECTORY), Path(run), str(run)
    if given.exists() or (root / given).exists():
        return given if given.exists() else root / given
    paths = [summary.path for summary in list_runs(root)]
    if part == "last" and paths:
        return paths[-1]
    fitting = [path for path in paths if path.name.startswith(part) or path.name.endswith(part)]
    if len(fitting) > 1:
        raise NotARunDirectoryError(
            f"`run` must fit one run, but {part!r} fits {', '.join(path.name for path in fitting)}."
        )
    if not fitting:
        raise NotARunDirectoryError(
            f"`run` must be a run directory, or a name or part of a name in ./{root}, but got"
            f" {part!r}. Hint: `paceline runs list` shows the runs there."
        )
    return fitting[0]


def list_runs(root: Path) -> list[RunSummary]:
    """Return the runs below `root`, oldest first; other directories are left out.

    Args:
        root: A directory of run directories, such as ``./paceline_runs``.
    """
    summaries = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            summaries.append(summarize_run(path))
        except (NotARunDirectoryError, RunVersionError):
            continue
    return sorted(summaries, key=lambda summary: summary.created)


def summarize_run(path: Path) -> RunSummary:
    """Return the summary of a run.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """
    run = RunDirectory.open(path)
    info = run.read_info()
    history = read_history(run)
    return RunSummary(
        name=info.name,
        path=path,
        state=run_state(run, history),
        created=info.created,
        num_attempts=history.num_attempts,
        last_step=max(history.last_steps.values(), default=None),
        latest_checkpoint=_latest_known(run, info, history),
        error=history.finished.error if history.finished else None,
        restart_causes=tuple(history.restart_causes),
    )


def run_state(run: RunDirectory, history: History) -> RunState:
    """Return how a run stands."""
    if run.is_alive():
        return RunState.RUNNING
    if history.finished is None:
        return RunState.CRASHED
    return _STATES_OF_OUTCOMES.get(history.finished.outcome, RunState.CRASHED)


def storage_at(path: Path) -> CheckpointStorage:
    """Return the checkpoint storage of the run at a path.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """
    run = RunDirectory.open(path)
    return run_storage(run, run.read_info())


def restorable_checkpoint(path: Path) -> tuple[CheckpointStorage, str | None]:
    """Return the storage of the run at a path and the newest complete checkpoint, or None.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
        CheckpointCorruptError: There are checkpoints, but all of them are damaged.
        CheckpointNotFoundError: There were checkpoints, but none is in the storage, or the newest
            one is in another storage.
    """
    storage = storage_at(path)
    run = RunDirectory(path)
    uuid, _ = newest_whole_checkpoint(
        storage,
        read_history(run),
        being_deleted={*run.begun_checkpoints()},
        may_be_gone=is_of_master(run.read_info()),
    )
    return storage, uuid


def is_of_master(info: RunInfo) -> bool:
    """Return whether a run belongs to a master's trial; the master may delete its checkpoints."""
    return bool(info.cluster_id)


def run_storage(run: RunDirectory, info: RunInfo) -> CheckpointStorage:
    """Return a run's checkpoint storage: as recorded, or moved with its run directory."""
    recorded, own = storage_from(info.checkpoint_storage), run.checkpoints_path
    root = recorded.local_root
    if root is None or not own.is_dir():
        return recorded
    # The run directory was renamed or copied, and its checkpoints with it.
    is_other = not root.exists() or (not root.samefile(own) and _is_in_run(root, info.run_id))
    return DirectoryStorage(own) if is_other else recorded


def _is_in_run(checkpoints: Path, run_id: str) -> bool:
    """Return whether a directory of checkpoints lies in the directory of the run `run_id`."""
    run = RunDirectory(checkpoints.parent)
    try:
        return run.checkpoints_path == checkpoints and run.read_info().run_id == run_id
    except (OSError, NotARunDirectoryError, RunVersionError):
        return False


def moved_storage(run: RunDirectory, info: RunInfo) -> dict[str, str]:
    """Return the URL of the present storage by the recorded one's, if they are not the same."""
    try:
        recorded, present = storage_from(info.checkpoint_storage), run_storage(run, info)
    except StorageNotInstalledError:
        return {}
    return {} if recorded.url == present.url else {recorded.url: present.url}


def _latest_known(run: RunDirectory, info: RunInfo, history: History) -> str | None:
    try:
        return latest_checkpoint(run_storage(run, info), history)[0]
    except Exception:
        # A storage of another package that is not installed or not within reach raises errors of
        # its own kinds. Whether the checkpoint is still there is then unknown.
        return history.checkpoints[-1].uuid if history.checkpoints else None


def latest_checkpoint(storage: CheckpointStorage, history: History) -> tuple[str | None, int]:
    """Return the newest existing checkpoint and its step; None and 0 without any."""
    for stored in reversed(history.checkpoints):
        # Files can be deleted by hand, without a record.
        if storage.exists(stored.uuid):
            return stored.uuid, stored.steps_completed
    return None, 0


def newest_whole_checkpoint(
    storage: CheckpointStorage,
    history: History,
    *,
    being_deleted: Collection[str] = (),
    may_be_gone: bool = False,
) -> tuple[str | None, int]:
    """Return the newest checkpoint with complete files, and its step; None and 0 without any.

    Damaged and missing ones are passed over with a warning.

    Args:
        storage: Where they are.
        history: The run's records of them.
        being_deleted: Those that the run was about to delete.
        may_be_gone: Whether somebody else deletes checkpoints of this run.

    Raises:
        CheckpointCorruptError: There are checkpoints, but all of them are damaged.
        CheckpointNotFoundError: There were checkpoints, but none is in the storage, or the newest
            one is in another storage.
    """
    first_error: CheckpointCorruptError | None = None
    missing: list[records.CheckpointStored] = []
    for stored in reversed(history.checkpoints):
        try:
            manifest = storage.manifest(stored.uuid)
            if manifest.deleted:
                logger.info("Passing over checkpoint %s: files were deleted.", stored.uuid)
                continue
            storage.verify(stored.uuid)
        except CheckpointNotFoundError:
            if stored.uuid not in being_deleted and not may_be_gone:
                if not missing:
                    _refuse_other_storage(stored, storage)
                missing.append(stored)
            continue
        except CheckpointCorruptError as error:
            first_error = first_error or error
            logger.warning("Passing over a checkpoint: %s", error)
            continue
        for each in missing:
            logger.warning(
                "Passing over checkpoint %s of step %d: it is not in %r any more, and the run has"
                " not deleted it.",
                each.uuid,
                each.steps_completed,
                storage.url,
            )
        return stored.uuid, stored.steps_completed
    if first_error is not None:
        raise first_error
    if missing:
        raise CheckpointNotFoundError(
            f"The checkpoints of the run must be in {storage.url!r}, but none is there; the newest"
            f" was {missing[0].uuid} of step {missing[0].steps_completed}. Hint: if a disk or"
            " bucket is not connected, connect it; if they were moved, pass that place as"
            " `checkpoint_storage`; to begin anew, start a run of another `name`, or one that does"
            " not resume."
        )
    return None, 0


def _refuse_other_storage(stored: records.CheckpointStored, storage: CheckpointStorage) -> None:
    """Raise CheckpointNotFoundError if a missing checkpoint exists in another storage."""
    if stored.storage == storage.url:
        return
    try:
        is_there = storage_from(stored.storage).exists(stored.uuid)
    except Exception:
        # A storage of another package, or one that is not within reach.
        is_there = False
    if is_there:
        raise CheckpointNotFoundError(
            f"The newest checkpoint of the run, {stored.uuid} of step {stored.steps_completed},"
            f" must be in {storage.url!r} to resume, but it is in {stored.storage!r}. Hint: pass"
            f" that as `checkpoint_storage`, or copy what is in it to {storage.url!r} first."
        )


def newest_run_named(
    root: Path, name: str, *, before: RunInfo | None = None
) -> RunDirectory | None:
    """Return the newest run of a name below `root`, or None.

    A run is newer than the one that was the newest when it began, also if the clock was set back.

    Args:
        root: A directory of run directories.
        name: The name of the run.
        before: Another run of this name there; return the one that was the newest when it began.
    """
    if not root.is_dir():
        return None
    runs = _newest_by_directory_name(root, name)
    if before is not None:
        runs = [(info, path) for info, path in runs if info.run_id != before.run_id]
        previous = [run for run in runs if run[0].run_id == before.previous]
        runs = previous or [run for run in runs if run[0].created <= before.created]
    later: dict[str | None, tuple[RunInfo, Path]] = {}
    newest = None
    # Ties of runs begun at the same time: the last run wins.
    for run in sorted(runs, key=lambda run: run[0].created):
        newest = later[run[0].previous] = run
    # Chain of `previous` ids: correct even if the clock was set back.
    while newest is not None and newest[0].run_id in later:
        newest = later.pop(newest[0].run_id)
    return None if newest is None else RunDirectory(newest[1])


def _newest_by_directory_name(root: Path, name: str) -> list[tuple[RunInfo, Path]]:
    """Return the runs of a name with the latest times in the names of their directories, reversed.

    A clock set back, as at the end of summer time, changes the order of a few runs.
    """
    named = []
    for entry in os.listdir(root):
        # Offset 16: length of the time and hyphen before a name.
        if entry.startswith(name, 16) and (match := _DIRECTORY_NAME.fullmatch(entry)):
            named.append((match[1], int(match[3] or 1), entry))
    found: list[tuple[RunInfo, Path]] = []
    for *_, entry in sorted(named, reverse=True):
        path = root / entry
        try:
            info = RunDirectory(path).read_info()
        except (NotARunDirectoryError, RunVersionError):
            continue
        if info.name == name:
            found.append((info, path))
        if len(found) == _NUM_LOOKED_AT:
            break
    return found[::-1]


def time_shares_of_run(path: Path) -> records.TimeShares:
    """Return the shares of a run's time by activity, from creation to last heartbeat or now.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """
    run = RunDirectory.open(path)
    began = run.read_info().created
    keys = [key for key in run.journal_keys() if key.rank == 0]
    attempts = [_times_of(run, list(group)) for _, group in groupby(keys, lambda key: key.attempt)]
    if attempts:
        # The first attempt has made the run directory.
        attempts[0] = replace(attempts[0], created_at=began)
    until = max([began, *(times.ended_at or began for times in attempts)])
    if attempts and run.is_alive():
        # The last attempt still runs.
        attempts[-1], until = replace(attempts[-1], ended_at=None), time.time()
    return records.divide_time(began, until, attempts)


def _times_of(run: RunDirectory, keys: list[JournalKey]) -> records.AttemptTimes:
    """Return the times of an attempt.

    It ended with the last record of its chief or, if it was killed, the last sign of life.
    """
    sessions, times = [], []
    has_finished = False
    for key in keys:
        session, has_finished = [], False
        for entry in run.reader(key):
            record = entry.decode()
            times.append(record.time)
            if isinstance(record, records.TimeSpent):
                session.append(record)
            elif isinstance(record, records.AttemptFinished):
                has_finished = True
                break
        sessions.append(session)
    ended_at = max(times, default=0.0)
    # A killed attempt's last heartbeat is later than its last record.
    if not has_finished and (beat := run.last_beat(keys[0].attempt)) is not None:
        ended_at = max(ended_at, beat)
    return records.AttemptTimes(
        created_at=min(times, default=0.0), ended_at=ended_at, sessions=sessions
    )
