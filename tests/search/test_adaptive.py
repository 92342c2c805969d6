from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.search import Create, Started, Train, simulate
from paceline.search._adaptive_asha import (
    AdaptiveAshaConfig,
    bracket_concurrency,
    bracket_rungs,
    bracket_trials,
)
from paceline.search._search import Search
from paceline.search._search_method import as_fraction


def _config(**changes: Any) -> AdaptiveAshaConfig:
    fields: dict[str, Any] = {
        "metric": "loss",
        "max_trials": 16,
        "max_time": 64,
        "time_metric": "batches",
    }
    return AdaptiveAshaConfig(**(fields | changes))


@pytest.mark.parametrize(
    ("max_trials", "divisor", "rungs", "expected"),
    [
        pytest.param(20, 3, (3, 2, 1), (12, 5, 3), id="S-49"),
        pytest.param(50, 3, (4, 3), (35, 15), id="S-50"),
        pytest.param(50, 4, (3, 2), (37, 13), id="S-51"),
        pytest.param(100, 4, (4, 3, 2), (70, 22, 8), id="S-52"),
        # The original gives at least one to each, and more than there are in sum.
        pytest.param(4, 4, (4, 3, 2, 1), (1, 1, 1, 1), id="one-each"),
        pytest.param(5, 4, (5, 4, 1), (3, 1, 1), id="largest-pays"),
        pytest.param(2, 4, (3, 2, 1), (1, 1), id="fewer-than-brackets"),
        pytest.param(1, 4, (3, 2, 1), (1,), id="only-one"),
    ],
)
def test_trials_of_brackets(
    max_trials: int, divisor: float, rungs: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert bracket_trials(max_trials, as_fraction(divisor), rungs) == expected


@given(
    max_trials=st.integers(1, 1000),
    divisor=st.sampled_from([1.1, 1.5, 2, 2.5, 3, 4, 10]),
    rungs=st.lists(st.integers(1, 8), min_size=1, max_size=8),
)
def test_brackets_divide_exactly_the_budget(
    max_trials: int, divisor: float, rungs: list[int]
) -> None:
    trials = bracket_trials(max_trials, as_fraction(divisor), tuple(sorted(rungs, reverse=True)))
    assert sum(trials) == max_trials
    assert min(trials) >= 1


@pytest.mark.parametrize(
    ("max_concurrent", "divisor", "trials", "expected"),
    [
        pytest.param(0, 3, (9, 3, 1), (3, 3, 3), id="S-53"),
        pytest.param(11, 3, (9, 3, 1), (4, 4, 3), id="S-54"),
        pytest.param(0, 4, (40, 10), (10, 10), id="S-55"),
        pytest.param(1, 3, (9, 3, 1), (1, 1, 1), id="one-each-at-least"),
    ],
)
def test_concurrency_of_brackets(
    max_concurrent: int, divisor: float, trials: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert bracket_concurrency(max_concurrent, as_fraction(divisor), trials) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"max_time": 100, "max_trials": 10, "max_concurrent_trials": 2},
            [(2, 7, 1), (1, 3, 1)],
            id="S-56",
        ),
        pytest.param(
            {
                "mode": "conservative",
                "max_time": 1000,
                "max_trials": 10,
                "max_concurrent_trials": 5,
                "divisor": 3,
            },
            [(3, 7, 2), (2, 2, 2), (1, 1, 1)],
            id="S-57",
        ),
    ],
)
def test_plan_of_brackets(changes: dict[str, Any], expected: list[tuple[int, int, int]]) -> None:
    plans = _config(**changes).bracket_plans()
    assert [(plan.rungs, plan.trials, plan.concurrent) for plan in plans] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": "conservative", "max_time": 1000, "max_trials": 500}, (5, 4, 3, 2, 1)),
        ({"mode": "standard", "max_time": 1000, "max_trials": 500}, (5, 4, 3)),
        ({"mode": "aggressive", "max_time": 1000, "max_trials": 500}, (5,)),
        ({"max_time": 1000, "max_trials": 500, "max_rungs": 2}, (2, 1)),
        ({"bracket_rungs": (2, 7, 3), "max_rungs": 1}, (7, 3, 2)),
        # With a float logarithm the exact powers 1000 and 243 lose a rung.
        ({"mode": "aggressive", "max_time": 1000, "max_trials": 1000, "divisor": 10}, (4,)),
        (
            {
                "mode": "aggressive",
                "max_time": 243,
                "max_trials": 243,
                "divisor": 3,
                "max_rungs": 9,
            },
            (6,),
        ),
        ({"mode": "aggressive", "max_time": 10**9, "max_trials": 10**9, "divisor": 1.0001}, (5,)),
    ],
)
def test_rungs_of_brackets(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert bracket_rungs(_config(**changes)) == expected


def test_brackets_start_in_order_and_keep_their_own_trials() -> None:
    search = Search(_config(max_concurrent_trials=4), {}, 0)
    operations = search.apply(Started())
    lengths = [op.length for op in operations if isinstance(op, Train)]
    # Three rungs (4, 16, 64) beside two (16, 64).
    assert lengths == [4, 4, 16, 16]
    ids = [op.request_id for op in operations if isinstance(op, Create)]
    seen = [[entry.request_id for entry in b.rungs[0].entries] for b in search.rungs()]
    assert seen == [ids[:2], ids[2:]]


def test_adaptive_search_trains_its_whole_budget() -> None:
    result = simulate(_config(), {}, 0, lambda create, time: create.trial_seed / time)
    assert len(result.trained) == 16
    assert set(result.trained.values()) <= {4, 16, 64}
    assert result.progress[-1] == 1.0
