"""Properties that every search has, whatever its trials do and in whatever order."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.search import Create, ExitReason, Mode, SearchConfig, Shutdown, Started, Stop
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig, HyperbandConfig
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig
from paceline.search._median_stopping import MedianStoppingConfig
from paceline.search._search import Search, replay
from paceline.testing._search_method import SearchMethodDrive

SPACE: dict[str, Any] = {
    "net": {"width": {"type": "int", "minval": 1, "maxval": 9, "count": 3}},
    "lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1, "count": 2},
}
_COMMON: dict[str, Any] = {
    "metric": st.just("loss"),
    "max_concurrent_trials": st.integers(0, 5),
}
_HALVING: dict[str, Any] = {
    **_COMMON,
    "smaller_is_better": st.booleans(),
    "max_trials": st.integers(1, 12),
    "max_time": st.integers(1, 30),
    "time_metric": st.just("batches"),
    "divisor": st.sampled_from([1.5, 2, 3, 4]),
}
sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugins"))
MeanConfig = importlib.import_module("mean_stopping").MeanConfig

CONFIGS: st.SearchStrategy[SearchConfig] = st.one_of(
    st.builds(
        MeanConfig,
        **_COMMON | {"max_concurrent_trials": st.integers(1, 5)},
        smaller_is_better=st.booleans(),
        max_trials=st.integers(1, 12),
        max_time=st.integers(1, 30),
        min_time=st.integers(1, 30),
        min_others=st.integers(1, 3),
    ),
    st.builds(
        MedianStoppingConfig,
        **_COMMON,
        smaller_is_better=st.booleans(),
        max_trials=st.integers(1, 12),
        max_time=st.integers(1, 30),
        min_others=st.integers(1, 3),
    ),
    st.builds(HyperbandConfig, max_rungs=st.integers(1, 4), **_HALVING),
    st.builds(SingleConfig, metric=st.just("loss")),
    st.builds(RandomConfig, max_trials=st.integers(1, 8), **_COMMON),
    st.builds(GridConfig, **_COMMON),
    st.builds(AsyncHalvingConfig, num_rungs=st.integers(1, 4), promotes=st.booleans(), **_HALVING),
    st.builds(
        AdaptiveAshaConfig,
        mode=st.sampled_from(Mode),
        max_rungs=st.integers(1, 4),
        promotes=st.booleans(),
        bracket_rungs=st.lists(st.integers(1, 4), max_size=3),
        **_HALVING,
    ),
)


def driven(data: st.DataObject, search: Search) -> SearchMethodDrive:
    """Return what drives a search by drawn choices."""
    return SearchMethodDrive(search, lambda values: data.draw(st.sampled_from(values)))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_every_search_ends_within_its_budget(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = driven(data, Search(config, SPACE, seed))
    drive.run()
    assert isinstance(drive.operations[-1][-1], Shutdown)
    assert len(drive.of_kind(Shutdown)) == 1
    num_created = len(drive.of_kind(Create))
    invalid = sum(t.exit_reason is ExitReason.INVALID_HP for t in drive.search.trials())
    budget = {"single": 1, "grid": 6}.get(config.kind) or config.max_trials  # type: ignore[union-attr]
    # The original lost trials and could exceed the budget; here it is met exactly.
    replaced = invalid if config.kind not in ("single", "grid") else 0
    assert num_created == budget + replaced


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_restored_search_goes_on_as_the_straight_one(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = driven(data, Search(config, SPACE, seed))
    drive.run(max_steps=40)
    restored = Search(config, SPACE, seed)
    for given_input, expected in zip(drive.inputs, drive.operations, strict=True):
        text = json.dumps(restored.snapshot(), allow_nan=False)
        restored = Search.restore(config, SPACE, json.loads(text))
        assert json.dumps(restored.snapshot(), allow_nan=False) == text
        assert restored.apply(given_input) == expected
    assert restored.snapshot() == drive.search.snapshot()
    assert restored.progress() == drive.search.progress()
    assert restored.trials() == drive.search.trials()
    assert repr(restored.rungs()) == repr(drive.search.rungs())


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_replayed_inputs_give_the_live_decisions(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = driven(data, Search(config, SPACE, seed))
    drive.run(max_steps=60)
    assert replay(config, SPACE, seed, drive.inputs) == drive.operations


@settings(max_examples=60, deadline=None)
@given(data=st.data(), config=CONFIGS, seed=st.integers(0, 2**31 - 1))
def test_views_and_progress_hold_at_every_point(
    data: st.DataObject, config: SearchConfig, seed: int
) -> None:
    drive = driven(data, Search(config, SPACE, seed))
    drive.give(Started())
    for _ in range(40):
        assert 0 <= drive.search.progress() <= 1
        for bracket in drive.search.rungs():
            for rung in bracket.rungs:
                # One entry for each trial and rung, however often it reported.
                entered = Counter(entry.request_id for entry in rung.entries)
                assert max(entered.values(), default=1) == 1
        if not drive.running:
            break
        drive.step()
    ids = [create.request_id for create in drive.of_kind(Create)]
    assert [trial.request_id for trial in drive.search.trials()] == ids
    assert len(set(ids)) == len(ids)
    stops = [stop.request_id for stop in drive.of_kind(Stop)]
    assert len(set(stops)) == len(stops)
