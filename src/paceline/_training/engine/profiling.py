"""Times of training steps, their totals on each rank, traces by torch."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from paceline._training.engine.gradient_reduction import DataParallel
from paceline._training.engine.schedules import Position
from paceline.core._distributed_context import DistributedContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingWindow:
    """Range of batches to time individually.

    Attributes:
        enabled: Whether any are.
        sync_timings: Whether times on a GPU measure its work, as events in its stream mark
            them; nothing waits for the GPU. Without it they measure the launch of the work.
        begin_on_batch: The first batch, from 0.
        end_after_batch: The last batch, inclusive; None for all that follow.

    Raises:
        ValueError: The first batch is negative, or the last one lies before it.
    """

    enabled: bool = False
    sync_timings: bool = True
    begin_on_batch: int = 0
    end_after_batch: int | None = None

    def __post_init__(self) -> None:
        if self.begin_on_batch < 0:
            raise ValueError(f"`begin_on_batch` must be at least 0, but got {self.begin_on_batch}.")
        if self.end_after_batch is not None and self.end_after_batch < self.begin_on_batch:
            raise ValueError(
                f"`end_after_batch` must not lie before `begin_on_batch` ({self.begin_on_batch}),"
                f" but got {self.end_after_batch}."
            )

    def covers(self, batch: int) -> bool:
        """Tell whether a batch is to be timed."""
        if not self.enabled or batch < self.begin_on_batch:
            return False
        return self.end_after_batch is None or batch <= self.end_after_batch


class StepTimer:
    """Timer of the parts of a batch, in seconds; parts may repeat and be nested.

    On a GPU events in its stream mark where a part begins and ends, so that nothing waits for it.

    Args:
        device: The device whose work is measured, or None for the clock of this process.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._has_events = device is not None and device.type == "cuda"
        self._times = MeasuredTimes()

    def add(self, part: str, seconds: float) -> None:
        """Add a time to a part."""
        self._times.add(part, seconds)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part."""
        if self._has_events:
            begin, end = _new_event(), _new_event()
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._times.add_events(part, begin, end)
            return
        now = perf_counter()
        try:
            yield
        finally:
            self._times.add(part, perf_counter() - now)

    def finish(self) -> "MeasuredTimes":
        """Return the times since the last call; GPU work may still be running."""
        times, self._times = self._times, MeasuredTimes()
        return times

    def take(self) -> dict[str, float]:
        """Return the parts measured since the last call, after waiting for the device."""
        return self.finish().seconds()


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


class MeasuredTimes:
    """The parts of a batch; those between events are known when the device has passed them."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def add(self, part: str, seconds: float) -> None:
        """Add a time to a part."""
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def add_events(self, part: str, begin: Any, end: Any) -> None:
        """Add the time between two events of a stream to a part."""
        self._events.append((part, begin, end))

    def is_known(self) -> bool:
        """Tell whether the device has passed all events."""
        return all(end.query() for _, _, end in self._events)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, after waiting for pending device events."""
        events, self._events = self._events, []
        for part, begin, end in events:
            end.synchronize()
            self.add(part, begin.elapsed_time(end) / 1000)
        return self._parts


class StepThroughput:
    """Samples and batches per second since the last report, and the wait for data."""

    def __init__(self) -> None:
        self.data_wait_s = self._earlier_wait_s = 0.0
        self.start(Position())

    @property
    def all_data_wait_s(self) -> float:
        """The wait for data since the very beginning, in seconds."""
        return self._earlier_wait_s + self.data_wait_s

    @property
    def elapsed_s(self) -> float:
        """The seconds since the count began."""
        return perf_counter() - self._began

    def start(self, position: Position) -> None:
        """Begin to count at a position."""
        self._position, self._began = position, perf_counter()
        self._earlier_wait_s += self.data_wait_s
        self.data_wait_s = 0.0

    def wait_for(self, data: Iterator[Any], default: Any = None) -> Any:
        """Return the next item of data, and count the waiting time."""
        began = perf_counter()
        item = next(data, default)
        self.data_wait_s += perf_counter() - began
        return item

    def take(self, position: Position) -> dict[str, float]:
        """Return the rates up to a position, and begin anew there; empty if nothing was trained."""
        if position.batches == self._position.batches:
            return {}
        elapsed = self.elapsed_s
        rates = {
            "samples_per_second": (position.records - self._position.records) / elapsed,
            "batches_per_second": (position.batches - self._position.batches) / elapsed,
            "data_wait_fraction": self.data_wait_s / elapsed,
        }
        self.start(position)
        return rates


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
    """Seconds per batch of a rank, by part, and those without waits for other ranks."""

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
        """Agree whether to compare; all ranks call this, even if only some ranks time."""
        if self._distributed.size > 1:
            self._is_compared = all(self._distributed.allgather(self.window.enabled))

    def timer_of(self, batch: int) -> StepTimer | None:
        """Return the timer for a batch, None outside of the window."""
        if not self.window.covers(batch):
            self._timer = None
        elif self._timer is None:
            self._timer = StepTimer(self._device if self.window.sync_timings else None)
        return self._timer

    def note_batch(self, num_batches: int, timer: StepTimer) -> None:
        """Store the times of a batch, and report all batches with complete times."""
        self._pending.append((num_batches, timer.finish()))
        while self._pending and self._pending[0][1].is_known():
            self._report_next()

    def note_stall(self, num_batches: int, seconds: float) -> None:
        """Report for how long a checkpoint has stopped training."""
        self._sums[STALL] += seconds
        self._report(num_batches, {STALL: seconds})

    def flush(self) -> None:
        """Report the pending batches, after waiting for the device."""
        while self._pending:
            self._report_next()

    def compare(self) -> dict[str, float]:
        """Return how the ranks differ since the last call; collective: all ranks call this.

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
    """Return a batch's parts; the forward pass is the call's time minus its other parts."""
    whole = measured.get(WHOLE, 0.0)
    within = sum(measured.get(part, 0.0) for part in (BACKWARD, REDUCE, STEP))
    return {
        **dict.fromkeys(PARTS[:-1], 0.0),
        WHOLE: whole,
        **measured,
        FORWARD: max(whole - within, 0.0),
    }


def compare_rank_times(ranks: list[RankTimes]) -> dict[str, float]:
    """Return the result of `StepTimeline.compare`, from the times of each rank."""
    told: dict[str, float] = {}
    for part in PARTS:
        seconds = [times.parts[part] for times in ranks]
        told[f"mean_{part}"] = sum(seconds) / len(seconds)
        told[f"max_{part}"] = max(seconds)
    own = [times.own_s for times in ranks]
    told["slowest_rank"] = own.index(max(own))
    told["slowest_rank_lag_s"] = max(own) - sum(own) / len(own)
    return told


# Gets the name of a trace and what writes it to a path.
KeepsTrace = Callable[[str, Callable[[Path], object]], object]


class TraceProfiler:
    """Make, start, step and stop torch's profiler around the batches of a training.

    The schedule counts the batches of the training, also of one resumed from a checkpoint.

    Args:
        options: The arguments of `torch.profiler.profile`.
        keep_trace: Keeps a trace, unless the options name another handler.

    Raises:
        TypeError: The profiler does not take the options.
    """

    def __init__(self, options: dict[str, Any], keep_trace: KeepsTrace) -> None:
        self._options = options
        self._keep_trace = keep_trace
        self._profiler: Any = None
        self._num_batches = 0
        # Trial construction: wrong options raise here, not in the middle of training.
        self._make(0)

    @contextmanager
    def running(self, num_batches: int) -> Iterator[None]:
        """Profile within the block; `num_batches` have ended before."""
        self._num_batches = num_batches
        self._profiler = self._make(num_batches)
        self._profiler.start()
        try:
            yield
        finally:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def step(self, num_batches: int) -> None:
        """Advance the profiler at the end of a batch."""
        self._num_batches = num_batches
        self._profiler.step()

    def _make(self, offset: int) -> Any:
        options = {"on_trace_ready": self._write, **self._options}
        schedule = options.get("schedule")
        if schedule is not None:
            options["schedule"] = lambda step: schedule(step + offset)
        return torch.profiler.profile(**options)

    def _write(self, profiler: Any) -> None:
        name = f"batch_{self._num_batches}.pt.trace.json"
        self._keep_trace(name, lambda path: profiler.export_chrome_trace(str(path)))
