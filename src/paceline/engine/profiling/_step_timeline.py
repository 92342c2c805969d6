"""Where the time of training steps goes, on each rank, and which rank is the slowest."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from paceline.core import DistributedContext
from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.profiling._step_timer import MeasuredTimes, ProfilingWindow, StepTimer

WHOLE, FORWARD = "train_batch_s", "forward_s"
WAIT, MOVE, BACKWARD = "data_wait_s", "to_device_s", "backward_s"
REDUCE, STEP, STALL = "reduce_s", "optimizer_step_s", "checkpoint_stall_s"
PARTS = (WAIT, MOVE, FORWARD, BACKWARD, REDUCE, STEP, STALL)
# The parts in which a rank does not wait for others: the backward pass may sum gradients, and a
# divided model is gathered in the forward pass too.
_OWN = {
    DataParallel.FLAT: (WAIT, MOVE, FORWARD, BACKWARD, STEP),
    DataParallel.OVERLAPPED: (WAIT, MOVE, FORWARD, STEP),
    DataParallel.FSDP: (WAIT, MOVE, STEP),
    DataParallel.HOROVOD: (WAIT, MOVE, FORWARD, BACKWARD, STEP),
}

Report = Callable[[int, dict[str, float]], None]


class RankTimes(NamedTuple):
    """A rank's seconds per batch, and those in which it did not wait for other ranks."""

    parts: dict[str, float]
    own_s: float


class StepTimeline:
    """Time the batches of a window on this rank, and compare the ranks at each report.

    A batch is reported as soon as its times are known, which on a GPU is some batches later.

    Args:
        distributed: The ranks.
        device: The device of this rank.
        data_parallel: How gradients are summed over the ranks.
        report: Called with the number of completed batches and times.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        device: torch.device,
        data_parallel: DataParallel,
        report: Report,
    ) -> None:
        self.window = ProfilingWindow()
        self._distributed = distributed
        self._device = device
        self._report = report
        self._own = _OWN[data_parallel]
        self._pending: deque[tuple[int, MeasuredTimes]] = deque()
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._num_batches = 0
        self._timer: StepTimer | None = None
        self._is_compared = False

    def begin(self) -> None:
        """Agree whether to compare; all ranks call it, also where only some of them time."""
        if self._distributed.size > 1:
            self._is_compared = all(self._distributed.allgather(self.window.enabled))

    def timer_of(self, batch: int) -> StepTimer | None:
        """Return what measures a batch, None outside of the window."""
        if not self.window.covers(batch):
            self._timer = None
        elif self._timer is None:
            self._timer = StepTimer(self._device if self.window.sync_timings else None)
        return self._timer

    def note_batch(self, num_batches: int, timer: StepTimer) -> None:
        """Take what was measured of a batch, and report those batches whose times are known."""
        self._pending.append((num_batches, timer.finish()))
        while self._pending and self._pending[0][1].is_known():
            self._report_next()

    def note_stall(self, num_batches: int, seconds: float) -> None:
        """Report for how long a checkpoint has stopped training."""
        self._sums[STALL] += seconds
        self._report(num_batches, {STALL: seconds})

    def flush(self) -> None:
        """Report the batches that are left, after waiting for the device."""
        while self._pending:
            self._report_next()

    def compare(self) -> dict[str, float]:
        """Return how the ranks differ in the batches since the last call; all ranks call it.

        Returns:
            For each part the mean and the maximum over the ranks of the seconds per batch, the
            slowest rank, and how many seconds per batch it takes more than the mean of all. Empty
            for one rank, where only some ranks time, or if no batch was timed.
        """
        self.flush()
        num_batches, self._num_batches = self._num_batches, 0
        sums, self._sums = self._sums, dict.fromkeys(PARTS, 0.0)
        if not num_batches or not self._is_compared:
            return {}
        parts = {part: seconds / num_batches for part, seconds in sums.items()}
        own = RankTimes(parts, sum(parts[part] for part in self._own))
        return compare_rank_times(self._distributed.allgather(own))

    def _report_next(self) -> None:
        num_batches, times = self._pending.popleft()
        parts = divided_step_times(times.seconds())
        self._num_batches += 1
        for part in PARTS:
            self._sums[part] += parts.get(part, 0.0)
        self._report(num_batches, parts)


def divided_step_times(measured: dict[str, float]) -> dict[str, float]:
    """Return the parts of a batch with the forward pass: what is left of the call of the batch."""
    whole = measured.get(WHOLE, 0.0)
    within = sum(measured.get(part, 0.0) for part in (BACKWARD, REDUCE, STEP))
    return {
        **dict.fromkeys(PARTS[:-1], 0.0),
        WHOLE: whole,
        **measured,
        FORWARD: max(whole - within, 0.0),
    }


def compare_rank_times(ranks: list[RankTimes]) -> dict[str, float]:
    """Return what `StepTimeline.compare` does, from the times of each rank."""
    told: dict[str, float] = {}
    for part in PARTS:
        seconds = [times.parts[part] for times in ranks]
        told[f"mean_{part}"] = sum(seconds) / len(seconds)
        told[f"max_{part}"] = max(seconds)
    own = [times.own_s for times in ranks]
    told["slowest_rank"] = own.index(max(own))
    told["slowest_rank_lag_s"] = max(own) - sum(own) / len(own)
    return told
