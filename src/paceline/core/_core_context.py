"""`core.init()` and the context of a training process, from start to end."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from paceline import faults
from paceline._base.exceptions import text_of
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunDirectory
from paceline.core._arguments import Outcome, PreemptMode, TensorboardMode
from paceline.core._attempt_journal import (
    ScriptTimes,
    begin_journal,
    begin_signs_of_life,
    describe_error,
    end_journal,
    outcome_of,
    record_time_spent,
    send_run_event,
)
from paceline.core._checkpoint_context import CheckpointContext
from paceline.core._cluster_info import ClusterInfo, cluster_info_of
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import InvalidHP
from paceline.core._node_memory import resumed_from_nodes, run_memory_storage
from paceline.core._preemption_and_search import (
    ControlFile,
    PreemptContext,
    SearchDecision,
    SearcherContext,
)
from paceline.core._process_environment import apply_determinism
from paceline.core._profiler_context import ProfilerContext
from paceline.core._read_runs import run_storage
from paceline.core._run_opening import OpenedRun, open_run
from paceline.core._run_storage import GivenStorage, NodeStorage, check_given_storage, given_storage
from paceline.core._tensorboard_files import TensorboardFiles
from paceline.core._trackers import Tracker, TrackingGroup, as_trackers
from paceline.core._train_context import (
    RunFeedback,
    TrainContext,
    alert_of,
    ending_of,
    log_alert,
    resumed_from,
)
from paceline.storage._checkpoint_storage import CheckpointStorage

_open_contexts: WeakSet["Context"] = WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParts:
    """Parts of a `Context`."""

    train: TrainContext
    checkpoint: CheckpointContext
    preempt: PreemptContext
    searcher: SearcherContext
    distributed: DistributedContext
    profiler: ProfilerContext
    info: ClusterInfo | None
    run_dir: Path
    seed: int
    journal: JournalWriter
    tensorboard: TensorboardFiles
    times: ScriptTimes
    feedback: RunFeedback
    tracking: TrackingGroup
    lock: ExitStack


class Context:
    """API of a training script, made by `core.init()`: reports, checkpoints, preemption, ranks.

    Use it as a context manager, so that the end of the script is recorded.
    """

    def __init__(self, parts: ContextParts) -> None:
        self._parts = parts
        self.train = parts.train
        self.checkpoint = parts.checkpoint
        self.preempt = parts.preempt
        self.searcher = parts.searcher
        self.distributed = parts.distributed
        self.profiler = parts.profiler
        self._is_closed = False
        _open_contexts.add(self)

    @property
    def info(self) -> ClusterInfo | None:
        """The cluster facts, as from `get_cluster_info()`; None without a cluster."""
        return self._parts.info

    @property
    def run_dir(self) -> Path:
        """The run directory with this process's journal."""
        return self._parts.run_dir

    @property
    def seed(self) -> int:
        """The seed of the trial or run, equal in all its attempts; free for any use."""
        return self._parts.seed

    @property
    def feedback(self) -> RunFeedback:
        """The lines for the person who started the run; for trainers."""
        return self._parts.feedback

    @property
    def latest_checkpoint(self) -> str | None:
        """The UUID of the checkpoint to restore, on a cluster as well as off, or None.

        On the chief it follows the checkpoints that are stored.
        """
        return self.checkpoint.to_resume

    def alert(self, title: str = "", description: str = "", level: str = "info") -> None:
        """Send an alert to the users; any rank may call, from any thread.

        A master shows it in the trial's log and as an event. Without one it is logged, and
        `paceline runs show` lists it.

        Args:
            title: A few words, 200 characters at most.
            description: More about it, 4,000 characters at most.
            level: "debug", "info", "warn" or "error".

        Raises:
            TypeError: A text is no string.
            ValueError: `level` is unknown, or there is no text, or a text is too long.
        """
        record = alert_of(title, description, level)
        self._parts.journal.append(record)
        if self.info is None or not self.info.cluster_id:
            log_alert(record, self.distributed.rank)

    def close(self, error: BaseException | None = None) -> None:
        """End; does nothing if the context is closed already.

        Args:
            error: The exception by which the script ends; by default it ends normally.
        """
        self._finish(error)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        outcome = self._finish(error)
        if outcome is Outcome.INVALID_HP:
            # The search has its answer: for the launcher and the runner this is no failure.
            request = SystemExit(0)
            request.is_success = True  # type: ignore[attr-defined] # for `pytorch.launch`
            raise request from error

    def _finish(self, error: BaseException | None) -> Outcome | None:
        if self._is_closed:
            return None
        self._is_closed = True
        _open_contexts.discard(self)
        outcome = self._outcome(error)
        parts = self._parts
        try:
            parts.preempt.close()
            is_interrupted = isinstance(error, KeyboardInterrupt)
            if error is not None and (
                is_interrupted or outcome in (Outcome.ERROR, Outcome.INVALID_HP)
            ):
                parts.distributed.fail(error)
            parts.distributed.close()
        finally:
            # Profiler before the journal's end: its last row goes into the journal.
            parts.profiler.off()
            parts.tensorboard.close()
            # Unwatch before the journal's end: the callback writes to the journal.
            self.checkpoint.storage.watch(None)
            if outcome is not Outcome.ERROR:
                parts.times.end()
            end_journal(parts.journal, outcome, error)
            parts.tracking.finish(outcome, None if error is None else describe_error(error))
            parts.lock.close()
            is_told = error is None and outcome is Outcome.PREEMPTED
            ending = "preempted" if is_told else ending_of(error)
            parts.feedback.end(ending, self.checkpoint.storage.url, self.checkpoint.latest)
        if isinstance(error, InvalidHP):
            # Last, as all workers are ended for it.
            send_run_event("invalid_hp", parts.journal, text_of(error))
        return outcome

    def _outcome(self, error: BaseException | None) -> Outcome:
        outcome = outcome_of(error)
        is_preempted = outcome is Outcome.COMPLETED and self.preempt.is_acknowledged
        return Outcome.PREEMPTED if is_preempted else outcome


def has_context() -> bool:
    """Return whether this process has begun by `core.init()` and not ended yet."""
    return bool(_open_contexts)


faults.register("core.started")


@dataclass(frozen=True, slots=True)
class _Modes:
    preempt: PreemptMode
    tensorboard: TensorboardMode


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: GivenStorage = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.OFF,
    name: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    labels: Sequence[str] = (),
    trackers: Sequence[Tracker | str] = (),
    master: str | None = None,
) -> Context:
    """Begin an attempt and return its context, for use in a `with` statement.

    Under a master the attempt's facts come from its runner. Without one the process makes a run
    directory ``./paceline_runs/<time>-<name>/``, or resumes in an earlier one, which adds the
    next attempt there.

    Args:
        distributed: This process's place among several ranks; by default from its launcher,
            see `DistributedContext.from_torch_distributed`. Every rank must then call this.
        checkpoint_storage: A directory, a URL, or the mapping of a config; the experiment's
            storage by default, and without a master the run directory, or below the URL that the
            variable PACELINE_RUNS names. Under a master a path must be absolute, as the attempt's
            own directory is deleted with the attempt.
        preempt_mode: Who may call `should_preempt()`, and where the answer comes from.
        tensorboard_mode: Who writes TensorBoard files.
        name: The run's name; the stem of the script by default. A master has its own names.
        resume: "auto" for the newest run of this name (a new one if there is none, or it is
            completed), a run directory, or the URL of a checkpoint in an object store, from which a
            new run resumes. The variable PACELINE_RESUME, set for one start, goes before it.
            A master decides by itself which checkpoint to resume from.
        seed: The seed of a run without a master, which `Context.seed` gives: a new run draws one
            by default, and an earlier one keeps its own. It seeds nothing by itself.
        hparams: The hyperparameters of a run without a master, recorded with a new one so that
            they can be shown.
        labels: Labels of a new run without a master, to find it by where a master shows it.
        trackers: Other displays of the run: `Tracker` objects, or names such as "mlflow". They work
            on the chief; other ranks ignore them.
        master: The URL of a master that shows this run live, such as "https://head:8080"; by
            default the variable PACELINE_REPORT_TO. PACELINE_TOKEN or PACELINE_TOKEN_FILE
            has its token. The run needs no answer: records are kept in its directory, and sent when
            the master answers again. Under a master it has no effect.

    Raises:
        ImportError: `TensorboardMode.AUTO` without TensorBoard, or a tracker without its library.
        TypeError: A mode or tracker is of another type, or `resume` is neither text nor a path.
        ValueError: A value is not allowed, such as a relative `checkpoint_storage` under a master,
            or a variable of the launcher is missing.
        RuntimeError: The run to resume is still running.
        NotARunDirectoryError: The run to resume does not exist.
        DistributedTimeoutError: Ranks are missing.
        CheckpointError: The object store of a new run does not answer.
    """
    _check_modes(preempt_mode, tensorboard_mode)
    if resume is not None and not isinstance(resume, (str, os.PathLike)):
        raise TypeError(f'`resume` must be "auto" or a run directory, but got {resume!r}.')
    if distributed is None:
        distributed = DistributedContext.from_torch_distributed()
    lock = ExitStack()
    try:
        storage = given_storage(checkpoint_storage)
        chosen = as_trackers(trackers) if distributed.rank == 0 else []
        place = partial(
            open_run,
            name=name,
            resume=resume,
            storage=storage,
            seed=seed,
            hparams=hparams,
            labels=labels,
            master=master,
            lock=lock,
        )
        # The chief decides, and informs every rank.
        opened = distributed.broadcast(place() if distributed.rank == 0 else None)
        assert opened is not None
        opened = resumed_from_nodes(opened, distributed)
        check_given_storage(checkpoint_storage, opened.info)
        apply_determinism()
        faults.reach("core.started")
        modes = _Modes(preempt_mode, tensorboard_mode)
        return _open_core_context(opened, distributed, storage, modes, chosen, lock)
    except BaseException as error:
        lock.close()
        distributed.fail(error)
        raise


def _check_modes(preempt_mode: object, tensorboard_mode: object) -> None:
    for name, value, kind in (
        ("preempt_mode", preempt_mode, PreemptMode),
        ("tensorboard_mode", tensorboard_mode, TensorboardMode),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"`{name}` must be a {kind.__name__}, but got {value!r}.")


def _open_core_context(
    opened: OpenedRun,
    distributed: DistributedContext,
    storage: CheckpointStorage | None,
    modes: _Modes,
    trackers: Sequence[Tracker],
    lock: ExitStack,
) -> Context:
    begin_signs_of_life()
    run = _local_run(opened)
    rank = distributed.rank
    if rank != 0:
        lock.enter_context(run.hold_rank_lock())
    storage = storage or _run_storage(run, opened, distributed)
    # Reports of an earlier attempt up to the common step: they stay valid.
    is_first = opened.attempt == opened.generation == opened.steps_completed == 0
    next_step = 0 if is_first else opened.steps_completed + 1
    tensorboard = TensorboardFiles(
        modes.tensorboard,
        info=opened.info,
        run_path=run.path,
        storage=storage,
        rank=rank,
        first_step=None if is_first else next_step,
    )
    tracking = TrackingGroup(trackers, run, opened)
    journal = begin_journal(run, opened, rank=rank, world_size=distributed.size)
    trial = opened.info.trial
    # A trial that was started without a master has no one to ask.
    is_managed = trial is not None and bool(opened.info.cluster_id)
    searcher = (trial.config.get("searcher") or {}) if trial else {}
    control = ControlFile(run)
    decision = SearchDecision(
        control=control, generation=opened.generation, metrics=opened.info.judged_metrics
    )
    preempt = PreemptContext(
        control=control,
        decision=decision,
        distributed=distributed,
        journal=journal,
        mode=modes.preempt,
        is_supervised=is_managed,
    )
    record = partial(record_time_spent, journal) if rank == 0 else None
    times = ScriptTimes(record, opened.steps_completed)
    feedback = RunFeedback(run.path, opened.info, num_workers=distributed.size, is_quiet=rank != 0)
    feedback.begin(more=resumed_from(opened))
    train = TrainContext(
        run=run,
        journal=journal,
        control=control,
        decision=decision,
        rank=rank,
        last_steps=opened.last_steps,
        searcher=searcher,
        tensorboard=tensorboard,
        times=times,
        feedback=feedback,
    )
    return Context(
        ContextParts(
            train=train,
            checkpoint=CheckpointContext(
                run=run,
                storage=storage,
                journal=journal,
                distributed=distributed,
                latest=opened.latest_checkpoint,
                memory=run_memory_storage(opened.info.run_id, distributed),
                memory_state=opened.memory_state,
                times=times,
                on_committed=tensorboard.upload_quietly,
            ),
            preempt=preempt,
            searcher=SearcherContext(
                control=control,
                decision=decision,
                distributed=distributed,
                preempt=preempt,
                journal=journal,
                searcher=searcher,
                is_managed=is_managed,
                completed_length=opened.completed_length,
            ),
            distributed=distributed,
            profiler=ProfilerContext(
                journal=journal,
                distributed=distributed,
                disk=run.path,
                reported_steps=lambda: train.steps_completed,
                first_step=next_step,
                tensorboard=tensorboard,
            ),
            info=cluster_info_of(opened.info),
            run_dir=run.path,
            seed=opened.seed,
            journal=journal,
            tensorboard=tensorboard,
            times=times,
            feedback=feedback,
            tracking=tracking,
            lock=lock,
        )
    )


def _run_storage(
    run: RunDirectory, opened: OpenedRun, distributed: DistributedContext
) -> CheckpointStorage:
    """Return the default checkpoint storage of a run started without an explicit storage."""
    if opened.info.storage_per_node and distributed.size > 1:
        return NodeStorage(run.checkpoints_path, distributed)
    return run_storage(run, opened.info)


def _local_run(opened: OpenedRun) -> RunDirectory:
    """Return this node's run directory, created here if the nodes share no file system."""
    run = RunDirectory(Path(os.environ.get(RUN_DIRECTORY_VARIABLE) or opened.path))
    if not (run.path / "run.json").exists():
        try:
            return RunDirectory.create(run.path, opened.info)
        except FileExistsError:
            # Another rank of this node was faster.
            return run
    return run
