"""A training by the loop until its end, with its progress."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch

from paceline import core
from paceline._base.progress_display import TrainingProgress
from paceline._training.engine.checkpoints.checkpoint_saver import BestValidation
from paceline._training.engine.metric_reducers import ReducerSet
from paceline._training.engine.profiling import TraceProfiler
from paceline._training.engine.schedules import (
    Batch,
    Epoch,
    Position,
    Record,
    Schedule,
    StopReason,
    TrainUnit,
    end_of_piece,
)
from paceline.core._core_context import Context
from paceline.core._train_context import ending_of
from paceline.pytorch._loop_agreement import RankWish
from paceline.pytorch._training_checkpoints import TrainingCheckpoints
from paceline.pytorch._training_loop import DrivenLoop, TrainingLoop

_UNIT_NAMES: dict[type[TrainUnit], str] = {Batch: "batches", Epoch: "epochs", Record: "records"}
_ENDINGS = {
    StopReason.LENGTH: "completed",
    StopReason.REQUESTED: "stopped",
    StopReason.TEST: "completed (test mode)",
}


class LengthProgress:
    """Progress towards a length, from `begin` to `end`.

    A master shows the reports it gets, so nothing is shown in a trial of a master.

    Args:
        context: The core context.
    """

    def __init__(self, context: core.Context) -> None:
        has_master = context.info is not None and bool(context.info.cluster_id)
        self._is_quiet = has_master or context.distributed.rank != 0
        self._context = context
        self._length: TrainUnit | None = None
        self._loop: TrainingLoop | None = None
        self._display: TrainingProgress | None = None
        self._reason: StopReason | None = None
        self._reported: dict[str, Any] = {}

    def begin(self, length: TrainUnit | None, loop: TrainingLoop) -> None:
        """Show progress towards a length; continue a display of the same length.

        Args:
            length: Where training ends; None if that is not known, as it goes piece by piece.
            loop: The training loop.
        """
        position = loop.position
        is_shown = self._display is not None and length == self._length
        self._length, self._loop, self._reason = length, loop, None
        if is_shown:
            return
        if self._display is not None:
            self._display.close()
        self._context.feedback.hand_over()
        self._display = TrainingProgress(
            None if length is None else length.length,
            "batches" if length is None else _UNIT_NAMES[type(length)],
            is_quiet=self._is_quiet,
        )
        self._display.start(
            self._completed(position),
            position.records,
            batches=position.batches,
            epoch=_present_epoch(position),
        )

    @contextmanager
    def towards(self, length: TrainUnit | None, loop: TrainingLoop) -> Iterator[None]:
        """Show progress towards a length within a block, and the outcome at its end."""
        self.begin(length, loop)
        with self:
            yield

    def __enter__(self) -> None:
        """Do nothing: `begin` shows more."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Show how training has ended, and no more."""
        if self._display is None or self._loop is None:
            return
        self.update(self._loop.position)
        display, self._display = self._display, None
        context, ending = self._context, self._ending(error)
        storage, latest = context.checkpoint.storage.url, context.checkpoint.latest
        display.end(ending, *context.feedback.details(ending, storage, latest))

    def note(self, text: str) -> None:
        """Show an activity other than training."""
        if self._display is not None:
            self._display.note(text)

    def update(self, position: Position) -> None:
        """Show how far training is."""
        if self._display is not None:
            self._display.update(
                self._completed(position),
                position.records,
                self._newest_metrics(),
                batches=position.batches,
                epoch=_present_epoch(position),
            )

    def report(self, position: Position, metrics: Mapping[str, Any], group: str) -> None:
        """Show metrics of training or of a validation."""
        if group == "training":
            self._reported = dict(metrics)
        self.update(position)
        if self._display is not None:
            self._display.report(metrics, group)

    def note_reason(self, reason: StopReason) -> None:
        """Take note of why training has ended."""
        self._reason = reason

    def fraction(self, position: Position) -> float | None:
        """Return the completed fraction of the length, at most 1, or None without a length."""
        length = self._length
        if length is None:
            return None
        completed = self._completed(position)
        done = length.count(position) if completed is None else completed
        return min(done / length.length, 1.0)

    def _newest_metrics(self) -> dict[str, Any] | None:
        """Return the last reported metrics, updated by newer values available without waiting."""
        if self._loop is None or self._display is None or not self._display.is_live:
            return None
        return {**self._reported, **self._loop.means.peek()}

    def _completed(self, position: Position) -> float | None:
        """Return progress in units of the length; None within an epoch of unknown length."""
        length = self._length
        if length is None:
            return float(position.batches)
        part = 0.0
        if isinstance(length, Epoch) and position.batch_in_epoch and self._loop is not None:
            order = self._loop.data.order(position.epochs)
            if order is None:
                return None
            part = position.batch_in_epoch / order.num_batches
        return length.count(position) + part

    def _ending(self, error: BaseException | None) -> str:
        ending = ending_of(error)
        if ending != "completed":
            return ending
        if self._reason is not None and self._reason is not StopReason.LENGTH:
            return _ENDINGS.get(self._reason, str(self._reason.value))
        length, loop = self._length, self._loop
        is_short = length is not None and loop is not None and not length.is_reached(loop.position)
        return "stopped" if is_short else "completed"


def _present_epoch(position: Position) -> int:
    """Return the epoch of the last batch, from 1."""
    return max(position.epochs + bool(position.batch_in_epoch), 1)


# Their times differ from run to run, so they stay apart from the metrics of training.
_TIMINGS_GROUP = "profiling"


class TrainingFit(ABC):
    """Training run by a front door, as a whole or in pieces.

    Subclasses build the loop, and are its hooks.

    Args:
        core: The core context.
        on_stored: Called with the UUID of each checkpoint that exists.

    Attributes:
        loop: The loop, once it was built.
        checkpoints: The checkpoints.
        progress: The progress towards the length.
        best_validation: Which validations deserve a checkpoint.
        metrics: The metrics that were reported last.
        validation_metrics: The metrics of the last validation.
        validation_limit: At most so many batches are validated; None for all.
        piece_end: Where a piece of `train_piece` ends that was begun: the name of its unit, and the
            count.
    """

    loop: DrivenLoop

    def __init__(self, core: Context, on_stored: Callable[[str], None]) -> None:
        self.best_validation = BestValidation()
        self.metrics: dict[str, Any] = {}
        self.validation_metrics: dict[str, Any] = {}
        self.validation_limit: int | None = None
        self.piece_end: list[Any] | None = None
        self.checkpoints = TrainingCheckpoints(core, on_stored)
        self.progress = LengthProgress(core)
        self._core = core

    @property
    @abstractmethod
    def models(self) -> Iterable[torch.nn.Module]:
        """The models being trained."""

    @property
    def tracer(self) -> TraceProfiler | None:
        """The profiler for traces, or None."""
        return None

    @abstractmethod
    def save(self) -> None:
        """Capture the state and store it in the background, unless this position is saved."""

    @abstractmethod
    def serve_memory(self, wish: RankWish) -> None:
        """Save the state to memory, or give the memory up; all ranks call it."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the checkpoint being stored, and end the training."""

    # ---- running -------------------------------------------------------------------------

    def run(self, schedule: Schedule) -> StopReason:
        """Train to a length; if asked to leave, store a checkpoint and acknowledge."""
        self.set_training_mode()
        self.loop.tracer = self.tracer
        reason = self.loop.run(schedule)
        self.progress.note_reason(reason)
        if reason.is_early:
            # The open sums stay in the checkpoint and are reported when they would have been
            # without the interruption.
            self._store_leaving(reason)
        return reason

    def fit(self, schedule: Schedule, *, is_test: bool, is_validated_first: bool) -> StopReason:
        """Train to a length, validate and store at its end, and close the training.

        Args:
            schedule: The times of validations, reports and checkpoints.
            is_test: Whether this is a test of one batch.
            is_validated_first: Whether to validate before the first batch.
        """
        self.validation_limit = 1 if is_test else None
        self.checkpoints.forget_uuids()
        self.piece_end = None
        length = schedule.max_length
        if length is not None and length.is_passed(self.loop.position):
            # An earlier call has trained this far; a later one continues.
            self.close()
            return StopReason.LENGTH
        profiler = self._core.profiler
        is_profiled = self.loop.timeline.window.enabled
        if is_profiled:
            profiler.on()
        with self.progress.towards(length, self.loop):
            try:
                with self.interrupt_watched():
                    reason = self._fit(schedule, is_validated_first=is_validated_first)
            finally:
                self.close()
                if is_profiled:
                    profiler.off()
            if is_test:
                reason = StopReason.TEST
            self.progress.note_reason(reason)
        return reason

    def _fit(self, schedule: Schedule, *, is_validated_first: bool) -> StopReason:
        if is_validated_first and self.loop.position.batches == 0:
            self.loop.validate()
        reason = self.run(schedule)
        if not reason.is_early:
            self.loop.report()
            if reason is not StopReason.REQUESTED:
                self.loop.validate()
            self.store()
        return reason

    def train_piece(
        self, unit: TrainUnit, whole: TrainUnit | None, *, stop_on_nan: bool
    ) -> StopReason:
        """Train the next batches, epochs or records; a stored piece continues to its end.

        Args:
            unit: How much.
            whole: How long training is in all, if that is known.
            stop_on_nan: Whether to stop when the training loss is not finite.
        """
        end = end_of_piece(self.piece_end, unit, self.loop.position)
        self.piece_end = [type(end).__name__, end.length]
        self.metrics = {}
        self.loop.means.stop_on_nan = stop_on_nan
        self.progress.begin(whole, self.loop)
        with self.interrupt_watched():
            reason = self.run(Schedule(max_length=end))
        # An early end keeps `piece_end`: a resumed run completes the piece.
        if reason.is_early:
            self.close()
            return reason
        self.piece_end = None
        self.loop.report()
        if reason is StopReason.REQUESTED:
            self.store()
        return reason

    @contextmanager
    def own_epoch(self, whole: TrainUnit | None) -> Iterator[Generator[Any, None, StopReason]]:
        """Yield the shards of the rest of an epoch, for a loop of the user's own in the block.

        A loop that is left before its end has ended the epoch. The generator returns why it ended;
        if that is early, the state is stored.

        Args:
            whole: How long training is in all, if that is known.
        """
        self.set_training_mode()
        shards = self._own_shards(whole)
        with self.interrupt_watched(), closing(shards):
            yield shards
            state = inspect.getgeneratorstate(shards)
            if state == inspect.GEN_SUSPENDED:
                self.loop.is_left = True
                # Generator runs once more: with `is_left` set, the last batch is finished.
                next(shards, None)
            if state != inspect.GEN_CREATED:
                self.loop.end_epoch()

    def _own_shards(self, whole: TrainUnit | None) -> Generator[Any, None, StopReason]:
        self.piece_end, self.metrics = None, {}
        self.loop.tracer = self.tracer
        self.progress.begin(whole, self.loop)
        reason = yield from self.loop.shards()
        self.progress.note_reason(reason)
        if reason.is_early:
            self._store_leaving(reason)
            self.close()
        return reason

    def _store_leaving(self, reason: StopReason) -> None:
        """Store the state of a training that was asked to leave, and acknowledge that.

        With states in memory, this one goes there first, and to the next node if there are several:
        the storage may take longer than the time from the notice to the kill.
        """
        memory = self.checkpoints.memory
        if memory is not None and reason is StopReason.PREEMPTED:
            wishes = self._core.distributed.allgather(memory.leaving_wish())
            # Only the chief knows of the other ranks' parts.
            wish = RankWish.DROP if RankWish.DROP in wishes else wishes[0]
            if wish is not RankWish.NONE:
                self.serve_memory(wish)
                memory.settle()
        self.store()
        # Last, as an acknowledged leave may end this process at any time.
        self._core.preempt.settle()

    def store(self) -> None:
        """Store a checkpoint unless this step already has a stored checkpoint, and wait.

        Raises:
            CheckpointWriteError: Parts of some ranks are missing.
        """
        with self.loop.storing():
            self.progress.note("storing a checkpoint")
            if self.checkpoints.settle_ranks():
                # Parts lost on any rank: all ranks store the checkpoint again.
                self.loop.last_checkpoint = None
            self.save()
            try:
                self.checkpoints.complete()
            except BaseException:
                # The checkpoint may be lost, so the next call must store another.
                self.loop.last_checkpoint = None
                raise

    @contextmanager
    def interrupt_watched(self) -> Iterator[None]:
        """Have the first Ctrl-C within the block be a request to leave."""
        preempt = self._core.preempt
        preempt.watch_signals(interrupt=True)
        try:
            yield
        finally:
            preempt.release_interrupt()

    @contextmanager
    def evaluating(self, sums: ReducerSet) -> Iterator[None]:
        """Evaluate the models within the block; training modes and collected sums are kept.

        Args:
            sums: The collector of metrics over the batches of training.
        """
        collected, modes = sums.state(), [(model, model.training) for model in self.models]
        sums.reset()
        for model in self.models:
            model.eval()
        try:
            yield
        finally:
            sums.load_state(collected)
            for model, is_training in modes:
                model.train(is_training)

    def set_training_mode(self) -> None:
        """Have the models train."""
        for model in self.models:
            model.train()

    # ---- for the loop --------------------------------------------------------------------

    def report_timings(self, batches: int, timings: dict[str, float]) -> None:
        """Report this rank's times, without values already reported for a repeated step."""
        train = self._core.train
        known = train.standing(_TIMINGS_GROUP, batches)
        news = {name: value for name, value in timings.items() if name not in known}
        train.report_metrics(_TIMINGS_GROUP, batches, news)

    def tell_stored(self) -> None:
        """Send all ranks the names of the stored checkpoints."""
        self.checkpoints.announce()

    def wants_save(self) -> bool:
        """Return whether the next continuous checkpoint is due, from this rank's view."""
        return self.checkpoints.wants_next()

    def memory_wish(self) -> RankWish:
        """Return this rank's wish for states in memory."""
        memory = self.checkpoints.memory
        return RankWish.NONE if memory is None else memory.wish()

    def look(self, position: Position) -> None:
        """Raise the error of a failed checkpoint, and show progress."""
        self.checkpoints.check()
        self.progress.update(position)

    def _report_training(self, position: Position, metrics: dict[str, Any]) -> None:
        """Report training metrics and progress, with the counts of batches and epochs."""
        _add_counts(metrics, position)
        self._core.profiler.note_steps(position.batches)
        if self._core.distributed.rank == 0:
            self._core.train.report_training_metrics(position.batches, metrics)
            fraction = self.progress.fraction(position)
            if fraction is not None:
                self._core.train.report_progress(fraction)
        self.metrics = metrics
        self.progress.report(position, metrics, "training")

    def _report_validation(self, position: Position, metrics: dict[str, Any]) -> bool:
        """Report a validation; return whether to store a checkpoint for the result."""
        _add_counts(metrics, position)
        if self._core.distributed.rank == 0:
            self._core.train.report_validation_metrics(position.batches, metrics)
            if self.checkpoints.retention is not None:
                self.checkpoints.retention.note_validation(position.batches, metrics)
        self.metrics = self.validation_metrics = metrics
        self.progress.report(position, metrics, "validation")
        return self.best_validation.wants_checkpoint(metrics)


def _add_counts(metrics: dict[str, Any], position: Position) -> None:
    metrics.setdefault("batches", position.batches)
    metrics.setdefault("epochs", position.epochs)
