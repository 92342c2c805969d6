"""Progress counts what the search still has to create, and how long its trials still train."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Input,
    Operation,
    Progressed,
    Reported,
    SearchConfig,
    Started,
    simulate,
)
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig
from paceline.search._search import Search

Halving = Callable[..., AsyncHalvingConfig]
SPACE = {"lr": {"type": "double", "minval": 0, "maxval": 1, "count": 100}}
RANDOM = RandomConfig(metric="loss", max_trials=1000, max_concurrent_trials=2)
GRID = GridConfig(metric="loss", max_concurrent_trials=2)
ADAPTIVE = AdaptiveAshaConfig(metric="loss", max_trials=16, max_time=64, time_metric="batches")


class _Drive:
    """A search whose trials are numbered from 1, in the order of their creation."""

    def __init__(self, config: SearchConfig) -> None:
        self.config = config
        self.search = Search(config, SPACE, 0)
        self.ids: list[str] = []
        self._give(Started())

    def _give(self, given: Input) -> list[Operation]:
        operations = self.search.apply(given)
        self.ids += [op.request_id for op in operations if isinstance(op, Create)]
        return operations

    def tell(self, number: int, progress: float) -> float:
        self._give(Progressed(request_id=self.ids[number - 1], progress=progress))
        return self.search.progress()

    def report(self, number: int, time: float, metric: float = 0.5) -> float:
        self._give(Reported(request_id=self.ids[number - 1], time=time, metric=metric))
        return self.search.progress()

    def end(self, number: int, reason: ExitReason = ExitReason.COMPLETED) -> float:
        self._give(Exited(request_id=self.ids[number - 1], reason=reason))
        return self.search.progress()


@pytest.mark.parametrize(("config", "size"), [(RANDOM, 1000), (GRID, 100)])
def test_trials_that_are_not_created_yet_count(config: SearchConfig, size: int) -> None:
    drive = _Drive(config)
    for number in range(1, size - 1):
        assert drive.end(number) == pytest.approx(number / size)
    assert len(drive.ids) == size
    assert drive.tell(size - 1, 0.5) == pytest.approx((size - 1.5) / size)
    drive.end(size - 1)
    assert drive.end(size) == 1.0


@pytest.mark.parametrize("reason", [ExitReason.ERROR, ExitReason.CANCELED])
def test_trials_that_failed_count_as_done(reason: ExitReason) -> None:
    assert _Drive(RANDOM).end(1, reason) == pytest.approx(1 / 1000)


def test_trials_that_are_replaced_count_for_nothing(halving: Halving) -> None:
    for config, size in ((RANDOM, 1000), (halving(), 6), (ADAPTIVE, 16)):
        drive = _Drive(config)
        drive.tell(1, 0.5)
        assert drive.end(1, ExitReason.INVALID_HP) == 0
        assert drive.end(2) == pytest.approx(1 / size)


def test_invalid_points_leave_a_grid() -> None:
    drive = _Drive(GRID)
    assert drive.end(1, ExitReason.INVALID_HP) == 0
    assert drive.end(2) == pytest.approx(1 / 99)


def test_a_single_trial_is_the_whole() -> None:
    drive = _Drive(SingleConfig(metric="loss", max_length=10))
    assert drive.report(1, 5) == 0
    assert drive.tell(1, 0.25) == 0.25
    assert drive.end(1) == 1.0


def test_trials_of_a_halving_search_count_by_their_length(halving: Halving) -> None:
    # Six trials that train to 9 at most, with rungs at 1, 3 and 9.
    drive = _Drive(halving(max_concurrent_trials=0, max_trials=6, num_rungs=3))
    assert drive.search.progress() == 0
    assert drive.report(1, 1, 0.5) == pytest.approx(1 / 9 / 6)
    assert drive.report(1, 2, 0.5) == pytest.approx(2 / 9 / 6)
    assert drive.report(2, 1, 0.4) == pytest.approx(3 / 9 / 6)
    # It is stopped: it will train no further.
    drive.report(3, 1, 0.9)
    assert drive.end(3) == pytest.approx((1 + 3 / 9) / 6)


def test_all_trials_past_the_first_rung_are_far_from_the_end(halving: Halving) -> None:
    drive = _Drive(halving(max_concurrent_trials=4, max_trials=4, max_time=90))
    for number in range(1, 5):
        progress = drive.report(number, 10, 1 / number)
    assert progress == pytest.approx(10 / 90)


def test_a_trial_may_tell_its_progress_between_rungs_but_never_less(halving: Halving) -> None:
    drive = _Drive(halving())
    assert drive.report(1, 3) == pytest.approx(3 / 9 / 6)
    assert drive.tell(1, 0.5) == pytest.approx(0.5 / 6)
    assert drive.tell(1, 0.1) == pytest.approx(3 / 9 / 6)
    assert drive.report(1, math.nan) == pytest.approx(3 / 9 / 6)
    assert drive.report(1, -1) == pytest.approx(3 / 9 / 6)


def test_several_brackets_share_one_progress() -> None:
    drive = _Drive(ADAPTIVE)
    assert drive.report(1, 4) == pytest.approx(4 / 64 / 16)
    # The first trial of another bracket.
    last = len(drive.ids)
    assert drive.report(last, 16) == pytest.approx((4 + 16) / 64 / 16)


def test_progress_survives_a_snapshot(halving: Halving) -> None:
    for config in (RANDOM, GRID, halving(), ADAPTIVE):
        drive = _Drive(config)
        drive.tell(1, 0.1)
        drive.report(1, 4)
        drive.report(2, 4)
        drive.end(2)
        restored = Search.restore(config, SPACE, drive.search.snapshot())
        assert restored.progress() == drive.search.progress() > 0


def test_a_snapshot_of_before_is_restored(halving: Halving) -> None:
    drive = _Drive(halving())
    drive.tell(1, 0.5)
    snapshot = drive.search.snapshot()
    snapshot["trials"] = [row[:4] for row in snapshot["trials"]]
    assert Search.restore(drive.config, SPACE, snapshot).progress() == pytest.approx(0.5 / 6)


@pytest.mark.parametrize("is_improving", [True, False])
def test_progress_of_simulated_searches_only_rises(halving: Halving, is_improving: bool) -> None:
    def metric(create: Create, time: int) -> float:
        return create.trial_seed / time if is_improving else time

    for config in (RandomConfig(metric="loss", max_trials=20), GRID, halving(), ADAPTIVE):
        progress = simulate(config, SPACE, 0, metric).progress
        assert list(progress) == sorted(progress)
        assert progress[-1] == 1.0
