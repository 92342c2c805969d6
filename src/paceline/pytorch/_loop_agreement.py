"""Agreement of the ranks on what a loop does next, and the loop's reports."""

import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from paceline._training.engine.gradient_reduction import DataParallel
from paceline._training.engine.model_preparation import compile_counts
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.profiling import StepThroughput, StepTimeline
from paceline._training.engine.schedules import Position, StopReason
from paceline.core._attempt_journal import TimeAccount
from paceline.core._core_context import Context

# Trains on (a shard, the epoch, the global batch) and returns its metrics.
TrainsShard = Callable[[Any, int, int], Any]


class LoopHooks(Protocol):
    """Hooks of the training loop, implemented by a front door; called on all ranks.

    Attributes:
        has_schedulers: Whether `after_batch` has anything to do.
        to_device: Returns a shard on this rank's device.
    """

    has_schedulers: bool
    to_device: Callable[[Any], Any]

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on a shard and return its metrics."""

    def keep_for_replay(self) -> Callable[[], object]:
        """Note what `train_shard` changes besides models; return a function to put it back."""

    def plain_training(self) -> TrainsShard:
        """Return the function to train the next shards with; no epoch begins or ends in them."""

    def metrics_of(self, returned: Any) -> Mapping[str, Any]:
        """Return the metrics in a value returned by `plain_training`'s function."""

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""

    def after_batch(self, position: Position) -> None:
        """Step schedulers counted in batches or optimizer steps."""

    def epoch_started(self, epoch: int) -> None:
        """Report the beginning of an epoch."""

    def epoch_ended(self, epoch: int) -> None:
        """Step schedulers counted in epochs, and report the end of an epoch."""

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report averaged training metrics."""

    def report_timings(self, batches: int, timings: dict[str, float]) -> None:
        """Report throughput, or where the time of a batch went, after so many batches."""

    def validate(self, position: Position) -> bool:
        """Validate and report; return whether the result asks for a checkpoint."""

    def save(self) -> None:
        """Store a checkpoint, unless this position has one."""

    def tell_stored(self) -> None:
        """Send all ranks the names of the stored checkpoints; collective over all ranks."""

    def wants_save(self) -> bool:
        """Tell whether this rank wants a checkpoint now, where they follow each other."""

    def memory_wish(self) -> "RankWish":
        """Return this rank's wish for states in memory: NONE, KEEP or DROP."""

    def serve_memory(self, wish: "RankWish") -> None:
        """Save the state to memory (KEEP), or give the memory up (DROP); collective."""

    def look(self, position: Position) -> None:
        """Raise errors of background work, and show progress; called periodically."""


class RankWish(IntEnum):
    """Request of a rank to all ranks; the largest of several requests wins."""

    NONE = 0
    KEEP = 1
    DROP = 2
    SAVE = 3
    STOP = 4
    PREEMPT = 5
    INTERRUPT = 6

    @property
    def is_of_states(self) -> bool:
        """Whether the state is saved, or its memory given up, and training continues."""
        return RankWish.NONE < self < RankWish.STOP

    @property
    def stop_reason(self) -> StopReason | None:
        """The reason to end training by this request, or None to continue."""
        return _REASONS.get(self)


_REASONS = {
    RankWish.STOP: StopReason.REQUESTED,
    RankWish.PREEMPT: StopReason.PREEMPTED,
    RankWish.INTERRUPT: StopReason.INTERRUPTED,
}


class RankAgreement:
    """Agreement of the ranks on actions between two batches.

    Args:
        core: The core context.
        stepper: Its reductions carry the news that some rank wants something.
        hooks: Asked to look at the background now and then; the owner of this object keeps it
            alive.

    Attributes:
        is_decision_due: Whether the ranks have to agree before the next batch, as the search may
            have decided on the trial.
        compared_at: Where the ranks were compared last; None before training, and where one of them
            may have left since.
    """

    # How often a rank looks whether it shall leave and shows progress, in seconds.
    look_interval_s = 0.05

    def __init__(self, core: Context, stepper: Stepper, hooks: LoopHooks) -> None:
        self.is_decision_due = False
        self.compared_at: Position | None = None
        self._core = core
        self._stepper = stepper
        self._hooks = hooks
        self._is_alone = core.distributed.size == 1
        self._is_start_compared = False
        self._next_look_s = 0.0
        self._wish = RankWish.NONE
        self._saves_continuously = self._is_save_told = False
        # After how many batches the ranks exchange news of checkpoints; None for never.
        self._news_at: int | None = None

    def begin(self, *, saves_continuously: bool) -> None:
        """Begin a training.

        Args:
            saves_continuously: Whether checkpoints follow each other as fast as they are stored.
        """
        self._saves_continuously, self._is_save_told = saves_continuously, False

    def note_saved(self, position: Position) -> None:
        """Have all ranks hear of new checkpoints after the next batch; called by all of them.

        They wait for each other then. Now that they copy their states, they would for long.
        """
        if self._news_at is None and not self._is_alone:
            self._news_at = position.batches + 1

    def after_batch(self, position: Position) -> RankWish:
        """Return the action of all ranks after this batch; collective over all ranks."""
        if self._news_at is not None and position.batches >= self._news_at:
            self._news_at = None
            self._hooks.tell_stored()
        # Agreed at once: the next gradients, which carry such news, come a batch later.
        if self.is_decision_due and (wish := self.agree_now()):
            return wish
        stepper = self._stepper
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + self.look_interval_s
            self._hooks.look(position)
            self._wish = self._own_wish()
            if self._saves_continuously and not self._wish and self._hooks.wants_save():
                self._wish = RankWish.SAVE
            self._wish = self._wish or self._hooks.memory_wish()
        wish = max(self._wish, RankWish.STOP if stepper.is_stop_requested else RankWish.NONE)
        if not self._is_alone:
            is_told = wish.is_of_states and self._is_save_told
            self._is_save_told = wish.is_of_states
            if wish and not is_told:
                stepper.signal.tell(1.0)
            if not stepper.signal.hear():
                return RankWish.NONE
            # All ranks have heard that one of them wants something; now they learn the wish.
            wish = max(self._core.distributed.allgather(wish))
        if wish.is_of_states:
            self._wish, self._is_save_told = RankWish.NONE, False
        return wish

    def agree_now(self) -> RankWish:
        """Return the agreed request to leave, the same on all ranks; waits for all of them."""
        self.is_decision_due = False
        return max(self._core.distributed.allgather(self._own_wish()))

    def compare_start(self, position: Position, *, is_idle: bool) -> None:
        """Run `compare_ranks` once, at the first start."""
        if not self._is_start_compared:
            self._is_start_compared = True
            self.compare_ranks(position, is_idle=is_idle)

    def compare_end(self, position: Position, *, is_idle: bool) -> None:
        """Do what `compare_ranks` does, if training has advanced since then."""
        if self.compared_at not in (None, position):
            self.compare_ranks(position, is_idle=is_idle)

    def compare_ranks(self, position: Position, *, is_idle: bool) -> None:
        """Compare state required to be equal on all ranks, unless turned off; collective.

        Args:
            position: Where training is.
            is_idle: Whether this rank never has samples.

        Raises:
            RanksDifferError: They differ.
        """
        stepper, check = self._stepper, self._stepper.rank_check
        self.compared_at = None
        if check.is_on and not self._is_alone:
            digest = check.digest(stepper.models, stepper.optimizers, is_idle=is_idle)
            check.compare(digest, self._core.distributed.allgather)
        self.compared_at = position

    def _own_wish(self) -> RankWish:
        """Return this rank's request from signals, and on the chief from the runner too."""
        preempt = self._core.preempt
        is_chief = self._core.distributed.rank == 0
        if not (preempt.is_wanted() if is_chief else preempt.has_signal):
            return RankWish.NONE
        return RankWish.INTERRUPT if preempt.is_interrupted else RankWish.PREEMPT


class LoopReports:
    """Report training metrics, and the times of steps with them.

    Args:
        core: The core context.
        hooks: The reporter; it may be a weak reference.
        stepper: The models and optimizers.

    Attributes:
        timeline: The step times of the ranks.
        account: The totals of training, validation and checkpoints.
        throughput: Batches and records a second.
    """

    def __init__(self, core: Context, hooks: LoopHooks, stepper: Stepper) -> None:
        self._hooks = hooks
        self._is_chief = core.distributed.rank == 0
        self.timeline = StepTimeline(
            core.distributed,
            stepper.device,
            # The ranks that divide a model wait for each other in its passes.
            DataParallel.FSDP if stepper.is_divided else stepper.data_parallel,
            partial(_report_timings, hooks),
        )
        self.account = TimeAccount(core.train.note_time_spent if self._is_chief else None)
        self.throughput = StepThroughput()

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report training metrics, and the rates since the last report.

        Args:
            position: The position of training.
            metrics: The means over all ranks.
        """
        self._hooks.report(position, metrics)
        self.account.report(position.batches, self.throughput.all_data_wait_s)
        rates = self.throughput.take(position)
        if self.timeline.window.enabled:
            compared = self.timeline.compare()
            rates |= compared if self._is_chief else {}
        if rates and (self._is_chief or self.timeline.window.enabled):
            self._hooks.report_timings(position.batches, rates | compile_counts())


def _report_timings(hooks: LoopHooks, batches: int, timings: dict[str, float]) -> None:
    """Report through a possibly weak reference; a bound method would be strong."""
    hooks.report_timings(batches, timings)
