"""Limits of a search: what ends it, what changes them, and what continues it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Operation,
    Reported,
    SearchConfig,
    Shutdown,
    Started,
    Stop,
)
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig, HyperbandConfig
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig
from paceline.search._median_stopping import MedianStoppingConfig
from paceline.search._population import PbtConfig
from paceline.search._search import Search, replay
from paceline.search._search_messages import (
    Input,
    Limited,
    Spent,
    Train,
    input_from_json,
    message_to_json,
)

SPACE: dict[str, Any] = {"lr": {"type": "double", "minval": 0, "maxval": 1, "count": 6}}
RANDOM = RandomConfig(metric="loss", max_trials=6, max_concurrent_trials=2)
_TIMED: dict[str, Any] = {"metric": "loss", "max_trials": 6, "max_time": 8}
ALL: list[SearchConfig] = [
    RANDOM,
    AsyncHalvingConfig(**_TIMED, num_rungs=3, divisor=2, time_metric="t", max_concurrent_trials=2),
    AsyncHalvingConfig(
        **_TIMED, num_rungs=3, divisor=2, time_metric="t", max_concurrent_trials=2, promotes=True
    ),
    AdaptiveAshaConfig(**_TIMED, divisor=2, time_metric="t", max_concurrent_trials=2),
    HyperbandConfig(**_TIMED, divisor=2, time_metric="t", max_concurrent_trials=2),
    MedianStoppingConfig(**_TIMED, max_concurrent_trials=2),
    PbtConfig(**_TIMED, interval=2),
]


class Driven:
    """A search with the operations that each input gave."""

    def __init__(self, config: SearchConfig, **limits: Any) -> None:
        self.config = config
        self.search = Search(config, SPACE, 1)
        self.inputs: list[Input] = []
        self.operations: list[list[Operation]] = []
        self.targets: dict[str, int] = {}
        if limits:
            self.give(Limited(**limits))
        self.give(Started())

    def give(self, given: Input) -> list[Operation]:
        operations = self.search.apply(given)
        self.inputs.append(given)
        self.operations.append(operations)
        self.targets |= {o.request_id: o.length for o in operations if isinstance(o, Train)}
        return operations

    @property
    def created(self) -> list[str]:
        return [o.request_id for group in self.operations for o in group if isinstance(o, Create)]

    @property
    def open(self) -> list[str]:
        return [t.request_id for t in self.search.trials() if t.exit_reason is None]

    def end(self, request_id: str, reason: ExitReason = ExitReason.COMPLETED) -> list[Operation]:
        return self.give(Exited(request_id=request_id, reason=reason))

    def run(self, loss: float = 1.0) -> None:
        """Train all trials to their targets, and end those that the search is done with."""
        for turn in range(1000):
            views = {t.request_id: t for t in self.search.trials() if t.exit_reason is None}
            if not views:
                return
            for request_id, view in views.items():
                if view.is_stopped or self.config.kind in ("random", "grid", "single"):
                    self.end(request_id)
                else:
                    time = float(self.targets[request_id])
                    given = Reported(request_id=request_id, time=time, metric=loss + turn / 1000)
                    self.give(given)
        raise AssertionError("the search does not end")

    def check_replay(self) -> None:
        """Check that the stored inputs give the same decisions."""
        stored = [input_from_json(message_to_json(given)) for given in self.inputs]
        assert replay(self.config, SPACE, 1, stored) == self.operations


def stops(operations: list[Operation]) -> list[str]:
    return [o.request_id for o in operations if isinstance(o, Stop)]


@pytest.mark.parametrize(
    ("limits", "spent", "name"),
    [
        ({"max_slot_hours": 2.0}, Spent(wall_s=0.0, slot_s=7200.0), "max_slot_hours"),
        ({"max_wall_time": 60.0}, Spent(wall_s=60.0), "max_wall_time"),
    ],
)
def test_time_that_is_used_up_stops_the_running_trials_and_creates_no_others(
    limits: dict[str, Any], spent: Spent, name: str
) -> None:
    driven = Driven(RANDOM, **limits)
    assert driven.give(Spent(wall_s=59.9, slot_s=7199.0)) == []
    assert driven.search.reached_limit is None
    assert stops(driven.give(spent)) == driven.created
    assert driven.search.reached_limit == name
    assert driven.end(driven.open[0]) == []
    assert driven.end(driven.open[0]) == [Shutdown(failure=False, cancel=False)]
    assert len(driven.created) == 2
    driven.check_replay()


@pytest.mark.parametrize("strange", [math.nan, math.inf, -1.0, 5.0])
def test_a_clock_that_jumps_takes_nothing_back_and_adds_nothing(strange: float) -> None:
    driven = Driven(RANDOM, max_wall_time=60.0)
    driven.give(Spent(wall_s=30.0, slot_s=30.0))
    assert driven.give(Spent(wall_s=strange, slot_s=strange)) == []
    assert (driven.search.budget.wall_s, driven.search.budget.slot_s) == (30.0, 30.0)
    driven.check_replay()


@pytest.mark.parametrize(("smaller", "good", "bad"), [(True, 0.1, 0.3), (False, 0.3, 0.1)])
def test_the_first_finite_value_at_the_target_ends_the_search(
    smaller: bool, good: float, bad: float
) -> None:
    config = AsyncHalvingConfig(
        metric="loss", max_trials=6, max_time=8, num_rungs=1, time_metric="t",
        max_concurrent_trials=2, smaller_is_better=smaller,
    )  # fmt: skip
    driven = Driven(config, target=0.2)
    one, other = driven.created
    for value in (bad, math.nan, math.inf, -math.inf):
        assert driven.give(Reported(request_id=one, time=1.0, metric=value)) == []
    assert stops(driven.give(Reported(request_id=other, time=2.0, metric=good))) == [one, other]
    # A report after the stop changes nothing.
    assert driven.give(Reported(request_id=one, time=3.0, metric=good)) == []
    driven.run()
    assert driven.search.is_over
    assert len(driven.created) == 2
    driven.check_replay()


def test_so_many_failures_end_the_search_as_failed() -> None:
    driven = Driven(RANDOM, max_failures=2)
    driven.end(driven.open[0], ExitReason.ERROR)
    assert len(driven.open) == 2
    driven.end(driven.open[0], ExitReason.INVALID_HP)
    assert driven.search.reached_limit is None
    assert len(stops(driven.end(driven.open[0], ExitReason.ERROR))) == 1
    assert driven.end(driven.open[0]) == [Shutdown(failure=True, cancel=False)]
    driven.check_replay()


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.kind)
def test_every_method_creates_no_more_trials_than_its_limit_until_that_is_raised(
    config: SearchConfig,
) -> None:
    driven = Driven(config, max_trials=3)
    driven.run()
    assert driven.search.is_over
    assert len(driven.created) == 3
    # Beyond what the method planned: the search goes on, and ends again.
    driven.give(Limited(max_trials=9))
    assert not driven.search.is_over
    driven.run()
    assert driven.search.is_over
    assert len(driven.created) == 9
    driven.check_replay()
    restored = Search.restore(config, SPACE, json.loads(json.dumps(driven.search.snapshot())))
    assert restored.snapshot() == driven.search.snapshot()
    assert restored.apply(Limited(max_trials=10)) == driven.search.apply(Limited(max_trials=10))


@pytest.mark.parametrize("config", [GridConfig(metric="loss"), SingleConfig(metric="loss")])
def test_methods_without_further_trials_refuse_a_larger_number(config: SearchConfig) -> None:
    driven = Driven(config)
    with pytest.raises(ValueError, match=f"`{config.kind}` has no more trials, but got 99"):
        driven.search.apply(Limited(max_trials=99))


def test_a_limit_below_what_is_used_ends_the_search_and_a_higher_one_goes_on() -> None:
    driven = Driven(RANDOM)
    driven.give(Spent(wall_s=100.0))
    assert stops(driven.give(Limited(max_wall_time=50.0))) == driven.created
    for request_id in driven.open:
        driven.end(request_id)
    assert driven.search.is_over
    assert driven.give(Limited(max_wall_time=80.0)) == []
    driven.give(Limited(max_wall_time=200.0))
    assert (len(driven.created), driven.search.is_over) == (4, False)
    driven.run()
    assert len(driven.created) == 6
    driven.check_replay()
