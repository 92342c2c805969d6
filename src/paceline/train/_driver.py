"""One run, as its driver conducts it: call, follow, recover, and collect what is left."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import core
from paceline.journal import (
    CheckpointDeleted,
    CheckpointStored,
    JournalKey,
    MetricsReported,
    RunDirectory,
    RunTail,
)
from paceline.storage import DirectoryStorage, storage_from
from paceline.train._callbacks import TrainingCallback
from paceline.train._checkpoint import Checkpoint
from paceline.train._config import CheckpointStrategy
from paceline.train._errors import IncompleteCheckpointError, WorkersLostError
from paceline.train._group import Call, InlineGroup, InWorker, TrainGroup
from paceline.train._output import WorkerOutput
from paceline.train._results import Report, Results, report_of
from paceline.train._spec import (
    METRICS_GROUP,
    Job,
    KeptCheckpoint,
    Outcome,
    RunSpec,
    StoredAt,
    group_of_rank,
)
from paceline.workers import WorkerFailedError, WorkerStartError

logger = logging.getLogger(__name__)

# How often the journals are looked at while the workers compute, in seconds.
_LOOK_INTERVAL_S = 0.01
_SETTLE_S = 600.0
_ENTRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `Trainer.run` was asked for.

    Attributes:
        function: The train function.
        config: What it is given.
        dataset: What `get_dataset` returns in it.
        has_dataset: Whether there is one.
        checkpoint: What to go on from, if it is stored.
        state: The same, if it is a state in memory.
        strategy: Which checkpoints to keep.
        callbacks: Who follows the run.
        max_retries: How often workers may be lost.
    """

    function: Callable[..., Any]
    config: dict[str, Any] | None
    dataset: Any
    has_dataset: bool
    checkpoint: Checkpoint | None
    state: Any
    strategy: CheckpointStrategy
    callbacks: Sequence[TrainingCallback]
    max_retries: float


class RunDriver:
    """Conduct one run; `advance` until it is finished.

    Args:
        group: The workers.
        request: What to do.
        placement: Where the run writes.
        output: Where the workers' lines go.
    """

    def __init__(
        self,
        group: TrainGroup | InlineGroup,
        request: Request,
        placement: core.Placement,
        output: WorkerOutput,
    ) -> None:
        self.is_finished = False
        self.results: Results | None = None
        self.error: BaseException | None = None
        self.checkpoints: dict[str, Checkpoint] = {}
        self._group = group
        self._request = request
        self._placement = placement
        self._lock = ExitStack()
        self._output = output
        self._run = RunDirectory(placement.path)
        self._generation = placement.generation
        self._num_losses = 0
        self._lags_s: dict[int, float] = {}
        self._taken: list[Report] = []
        self._call: Call | None = None
        self._is_done = threading.Event()
        self._tail = RunTail(self._run, _marks_of_earlier(self._run))
        self._spec = self._make_spec()

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._run.path

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best checkpoint by the strategy, the newest if it names no value."""
        checkpoints = list(self.checkpoints.values())
        if self._request.strategy.checkpoint_score_attribute is None:
            return checkpoints[-1] if checkpoints else None
        scored = [(c.score, c) for c in checkpoints if c.score is not None]
        sign = 1 if self._request.strategy.checkpoint_score_order == "max" else -1
        # Of equals the earlier one.
        best = max(scored, key=lambda pair: sign * pair[0], default=None)
        return None if best is None else best[1]

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run."""
        return list(self.checkpoints.values())[-1] if self.checkpoints else None

    def start(self, lock: ExitStack) -> None:
        """Tell the callbacks and give the workers the function.

        Args:
            lock: Holds the run's lock, which is given back at the end.

        Raises:
            Exception: A callback raised it, or the workers could not be formed.
        """
        self._lock = lock
        try:
            self._output.open(self._run.logs_path)
            for callback in self._request.callbacks:
                callback.start_training(
                    self._run.path, self._request.config, self._group.num_workers
                )
            self._form_and_call()
        except BaseException as error:
            self._end(error)
            raise

    def advance(self, timeout_s: float | None = None) -> list[Report]:
        """Return new reports, once there are some, the run is finished, or the time is over.

        Raises:
            WorkersLostError: Workers were lost too often.
            IncompleteCheckpointError: Ranks have saved unequally many checkpoints.
            Exception: What the user's function or a callback raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self.is_finished:
                is_done = self._is_done.wait(_LOOK_INTERVAL_S)
                # Looked at after the end, the journals hold all that was reported before it.
                self._follow()
                if is_done:
                    self._take_outcome()
                if self._taken or (deadline is not None and time.monotonic() >= deadline):
                    break
        except BaseException as error:
            self._end(error)
            raise
        reports, self._taken = self._taken, []
        return reports

    def close(self) -> None:
        """Give up a run that is not finished; its workers are stopped."""
        if not self.is_finished:
            self._end(RuntimeError("The run was given up before its end."))

    # ---- calling -------------------------------------------------------------------------

    def _make_spec(self) -> RunSpec:
        placement, request = self._placement, self._request
        storage = core.storage_at(placement.path)
        start = request.checkpoint
        if start is None and placement.latest_checkpoint is not None:
            start = Checkpoint.stored(storage, placement.latest_checkpoint)
        num_workers = max(1, self._group.num_workers)
        strategy = request.strategy
        return RunSpec(
            run_id=placement.info.run_id,
            run_dir=str(placement.path),
            storage=storage.url,
            attempt=placement.attempt,
            generation=placement.generation,
            seed=placement.seed if start is None else int(start.metadata["seed"]),
            num_shards=num_workers if start is None else int(start.metadata["num_shards"]),
            checkpoint=None if start is None else StoredAt(start.storage, start.uuid),
            num_to_keep=strategy.num_to_keep,
            first_report=placement.steps_completed if start is None else 0,
            score_attribute=strategy.checkpoint_score_attribute,
            is_score_minimized=strategy.checkpoint_score_order == "min",
        )

    def _form_and_call(self) -> None:
        """Have workers carry out the function, after forming them if need be."""
        while True:
            try:
                if not self._group.is_alive:
                    self._group.form()
                self._submit()
                return
            except (WorkerFailedError, WorkerStartError) as error:
                self._note_loss(error)

    def _submit(self) -> None:
        request = self._request
        job = Job(
            function=request.function,
            spec=self._spec,
            config=request.config,
            dataset=request.dataset,
            has_dataset=request.has_dataset,
            state=request.state,
        )
        self._is_done.clear()
        if isinstance(self._group, InlineGroup):
            self._call = self._group.run(job, self._follow)
        else:
            self._call = self._group.submit(InWorker("run_job", request.function), (job,))
        self._call.add_done_callback(lambda _: self._is_done.set())

    def _note_loss(self, error: Exception) -> None:
        """Count lost workers, and prepare the next generation.

        Raises:
            WorkersLostError: There were too many.
        """
        self._num_losses += 1
        limit = self._request.max_retries
        if self._num_losses > limit:
            raise WorkersLostError(
                f"Workers must not be lost more often than `max_retries` ({limit:g}) allows, but"
                f" were {self._num_losses} time(s). The last time: {error} Hint: the output of the"
                f" workers is in {str(self._run.logs_path)!r}.",
                self._num_losses,
            ) from error
        self._generation += 1
        latest = self.latest_checkpoint
        logger.warning(
            "%s Starting the workers again (%d of %g), %s.",
            error,
            self._num_losses,
            limit,
            "from the beginning" if latest is None else f"from checkpoint {latest.uuid}",
        )
        self._sweep()
        self._spec = replace(
            self._spec,
            generation=self._generation,
            checkpoint=self._spec.checkpoint
            if latest is None
            else StoredAt(latest.storage, latest.uuid),
            kept=tuple(
                KeptCheckpoint(c.uuid, int(c.metadata["steps_completed"]), c.score)
                for c in self.checkpoints.values()
            ),
        )
        for callback in self._request.callbacks:
            callback.handle_restart(error, self._generation)

    def _sweep(self) -> None:
        """Remove what lost workers have left of checkpoints that were not committed."""
        storage = storage_from(self._spec.storage)
        is_own = isinstance(storage, DirectoryStorage) and self._run.path in storage.root.parents
        if is_own:
            storage.sweep(older_than_s=0)

    # ---- following -----------------------------------------------------------------------

    def _follow(self) -> None:
        """Take in what the workers have written."""
        num_read = _ENTRIES
        while num_read == _ENTRIES:
            num_read = 0
            for key, entries in self._tail.read(_ENTRIES):
                num_read += len(entries)
                now = time.time()
                for entry in entries:
                    self._take(key, entry.decode(), now)

    def _take(self, key: JournalKey, record: Any, now: float) -> None:
        callbacks = self._request.callbacks
        if isinstance(record, MetricsReported):
            if record.group != group_of_rank(METRICS_GROUP, key.rank):
                return
            report = report_of(key, record, max(0.0, now - record.time))
            self._lags_s[key.rank] = max(self._lags_s.get(key.rank, 0.0), report.lag_s)
            self._taken.append(report)
            for callback in callbacks:
                callback.handle_result(report)
        elif isinstance(record, CheckpointStored):
            checkpoint = Checkpoint(
                uuid=record.uuid, storage=record.storage, metadata=record.metadata
            )
            self.checkpoints[record.uuid] = checkpoint
            for callback in callbacks:
                callback.handle_checkpoint(checkpoint)
        elif isinstance(record, CheckpointDeleted):
            self.checkpoints.pop(record.uuid, None)

    # ---- ending --------------------------------------------------------------------------

    def _take_outcome(self) -> None:
        """Collect what the function returned, or begin anew if workers were lost."""
        assert self._call is not None
        try:
            outcomes: list[Outcome] = self._call.wait() or []
            self._settle(outcomes)
        except WorkerFailedError as error:
            self._follow()
            self._note_loss(error)
            self._form_and_call()
            return
        self._follow()
        self.results = Results(
            [outcome.value for outcome in outcomes],
            run_dir=self._run.path,
            attempt=self._placement.attempt,
            generations=range(self._placement.generation, self._generation + 1),
            checkpoints=list(self.checkpoints.values()),
            best=self.best_checkpoint,
            num_restarts=self._num_losses,
            report_lags_s=self._lags_s,
        )
        self._check_saves(outcomes)
        self._warn_of_counts(outcomes)
        self._end(None)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        """Wait until the checkpoints are committed that all ranks have saved."""
        if any(outcome.num_pending for outcome in outcomes):
            num_saves = min(outcome.num_saves for outcome in outcomes)
            call = self._group.submit(InWorker("settle"), (num_saves, _SETTLE_S), ranks=[0])
            call.wait()

    def _check_saves(self, outcomes: Sequence[Outcome]) -> None:
        counts = [outcome.num_saves for outcome in outcomes]
        most, least = max(counts), min(counts)
        if most == least:
            return
        few = ", ".join(
            f"rank {rank} has made {count}" for rank, count in enumerate(counts) if count < most
        )
        raise IncompleteCheckpointError(
            f"All ranks must call `save_checkpoint` equally often, but {few} of {most} calls:"
            f" {most - least} checkpoint(s) do not exist. Hint: call it on every rank; only the"
            " chief's state is stored. The values that were returned are in this error's"
            " `results`.",
            self.results,
        )

    def _warn_of_counts(self, outcomes: Sequence[Outcome]) -> None:
        counts = {rank: o.num_reports for rank, o in enumerate(outcomes) if o.num_reports}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
            logger.warning("The ranks have reported unequally often: %s.", told)

    def _end(self, error: BaseException | None) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self.error = error
        is_failure = error is not None and not isinstance(error, IncompleteCheckpointError)
        try:
            if is_failure and self._group.is_alive and not self._is_done.is_set():
                self._group.stop(force=True)
            if is_failure:
                self._follow()
        finally:
            self._lock.close()
            self._tell_end(error)

    def _tell_end(self, error: BaseException | None) -> None:
        for callback in self._request.callbacks:
            try:
                callback.finish_training(error)
            except Exception:
                if error is None:
                    raise
                # The first error is the one to raise.
                logger.exception("A callback failed at the end of a failed run.")


def _marks_of_earlier(run: RunDirectory) -> dict[JournalKey, int]:
    """Return marks by which the journals that are there already are passed over."""
    return dict.fromkeys(run.journal_keys(), 1 << 62)
