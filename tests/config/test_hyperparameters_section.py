from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import validate_config
from paceline.config._fields_and_problems import MISSING, Problem

Make = Callable[..., dict[str, Any]]
Collect = Callable[[dict[str, Any]], dict[str, Problem]]

GRID = {"name": "grid", "metric": "loss"}


def test_a_space_is_kept_as_it_was_written(make: Make) -> None:
    space = {
        "lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1},
        "bare": 3,
        "nothing": None,
        "items": [1, "two"],
        "net": {"n": {"type": "int", "minval": 1, "maxval": 4, "count": 2}, "empty": {}},
    }
    assert validate_config(make(hyperparameters=space)).hyperparameters == space


@pytest.mark.parametrize(
    ("space", "path", "value"),
    [
        ({"lr": {"type": "double", "minval": 2, "maxval": 1}}, "lr.minval", 2),
        ({"lr": {"type": "int", "minval": 1, "maxval": 1}}, "lr.minval", 1),
        ({"a": {"b": {"type": "int", "minval": "1", "maxval": 2}}}, "a.b.minval", "1"),
        ({"lr": {"type": "log", "base": 0, "minval": 1, "maxval": 2}}, "lr.base", 0),
        ({"lr": {"type": "int", "minval": 1, "maxval": 2, "count": 0}}, "lr.count", 0),
        ({"lr": {"type": "int", "minval": 1}}, "lr.maxval", MISSING),
        ({"lr": {"type": "int", "minval": 1, "maxval": 2, "step": 3}}, "lr.step", 3),
        ({"lr": {"type": "uniform"}}, "lr.type", "uniform"),
        ({"lr": {"type": "categorical", "vals": []}}, "lr.vals", []),
        ({"lr": {"type": "const"}}, "lr.val", MISSING),
    ],
)
def test_a_wrong_hyperparameter_is_found_at_its_path(
    make: Make, problems_of: Collect, space: dict[str, Any], path: str, value: object
) -> None:
    problems = problems_of(make(hyperparameters=space))
    assert list(problems) == [f"hyperparameters.{path}"]
    problem = problems[f"hyperparameters.{path}"]
    assert problem.value == value
    assert "got" not in problem.message
    assert problem.hint


def test_a_range_with_a_bound_that_is_no_number_is_refused(
    make: Make, problems_of: Collect
) -> None:
    space = {"lr": {"type": "double", "minval": float("nan"), "maxval": 1}, "x": float("inf")}
    problems = problems_of(make(hyperparameters=space))
    assert list(problems) == ["hyperparameters.lr.minval", "hyperparameters.x"]


def test_a_name_that_is_no_string_is_refused(make: Make, problems_of: Collect) -> None:
    problems = problems_of(make(hyperparameters={"net": {3: 1}}))
    assert problems["hyperparameters.net"].value == 3


def test_a_grid_search_needs_a_count_for_every_range(make: Make, problems_of: Collect) -> None:
    space = {
        "lr": {"type": "double", "minval": 1, "maxval": 2},
        "net": {"n": {"type": "int", "minval": 1, "maxval": 2, "count": None}},
        "fine": {"type": "log", "base": 2, "minval": 1, "maxval": 2, "count": 3},
        "choice": {"type": "categorical", "vals": [1, 2]},
        "constant": 3,
    }
    problems = problems_of(make(hyperparameters=space, searcher=GRID))
    assert list(problems) == ["hyperparameters.lr.count", "hyperparameters.net.n.count"]
    assert validate_config(make(hyperparameters=space)).hyperparameters == space


@pytest.mark.parametrize("space", [{}, {"a": 1}, {"a": {"type": "categorical", "vals": [1]}}])
def test_a_grid_without_ranges_needs_no_count(make: Make, space: dict[str, Any]) -> None:
    assert validate_config(make(hyperparameters=space, searcher=GRID)).hyperparameters == space


@pytest.mark.parametrize(
    ("num_axes", "count", "shown"), [(2, 400, "160000"), (33, 2**62, "10^615")]
)
def test_a_grid_of_too_many_points_is_refused_before_it_is_made(
    make: Make, problems_of: Collect, num_axes: int, count: int, shown: str
) -> None:
    axis = {"type": "double", "minval": 0, "maxval": 1, "count": count}
    space = {f"x{index}": axis for index in range(num_axes)}
    problem = problems_of(make(hyperparameters=space, searcher=GRID))["hyperparameters"]
    assert problem.message.endswith(f"more than 100000 points, which has {shown}")
