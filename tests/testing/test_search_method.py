"""`check_search_method`: sound methods pass it, each broken rule is named."""

import dataclasses
import importlib
import itertools
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from paceline.config import Searcher
from paceline.config._searcher_registry import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    GridSearcher,
    HyperbandSearcher,
    MedianStoppingSearcher,
    PbtSearcher,
    RandomSearcher,
    SingleSearcher,
)
from paceline.search import (
    Create,
    ExitReason,
    Operation,
    Reported,
    SearchConfig,
    SearchMethod,
    SearchMethodError,
    Space,
    SpaceError,
    Stop,
    Train,
    TrialMaker,
    simulate,
)
from paceline.testing import check_search_method

sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugins"))
MeanStopping = importlib.import_module("mean_stopping").MeanStopping

_HALVING: dict[str, Any] = {
    "metric": "loss", "max_trials": 8, "time_metric": "epochs", "max_time": 16
}  # fmt: skip


@pytest.mark.parametrize(
    "searcher",
    [
        SingleSearcher(metric="loss"),
        RandomSearcher(metric="loss", max_trials=5, max_concurrent_trials=2),
        GridSearcher(metric="loss"),
        AsyncHalvingSearcher(**_HALVING, num_rungs=3),
        AdaptiveAshaSearcher(**_HALVING),
        AsyncHalvingSearcher(**_HALVING, num_rungs=3, promotion=True),
        HyperbandSearcher(**_HALVING, max_concurrent_trials=4),
        MedianStoppingSearcher(**_HALVING, max_concurrent_trials=2),
        PbtSearcher(**_HALVING, interval=2, quantile=0.5),
        MeanStopping(metric="loss", max_trials=6, max_time=8),
    ],
    ids=lambda searcher: searcher.name,
)
def test_sound_methods_pass(searcher: Searcher) -> None:
    check_search_method(searcher, num_runs=10)


_draws = itertools.count()


class Broken(Searcher):
    """The section of a method that breaks one rule."""

    name: Literal["broken"] = Field(default="broken")
    rule: str

    def search_config(self) -> SearchConfig:
        return BrokenConfig(metric=self.metric, rule=self.rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenConfig(SearchConfig):
    """Makes the method."""

    rule: str
    kind: ClassVar[str] = "broken"

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        return BrokenMethod(maker, self.rule)

    def num_planned(self, space: Space) -> int:
        return 3


class BrokenMethod(SearchMethod):
    """Creates three trials, and stops each at its second report."""

    def __init__(self, maker: TrialMaker, rule: str) -> None:
        self.maker, self.rule = maker, rule
        self.num_reports: dict[Any, int] = {}

    def _create(self) -> list[Operation]:
        create: Create = self.maker.sampled()
        if self.rule == "deterministic":
            create = Create(
                request_id=create.request_id,
                trial_seed=create.trial_seed,
                hparams={"lr": next(_draws)},
            )
        return [create, Train(request_id=create.request_id, length=4)]

    def start(self) -> list[Operation]:
        return [operation for _ in range(3) for operation in self._create()]

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        key = len(request_id) if self.rule == "integer keys" else request_id
        self.num_reports[key] = self.num_reports.get(key, 0) + 1
        stop = Stop(request_id=request_id)
        if self.rule == "stops twice":
            return [stop, stop]
        return [stop] if self.num_reports[key] == 2 else []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        return self._create() if self.rule == "endless" else []

    def num_trials(self, num_invalid: int) -> int:
        return 3

    def snapshot(self) -> dict[str, Any]:
        if self.rule == "infinite":
            return {"best": [0.5, float("inf")]}
        return {} if self.rule == "forgets" else {"reports": dict(self.num_reports)}

    def load(self, snapshot: dict[str, Any]) -> None:
        self.num_reports = snapshot.get("reports", {})


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("deterministic", "must do the same when its inputs are repeated, but after Started"),
        ("endless", "must end once its trials have, but it created 10000 of them"),
        ("stops twice", "must stop a trial once"),
        ("forgets", "must do the same after it was restored, but after Reported"),
        ("integer keys", "must have the same state after `load`"),
    ],
)
def test_each_broken_rule_is_named(rule: str, told: str) -> None:
    with pytest.raises(SearchMethodError) as caught:
        check_search_method(Broken(metric="loss", rule=rule))
    assert "The search method `broken` must" in str(caught.value)
    assert told in str(caught.value)


def test_a_state_that_is_no_json_is_named_with_its_place() -> None:
    with pytest.raises(SearchMethodError) as caught:
        check_search_method(Broken(metric="loss", rule="infinite"))
    told = "failed in `snapshot`: ValueError: `snapshot()['best'][1]` must be a finite number"
    assert told in str(caught.value)


def test_a_method_without_faults_passes_where_the_broken_ones_do_not() -> None:
    check_search_method(Broken(metric="loss", rule=""))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`num_runs` must be at least 1, but got 0"):
        check_search_method(Broken(metric="loss", rule=""), num_runs=0)
    with pytest.raises(SpaceError):
        check_search_method(GridSearcher(metric="loss"), {"lr": {"type": "double", "minval": 0}})


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_median_stopping_decides_as_its_definition_says(smaller_is_better: bool) -> None:
    """Values are drawn from the trial's seed; some are not finite, which is worse than all."""
    section = MedianStoppingSearcher(
        metric="loss", max_trials=40, max_time=12, time_metric="batches", min_time=3,
        smaller_is_better=smaller_is_better,
    )  # fmt: skip
    strange = {0: math.nan, 1: math.inf, 2: -math.inf}
    result = simulate(
        section.search_config(),
        {},
        3,
        lambda create, time: strange.get(
            create.trial_seed * 31 % (97 - time), create.trial_seed % 1009 + time
        ),
        report_every=1,
    )
    values: dict[str, list[float]] = {}
    means: dict[float, list[float]] = {}
    num_stopped = 0
    for given, operations in zip(result.inputs, result.operations, strict=True):
        if not isinstance(given, Reported):
            continue
        sign = 1 if smaller_is_better else -1
        value = sign * given.metric if math.isfinite(given.metric) else 1e300
        own = values.setdefault(given.request_id, [])
        own.append(value)
        others = means.setdefault(given.time, [])
        is_worse = given.time >= 3 and len(others) >= 3 and min(own) > median(others)
        others.append(sum(own) / len(own))
        is_stopped = Stop(request_id=given.request_id) in operations
        assert is_stopped == (is_worse or given.time >= 12)
        num_stopped += is_worse
    assert 0 < num_stopped < 40
