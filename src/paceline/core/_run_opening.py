"""Directories of runs without a master: names, earlier runs, settings, and opening of a run."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4

from paceline._base.progress_regions import is_notebook
from paceline._base.run_directory import (
    HEARTBEAT_LIMIT_S,
    RUN_DIRECTORY_VARIABLE,
    NotARunDirectoryError,
    RunDirectory,
    RunInfo,
)
from paceline.core._arguments import checked_labels, drawn_seed, recordable, warn_changed_hparams
from paceline.core._heartbeats_and_live_reports import (
    master_to_report_to,
    reporting,
    sending_heartbeats,
)
from paceline.core._read_runs import (
    RUNS_DIRECTORY,
    History,
    RunState,
    is_of_master,
    latest_checkpoint,
    newest_run_named,
    newest_whole_checkpoint,
    read_history,
    run_state,
    run_storage,
)
from paceline.core._run_storage import discard_unfinished, newest_in_memory
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_from_url import checkpoint_at, storage_from

logger = logging.getLogger(__name__)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A directory's name has no more than 255: a time before it, and perhaps a number behind.
_LONGEST_NAME = 230


def run_name(file: str | os.PathLike[str] | None = None) -> str:
    """Return a default run name: the stem of a file, by default the script's."""
    script = Path(file if file is not None else sys.argv[0] if sys.argv else "")
    stem = script.parent.name if script.stem == "__main__" else script.stem
    if stem == "ipykernel_launcher":
        stem = "notebook"
    elif stem in ("", "-c"):
        stem = "notebook" if is_notebook() else "python"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:_LONGEST_NAME].strip("-.") or "run"


def checked_run_name(name: str) -> str:
    """Return a given run name, once checked.

    Raises:
        ValueError: It cannot be part of a file name, or is too long.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            "`name` must consist of letters, digits, dots, hyphens and underscores, and begin"
            f" with a letter or digit, but got {name!r}."
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"`name` must have {_LONGEST_NAME} characters at most, as it is part of a directory's"
            f" name, but {name[:20]!r}... has {len(name)}. Hint: shorten it; `hparams`"
            " can hold what the run is about."
        )
    return name


def make_run_directory(root: Path, name: str) -> Path:
    """Create a new directory for a run, never shared with another run, and return its path."""
    root.mkdir(exist_ok=True)
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    number = 1
    while True:
        path = root / (base if number == 1 else f"{base}-{number}")
        try:
            # Creation claims the name: runs begun in the same second get different numbers.
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path


def local_directory(
    path: str | os.PathLike[str] | None, name: str, contents: str = "the journal of a run stays"
) -> Path | None:
    """Return a directory of this machine as an absolute path; None for None.

    Args:
        path: The user's path.
        name: The name of the argument.
        contents: The guaranteed contents, for the error.

    Raises:
        ValueError: It is a URL.
    """
    if path is None:
        return None
    if "://" in os.fspath(path):
        raise ValueError(
            f"`{name}` must be a directory of this machine, where {contents}, but got"
            f" {os.fspath(path)!r}. Hint: `checkpoint_storage` takes URLs."
        )
    return Path(os.path.abspath(path))


RUNS_VARIABLE = "PACELINE_RUNS"
RESUME_VARIABLE = "PACELINE_RESUME"


class NewRunStart(NamedTuple):
    """Start of a new run from a checkpoint of another machine's run.

    `seed` is the training's seed, if the checkpoint has it.
    """

    storage: CheckpointStorage
    uuid: str
    steps_completed: int
    seed: int | None


def new_run_storage(path: Path) -> CheckpointStorage:
    """Return the storage of the run at a path: in its directory, or below the PACELINE_RUNS URL.

    Raises:
        StorageNotInstalledError: No installed package offers the URL's scheme.
        ValueError: PACELINE_RUNS is no URL of a storage.
    """
    url = os.environ.get(RUNS_VARIABLE)
    if not url:
        return DirectoryStorage(RunDirectory(path).checkpoints_path)
    if "://" not in url:
        raise ValueError(
            f"`{RUNS_VARIABLE}` must be the URL of an object store for checkpoints, but got"
            f" {url!r}. Hint: s3://bucket/prefix; the journals of runs stay in ./paceline_runs."
        )
    try:
        # Check of the plain URL first: without a bucket, the run's name would pass for a bucket.
        storage_from(url)
        return storage_from(f"{url.rstrip('/')}/{quote(path.name)}")
    except ValueError as error:
        # Argument name in the message: usually `checkpoint_storage`, here the variable.
        text = str(error).replace("`checkpoint_storage`", f"`{RUNS_VARIABLE}`")
        raise type(error)(text) from error


def is_checkpoint_url(resume: str | os.PathLike[str] | None) -> bool:
    """Return whether `resume` is the URL of a checkpoint rather than a run directory."""
    return isinstance(resume, str) and "://" in resume


def starting_point(url: str, storage: CheckpointStorage | None) -> NewRunStart:
    """Return the checkpoint at a URL; the new run stores its own checkpoints beside this start.

    Args:
        url: The URL of the checkpoint.
        storage: The storage that the script names, if it names one.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        ValueError: It is in another storage than the script names.
    """
    found, uuid = checkpoint_at(url)
    if storage is not None and storage.url != found.url:
        raise ValueError(
            f"A checkpoint to resume from must be in the `checkpoint_storage` {storage.url!r}, but"
            f" got {url!r}. Hint: leave `checkpoint_storage` out, and the run continues there."
        )
    metadata = found.manifest(uuid).metadata
    steps, seed = metadata.get("steps_completed"), metadata.get("seed")
    return NewRunStart(
        found, uuid, steps if isinstance(steps, int) else 0, seed if isinstance(seed, int) else None
    )


_resume_hint: ContextVar[str] = ContextVar(
    "resume_hint", default=', or pass resume="auto" to init()'
)


@contextmanager
def resuming_by(hint: str) -> Iterator[None]:
    """Set the ending of hints about earlier runs to code for the caller's users, in the block."""
    token = _resume_hint.set(hint)
    try:
        yield
    finally:
        _resume_hint.reset(token)


def run_to_resume(
    root: Path, name: str, resume: str | os.PathLike[str] | None
) -> RunDirectory | None:
    """Return the run to resume; None to start a new run.

    Args:
        root: The directory of runs.
        name: The name of the run.
        resume: "auto" for the newest run of the name, unless it is completed; or a run directory.

    Raises:
        NotARunDirectoryError: There is no run at `resume`.
    """
    if not resume:
        return None
    if resume != "auto":
        path = Path(os.path.abspath(resume))
        if (path / "manifest.json").exists() and not (path / "run.json").exists():
            raise NotARunDirectoryError(
                f"`resume` must name a run directory or the URL of a checkpoint, but {str(path)!r}"
                f" is the directory of a checkpoint. Hint: {path.as_uri()!r} is its URL."
            )
        return RunDirectory.open(path)
    run = newest_run_named(root, name)
    if run is None:
        elsewhere = (
            f" To resume a run of another machine, set {RESUME_VARIABLE} to the URL of its"
            " checkpoint."
        )
        hint = elsewhere if os.environ.get(RUNS_VARIABLE) else ""
        logger.info("No earlier run %r in %s: starting a new one.%s", name, root, hint)
        return None
    state = run_state(run, read_history(run))
    if state in (RunState.COMPLETED, RunState.INVALID_HP):
        logger.warning(
            "The last run %r (%s) is %s: starting a new one.", name, run.path, state.value
        )
        return None
    return run


def warn_earlier_run(run: RunDirectory, name: str) -> None:
    """Warn about a crashed or preempted last run of this name before a new run begins."""
    history = read_history(run)
    state = run_state(run, history)
    if state not in (RunState.CRASHED, RunState.PREEMPTED):
        return
    uuid, steps = latest_checkpoint(run_storage(run, run.read_info()), history)
    found = f"its latest checkpoint is {uuid} at step {steps}" if uuid else "it has no checkpoint"
    logger.warning(
        "The last run %r (%s) %s at step %d; %s. This start begins a new run. To resume that"
        " one instead, set %s=%s%s.",
        name,
        run.path,
        "crashed" if state is RunState.CRASHED else "was preempted",
        max(history.last_steps.values(), default=0),
        found,
        RESUME_VARIABLE,
        run.path,
        _resume_hint.get(),
    )


GENERATION_VARIABLE = "PACELINE_GENERATION"

_run_numbers = count(1)
# No checkpoint has this name; errors show it.
_NO_CHECKPOINT = "access-test"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """Run opened or created by the chief, as sent to all ranks.

    `memory_state` is a state in memory that is newer than `latest_checkpoint`. The steps are its.
    """

    path: Path
    info: RunInfo
    seed: int
    attempt: int
    generation: int
    latest_checkpoint: str | None
    steps_completed: int
    completed_length: int = 0
    last_steps: dict[str, int] = field(default_factory=dict)
    memory_state: str | None = None


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
        seed: The seed of a run without a master; drawn by default. An earlier run has its own,
            unless another one is given.
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
        CheckpointError: The object store of a new run does not answer.
        CheckpointNotFoundError: There is no checkpoint at the URL to resume from, or the files of
            the run to resume are not in its storage.
        ValueError: `name` cannot be part of a file name, `resume` names no run directory, or
            PACELINE_RUNS no storage.
        RuntimeError: The run to resume is still running.
        NotARunDirectoryError: The run to resume does not exist.
    """
    cluster_path = os.environ.get(RUN_DIRECTORY_VARIABLE)
    master = master_to_report_to(master)
    if cluster_path:
        return _open_prepared_run(Path(cluster_path), number, seed, master, lock)
    if is_resumable and not has_own_directory:
        resume = os.environ.get(RESUME_VARIABLE) or resume
    if number > 1:
        name = f"{name or run_name()}-{number}"
        # A run directory or checkpoint given by name belongs to the first run.
        resume = resume if resume == "auto" else None
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


def _open_prepared_run(
    path: Path, number: int, seed: int | None, master: str | None, lock: ExitStack
) -> OpenedRun:
    opened = open_attempt_run(path, seed)
    run = RunDirectory(opened.path)
    # A master that started the attempt gets the records from its runner.
    start_reports = lock.enter_context(reporting(run, None if opened.info.cluster_id else master))
    # A runner may hold the lock itself; then the runner's lock shows that the run is alive.
    if lock.enter_context(run.hold_attempt_lock()):
        start_reports()
    if number > 1:
        last_step = max(read_history(run).last_steps.values(), default=0)
        return replace(opened, latest_checkpoint=None, steps_completed=last_step, memory_state=None)
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
        # A runner leaves there what the attempt before had, if the master has all of its reports.
        state, steps = newest_in_memory(info.run_id, info.steps_completed)
        return OpenedRun(
            path=path,
            info=info,
            seed=seed,
            attempt=info.attempt,
            generation=generation,
            latest_checkpoint=info.latest_checkpoint,
            steps_completed=steps,
            memory_state=state,
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
    state, steps = newest_in_memory(info.run_id, steps)
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
        last_steps=steps_up_to(history, steps),
        memory_state=state,
    )


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
    state, steps = newest_in_memory(info.run_id, steps)
    return OpenedRun(
        path=run.path,
        info=info,
        seed=recorded if seed is None else seed,
        attempt=history.num_attempts,
        generation=0,
        latest_checkpoint=uuid,
        steps_completed=steps,
        completed_length=history.completed_length,
        last_steps=steps_up_to(history, steps),
        memory_state=state,
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


def steps_up_to(history: History, steps_completed: int) -> dict[str, int]:
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
