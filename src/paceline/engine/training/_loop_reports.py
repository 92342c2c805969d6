"""Reports of the training loop: metrics, throughput, step times, and what the time is spent on."""

from functools import partial

from paceline.core import Context, TimeAccount
from paceline.engine.models._model_options import compile_counts
from paceline.engine.optimizer_steps._stepper import Stepper
from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.profiling._step_timeline import StepTimeline
from paceline.engine.profiling._step_timer import StepThroughput
from paceline.engine.schedule._train_units import Position
from paceline.engine.training._loop_hooks import LoopHooks


class LoopReports:
    """Report training metrics, and the times of steps with them.

    Args:
        core: The core context.
        hooks: What reports; it may be a weak reference.
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
    """Report by what may be a weak reference, which a bound method would not be."""
    hooks.report_timings(batches, timings)
