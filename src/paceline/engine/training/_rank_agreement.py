"""Agreement of all ranks, after the same batch, to store a checkpoint or to leave the training."""

import time
from enum import IntEnum

from paceline.core import Context
from paceline.engine.optimizer_steps._stepper import Stepper
from paceline.engine.schedule._train_units import Position
from paceline.engine.schedule._training_schedule import StopReason
from paceline.engine.training._loop_hooks import LoopHooks


class RankWish(IntEnum):
    """What a rank wants all to do; of several ranks' wishes the largest counts."""

    NONE = 0
    SAVE = 1
    STOP = 2
    PREEMPT = 3
    INTERRUPT = 4

    @property
    def stop_reason(self) -> StopReason | None:
        """Why training ends by this wish; None if it goes on."""
        return _REASONS.get(self)


_REASONS = {
    RankWish.STOP: StopReason.REQUESTED,
    RankWish.PREEMPT: StopReason.PREEMPTED,
    RankWish.INTERRUPT: StopReason.INTERRUPTED,
}


class RankAgreement:
    """What the ranks agree to do between two batches.

    Args:
        core: The core context.
        stepper: Its reductions carry the news that some rank wants something.
        hooks: Told to look at the background now and then; whoever has this keeps it alive.

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
        # After how many batches the ranks tell each other of new checkpoints; None for never.
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
        """Return what all ranks do now, the same on all; called by all after the same batch."""
        if self._news_at is not None and position.batches >= self._news_at:
            self._news_at = None
            self._hooks.tell_stored()
        # No further batch, as by the time that the next gradients take a word along.
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
        wish = max(self._wish, RankWish.STOP if stepper.is_stop_requested else RankWish.NONE)
        if not self._is_alone:
            is_told = wish is RankWish.SAVE and self._is_save_told
            self._is_save_told = wish is RankWish.SAVE
            if wish and not is_told:
                stepper.signal.tell(1.0)
            if not stepper.signal.hear():
                return RankWish.NONE
            # All ranks have heard that one of them wants something; now they learn what.
            wish = max(self._core.distributed.allgather(wish))
        if wish is RankWish.SAVE:
            self._wish, self._is_save_told = RankWish.NONE, False
        return wish

    def agree_now(self) -> RankWish:
        """Return whether to leave now, the same on all ranks; all of them wait for it."""
        self.is_decision_due = False
        return max(self._core.distributed.allgather(self._own_wish()))

    def compare_start(self, position: Position, *, is_idle: bool) -> None:
        """Do what `compare_ranks` does, once."""
        if not self._is_start_compared:
            self._is_start_compared = True
            self.compare_ranks(position, is_idle=is_idle)

    def compare_end(self, position: Position, *, is_idle: bool) -> None:
        """Do what `compare_ranks` does, if training has gone on since then."""
        if self.compared_at not in (None, position):
            self.compare_ranks(position, is_idle=is_idle)

    def compare_ranks(self, position: Position, *, is_idle: bool) -> None:
        """Compare what all ranks must have alike, unless that is turned off; all ranks call it.

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
        """Return what this rank knows by signals, and the chief by the runner as well."""
        preempt = self._core.preempt
        is_chief = self._core.distributed.rank == 0
        if not (preempt.is_wanted() if is_chief else preempt.has_signal):
            return RankWish.NONE
        return RankWish.INTERRUPT if preempt.is_interrupted else RankWish.PREEMPT
