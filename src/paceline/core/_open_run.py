"""Opening of a run: choice of directory, attempt number and checkpoint to resume from."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from paceline._base.run_directory import (
    HEARTBEAT_LIMIT_S,
    RUN_DIRECTORY_VARIABLE,
    RunDirectory,
    RunInfo,
)
from paceline.core._heartbeats_and_live_reports import (
    master_to_report_to,
    reporting,
    sending_heartbeats,
)
from paceline.core._read_runs import (
    RUNS_DIRECTORY,
    History,
    is_of_master,
    newest_run_named,
    newest_whole_checkpoint,
    read_history,
    run_storage,
)
from paceline.core._run_directories import (
    RESUME_VARIABLE,
    NewRunStart,
    checked_labels,
    checked_run_name,
    drawn_seed,
    is_checkpoint_url,
    make_run_directory,
    new_run_storage,
    recordable,
    run_name,
    run_to_resume,
    starting_point,
    warn_changed_hparams,
    warn_earlier_run,
)
from paceline.core._run_storage import discard_unfinished
from paceline.storage._checkpoint_storage import CheckpointStorage

logger = logging.getLogger(__name__)

GENERATION_VARIABLE = "PACELINE_GENERATION"

_run_numbers = count(1)
# No checkpoint has this name; errors show it.
_NO_CHECKPOINT = "access-test"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """Run opened or created by the chief, as sent to all ranks."""

    path: Path
    info: RunInfo
    seed: int
    attempt: int
    generation: int
    latest_checkpoint: str | None
    steps_completed: int
    completed_length: int = 0
    last_steps: dict[str, int] = field(default_factory=dict)


def next_run_number() -> int:
    """Return the number of this process's next run, from 1, and advance the counter."""
    return next(_run_numbers)


def open_run(
    *,
    name: str | None = None,
    number: int = 1,
    directory: Path | None = None,
    resume: str | os.PathLike[str] | None = None,
    storage: CheckpointStorage | None = None,
    seed: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    labels: Sequence[str] = (),
    is_resumable: bool = True,
    has_own_directory: bool = False,
    master: str | None = None,
    lock: ExitStack,
) -> OpenedRun:
    """Choose an attempt's directory and its checkpoint to resume from; mark the run as alive.

    Args:
        name: The run's name; the stem of the script by default. A master has its own names.
        number: Which run of its process it is, see `next_run_number`. Later ones have their number
            in the name, so that each finds its own when the process is repeated; under a master
            they continue to count steps in the one run directory.
        directory: The run directory, for a new run or to resume; below ``./paceline_runs`` by
            default. A master has its own.
        resume: "auto" for the newest run of this name, unless it is completed; a run directory; or
            the URL of a checkpoint, which a new run resumes from. The variable PACELINE_RESUME goes
            before it.
        storage: Where checkpoints go; by default the run directory, or below the URL that
            PACELINE_RUNS names.
        seed: The seed of a run without a master; drawn by default.
        hparams: The hyperparameters of a run without a master.
        labels: The labels of a new run without a master.
        is_resumable: Whether the code here can restore a stored state. Else PACELINE_RESUME is
            not for it, and an earlier run that failed is not mentioned.
        has_own_directory: Whether `directory` was given for this very run, as for a trial of a
            search: PACELINE_RESUME is not for it.
        master: The URL of a master that shows a run without one; by default the value of
            PACELINE_REPORT_TO.
        lock: Holds the run's lock until it is closed.

    Raises:
        ValueError: `name` cannot be part of a file name.
        RuntimeError: The run to resume is still running.
        NotARunDirectoryError: The run to resume does not exist.
    """
    cluster_path = os.environ.get(RUN_DIRECTORY_VARIABLE)
    master = master_to_report_to(master)
    if not cluster_path:
        if is_resumable and not has_own_directory:
            resume = os.environ.get(RESUME_VARIABLE) or resume
        if number > 1:
            name = f"{name or run_name()}-{number}"
            # A run directory or checkpoint given by name belongs to the first run.
            resume = resume if resume == "auto" else None
        return open_run_by_name(
            name=name,
            directory=directory,
            resume=resume,
            storage=storage,
            seed=seed,
            hparams=hparams,
            labels=labels,
            is_resumable=is_resumable,
            master=master,
            lock=lock,
        )
    opened = open_attempt_run(Path(cluster_path), seed)
    run = RunDirectory(opened.path)
    # A master that started the attempt gets the records from its runner.
    start_reports = lock.enter_context(reporting(run, None if opened.info.cluster_id else master))
    # A runner may hold the lock itself; then the runner's lock shows that the run is alive.
    if lock.enter_context(run.hold_attempt_lock()):
        start_reports()
    if number > 1:
        last_step = max(read_history(run).last_steps.values(), default=0)
        return replace(opened, latest_checkpoint=None, steps_completed=last_step)
    return opened


def open_attempt_run(path: Path, seed: int | None) -> OpenedRun:
    """Open the run directory prepared by a runner; a trial has its own seed.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
        ValueError: PACELINE_GENERATION is no number.
    """
    run = RunDirectory(path)
    info = run.read_info()
    generation = _run_generation(info)
    if info.trial is not None:
        seed = info.trial.trial_seed
    elif seed is None:
        seed = drawn_seed()
    taken = [key.generation for key in run.journal_keys() if key.attempt == info.attempt]
    if not taken:
        return OpenedRun(
            path=path,
            info=info,
            seed=seed,
            attempt=info.attempt,
            generation=generation,
            latest_checkpoint=info.latest_checkpoint,
            steps_completed=info.steps_completed,
        )
    # The entrypoint has run another process before this one, or its group has formed again.
    history = read_history(run)
    uuid, steps = newest_whole_checkpoint(
        run_storage(run, info),
        history,
        being_deleted={*run.begun_checkpoints()},
        may_be_gone=is_of_master(info),
    )
    if uuid is None:
        uuid, steps = info.latest_checkpoint, info.steps_completed
    return OpenedRun(
        path=path,
        info=info,
        seed=seed,
        attempt=info.attempt,
        # New generation: a second process must not write to the journals of the first.
        generation=max(generation, max(taken) + 1),
        latest_checkpoint=uuid,
        steps_completed=steps,
        completed_length=history.completed_length,
        last_steps=_steps_up_to(history, steps),
    )


def open_run_by_name(
    *,
    name: str | None,
    directory: Path | None,
    resume: str | os.PathLike[str] | None,
    storage: CheckpointStorage | None,
    seed: int | None,
    hparams: Mapping[str, Any] | None,
    labels: Sequence[str] = (),
    is_resumable: bool = True,
    master: str | None = None,
    lock: ExitStack,
) -> OpenedRun:
    """Create a run directory or open an earlier run to resume, and lock the directory.

    A new run records its seed and hyperparameters; an earlier one has its own seed, unless another
    one is given.

    Raises:
        CheckpointError: The object store of a new run does not answer.
        CheckpointNotFoundError: There is no checkpoint at the URL to resume from, or the files of
            the run to resume are not in its storage.
        ValueError: `name` cannot be part of a file name, `resume` names no run directory, or
            PACELINE_RUNS no storage.
        RuntimeError: The run to resume is still running.
    """
    name = run_name() if name is None else checked_run_name(name)
    root = Path.cwd() / RUNS_DIRECTORY
    if directory is not None and (directory / "run.json").exists():
        resume = directory
    start = None
    if is_checkpoint_url(resume):
        start = starting_point(str(resume), storage)
        storage, run = start.storage, None
        seed = start.seed if seed is None else seed
    else:
        run = run_to_resume(root, name, resume)
    if run is None:
        before = newest_run_named(root, name) if directory is None else None
        if before is not None and is_resumable and not resume:
            warn_earlier_run(before, name)
        # Before there is a directory, as it may be refused.
        place = storage or new_run_storage(root)
        if place.is_remote and is_resumable:
            # A missing bucket is reported now, not at the first checkpoint.
            place.exists(_NO_CHECKPOINT)
        path = (
            make_run_directory(root, name)
            if directory is None
            else Path(os.path.abspath(directory))
        )
        info = RunInfo(
            run_id=uuid4().hex,
            name=name,
            # Chain of runs: shows the newest even if the clock is set back.
            previous=None if before is None else before.read_info().run_id,
            created=time.time(),
            checkpoint_storage=(storage or new_run_storage(path)).url,
            arguments=list(sys.argv),
            seed=drawn_seed() if seed is None else seed,
            hparams=None if hparams is None else recordable(hparams),
            labels=checked_labels(labels),
        )
        return _place_new(path, info, start, master, lock)
    warn_changed_hparams(run.read_info(), hparams)
    return _place_resumed(run, storage, seed, master, lock)


def _place_new(
    path: Path, info: RunInfo, start: NewRunStart | None, master: str | None, lock: ExitStack
) -> OpenedRun:
    _take_lock(RunDirectory.create(path, info), master, lock)
    assert info.seed is not None
    return OpenedRun(
        path=path,
        info=info,
        seed=info.seed,
        attempt=0,
        generation=0,
        latest_checkpoint=None if start is None else start.uuid,
        steps_completed=0 if start is None else start.steps_completed,
    )


def _place_resumed(
    run: RunDirectory,
    storage: CheckpointStorage | None,
    seed: int | None,
    master: str | None,
    lock: ExitStack,
) -> OpenedRun:
    info = run.read_info()
    # Runs of earlier versions have recorded none.
    recorded = drawn_seed() if info.seed is None else info.seed
    _take_lock(run, master, lock)
    # Order matters: `discard_unfinished` below forgets these notes.
    being_deleted = {*run.begun_checkpoints()}
    discard_unfinished(run)
    # Control file of the last attempt: its commands do not concern this attempt.
    run.control_path.unlink(missing_ok=True)
    history = read_history(run)
    place = storage or run_storage(run, info)
    for stored in history.checkpoints:
        if stored.uuid in being_deleted and not place.exists(stored.uuid):
            # No journal says that it was deleted, so a later attempt must not find it either.
            run.note_checkpoint(stored.uuid, place.url)
    if not history.checkpoints:
        _warn_unknown_checkpoints(run, place)
    uuid, steps = newest_whole_checkpoint(place, history, being_deleted=being_deleted)
    return OpenedRun(
        path=run.path,
        info=info,
        seed=recorded if seed is None else seed,
        attempt=history.num_attempts,
        generation=0,
        latest_checkpoint=uuid,
        steps_completed=steps,
        completed_length=history.completed_length,
        last_steps=_steps_up_to(history, steps),
    )


def _warn_unknown_checkpoints(run: RunDirectory, storage: CheckpointStorage) -> None:
    """Warn if the run's own directory has checkpoints unknown to its journal."""
    if storage.local_root == run.checkpoints_path and (unknown := storage.list()):
        logger.warning(
            "The journal of the run %s tells of no checkpoint, but %d are there, such as %s: the"
            " journal may be damaged. The run begins anew. To begin from a checkpoint instead, set"
            " %s to its URL, such as %s.",
            run.path,
            len(unknown),
            unknown[-1],
            RESUME_VARIABLE,
            (run.checkpoints_path / unknown[-1]).as_uri(),
        )


def _take_lock(run: RunDirectory, master: str | None, lock: ExitStack) -> None:
    # Ended last, so that the end of the run is reported too.
    start_reports = lock.enter_context(reporting(run, master))
    if not lock.enter_context(run.hold_attempt_lock()):
        raise RuntimeError(
            f"A run must not be resumed while it is running, but {str(run.path)!r} is. Hint: stop"
            " that process first, or start a run of another `name`."
        )
    if run.is_beating_elsewhere():
        logger.warning(
            "The run %s was at work on another machine less than %d s ago. Make sure that it has"
            " ended there: two processes of one run spoil each other's results.",
            run.path,
            HEARTBEAT_LIMIT_S,
        )
    keys = run.journal_keys()
    if keys:
        with suppress(OSError):
            run.keep_last_beat(max(keys).attempt)
    lock.enter_context(sending_heartbeats(run))
    start_reports()


def _run_generation(info: RunInfo) -> int:
    text = os.environ.get(GENERATION_VARIABLE)
    if text is None:
        return info.generation
    if not text.isdecimal():
        raise ValueError(f"{GENERATION_VARIABLE} must be a number, but got {text!r}.")
    return int(text)


def _steps_up_to(history: History, steps_completed: int) -> dict[str, int]:
    """Return the last valid step of each group for an attempt resuming from a step."""
    return {group: min(step, steps_completed) for group, step in history.last_steps.items()}


def join_run(opened: OpenedRun, lock: ExitStack, *, is_chief: bool) -> OpenedRun:
    """Return the chief's opened run with this node's directory, and mark the run as alive.

    Each node of a master's attempt has a run directory of its own, which its runner ships. Other
    runs are in one directory that all nodes see.

    Args:
        opened: The run as the chief has opened it.
        lock: Holds the lock of this rank until it is closed.
        is_chief: Whether this process has opened it, and so holds the run's lock.
    """
    own = os.environ.get(RUN_DIRECTORY_VARIABLE)
    if own and opened.info.cluster_id:
        opened = replace(opened, path=Path(own), info=RunDirectory(Path(own)).read_info())
    if not is_chief:
        lock.enter_context(RunDirectory(opened.path).hold_rank_lock())
    return opened
