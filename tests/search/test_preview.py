from __future__ import annotations

from typing import Any

import pytest

from paceline.search import SearchConfig, SpaceError
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig
from paceline.search._preview_and_simulation import preview


def _adaptive(max_time: int, max_trials: int, **changes: Any) -> AdaptiveAshaConfig:
    return AdaptiveAshaConfig(
        metric="loss", time_metric="batches", max_time=max_time, max_trials=max_trials, **changes
    )


@pytest.mark.parametrize(
    ("config", "brackets", "rows"),
    [
        pytest.param(
            _adaptive(900, 10, max_concurrent_trials=5, divisor=3, max_rungs=10),
            [(3, 7, 3), (2, 3, 2)],
            {100: 5, 300: 3, 900: 2},
            id="S-59",
        ),
        pytest.param(
            _adaptive(1000, 16),
            [(3, 12, 8), (2, 4, 8)],
            {62: 9, 250: 5, 1000: 2},
            id="S-60",
        ),
        pytest.param(
            _adaptive(256, 500),
            [(5, 354, 6), (4, 110, 5), (3, 36, 5)],
            {1: 266, 4: 149, 16: 65, 64: 16, 256: 4},
            id="S-63",
        ),
        pytest.param(
            _adaptive(64, 64, max_concurrent_trials=0),
            [(4, 45, 5), (3, 14, 5), (2, 5, 5)],
            {1: 34, 4: 20, 16: 7, 64: 3},
            id="S-66",
        ),
        pytest.param(_adaptive(1000, 1), [(1, 1, 16)], {1000: 1}, id="S-71"),
        pytest.param(_adaptive(1, 100), [(1, 100, 16)], {1: 100}, id="S-72"),
    ],
)
def test_preview_of_adaptive_search(
    config: SearchConfig, brackets: list[tuple[int, int, int]], rows: dict[int, int]
) -> None:
    shown = preview(config, {})
    assert [(b.rungs, b.trials, b.concurrent) for b in shown.brackets] == brackets
    assert {row.units: row.trials for row in shown.rows} == rows
    assert list(rows) == [row.units for row in shown.rows]


def test_preview_of_one_bracket() -> None:
    config = AsyncHalvingConfig(
        metric="loss",
        time_metric="batches",
        max_time=9,
        max_trials=20,
        num_rungs=3,
        divisor=3,
        max_concurrent_trials=0,
    )
    shown = preview(config, {})
    assert [(b.units, b.trials, b.concurrent) for b in shown.brackets] == [((1, 3, 9), 20, 9)]
    assert [(row.trials, row.units) for row in shown.rows] == [(14, 1), (4, 3), (2, 9)]


@pytest.mark.parametrize(
    ("config", "trials"),
    [
        pytest.param(GridConfig(metric="loss"), 4, id="S-78"),
        pytest.param(RandomConfig(metric="loss", max_trials=4), 4, id="S-79"),
        pytest.param(SingleConfig(metric="loss"), 1, id="S-80"),
    ],
)
def test_preview_of_searches_to_completion(config: SearchConfig, trials: int) -> None:
    space = {"a": {"type": "double", "minval": 0, "maxval": 3, "count": 4}}
    shown = preview(config, space)
    assert shown.brackets == ()
    assert [(row.trials, row.units) for row in shown.rows] == [(trials, None)]


@pytest.mark.parametrize("config", [SingleConfig(metric="loss"), _adaptive(9, 9)])
def test_preview_refuses_a_wrong_space(config: SearchConfig) -> None:
    with pytest.raises(SpaceError, match="`a.minval` must be less"):
        preview(config, {"a": {"type": "int", "minval": 3, "maxval": 0}})
