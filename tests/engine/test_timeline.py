"""Parts of steps, comparison of ranks, and times that are known later."""

import pytest
import torch

from paceline._training.engine.gradient_reduction import DataParallel
from paceline._training.engine.profiling import (
    PARTS,
    MeasuredTimes,
    ProfilingWindow,
    RankTimes,
    StepTimeline,
    StepTimer,
    compare_rank_times,
    divided_step_times,
)
from paceline.core import DistributedContext


class Event:
    """Stands for an event of a GPU's stream: passed when it is told so."""

    def __init__(self, time_ms: float, *, is_passed: bool = True) -> None:
        self.time_ms, self.is_passed = time_ms, is_passed

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True

    def elapsed_time(self, end: "Event") -> float:
        return end.time_ms - self.time_ms


def test_the_forward_pass_is_what_is_left_of_the_batch() -> None:
    parts = divided_step_times({"train_batch_s": 1.0, "backward_s": 0.5, "reduce_s": 0.25})
    assert parts["forward_s"] == 0.25
    assert parts["optimizer_step_s"] == parts["data_wait_s"] == 0.0
    # A rank without samples only takes part in the sum.
    assert divided_step_times({"reduce_s": 1.0})["forward_s"] == 0.0


def test_the_rank_with_most_work_of_its_own_is_the_slowest() -> None:
    """Rank 0 waits for 1 s in the sum, which is no work of its own."""
    own = [0.5, 0.75, 1.75]
    ranks = [
        RankTimes(dict.fromkeys(PARTS, 0.0) | {"forward_s": s, "reduce_s": 1.75 - s}, s)
        for s in own
    ]
    told = compare_rank_times(ranks)
    assert (told["slowest_rank"], told["slowest_rank_lag_s"]) == (2, 0.75)
    assert (told["mean_forward_s"], told["max_forward_s"]) == (1.0, 1.75)
    assert (told["mean_reduce_s"], told["max_reduce_s"]) == (0.75, 1.25)


def test_batches_are_reported_in_order_when_the_device_has_passed_them() -> None:
    told: list[tuple[int, float]] = []
    timeline = StepTimeline(
        DistributedContext.single(),
        torch.device("cpu"),
        DataParallel.FLAT,
        lambda batches, parts: told.append((batches, parts["backward_s"])),
    )
    timeline.window = ProfilingWindow(enabled=True)
    ends = [Event(30.0, is_passed=False), Event(50.0)]
    for batch, (begin_ms, end) in enumerate(zip((10.0, 40.0), ends, strict=True)):
        timer = timeline.timer_of(batch)
        assert timer is not None
        times = MeasuredTimes()
        times.add_events("backward_s", Event(begin_ms), end)
        timer._times = times
        timeline.note_batch(batch + 1, timer)
        assert told == []
    timeline.flush()
    assert told == [(1, pytest.approx(0.02)), (2, pytest.approx(0.01))]


def test_parts_that_repeat_add_up_and_are_taken_once() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.add("reduce_s", 1.0)
    timer.add("reduce_s", 2.0)
    with timer.measure("train_batch_s"):
        pass
    assert timer.take() == {"reduce_s": 3.0, "train_batch_s": pytest.approx(0.0, abs=60)}
    assert timer.take() == {}
