from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.arguments_and_errors import Rng
from paceline.search import SpaceError, parse_space


def _axis(**fields: Any) -> list[Any]:
    return [point["x"] for point in parse_space({"x": fields}).grid()]


AXES = [
    pytest.param({"type": "int", "minval": 0, "maxval": 4, "count": 5}, [0, 1, 2, 3, 4], id="S-10"),
    pytest.param({"type": "int", "minval": -4, "maxval": -2, "count": 3}, [-4, -3, -2], id="S-11"),
    pytest.param({"type": "int", "minval": 0, "maxval": 2, "count": 100}, [0, 1, 2], id="S-13"),
    pytest.param({"type": "int", "minval": 1, "maxval": 4, "count": 1}, [3], id="S-14"),
    pytest.param({"type": "int", "minval": -4, "maxval": -1, "count": 1}, [-3], id="away-from-0"),
    pytest.param({"type": "int", "minval": 0, "maxval": 5, "count": 3}, [0, 3, 5], id="half-up"),
    pytest.param(
        {"type": "int", "minval": -(2**61), "maxval": 2**61, "count": 3},
        [-(2**61), 0, 2**61],
        id="exact-beyond-floats",
    ),
    pytest.param(
        {"type": "double", "minval": 0.1, "maxval": 0.5, "count": 3},
        [0.1, 0.30000000000000004, 0.5],
        id="S-17",
    ),
    pytest.param({"type": "double", "minval": 1, "maxval": 2, "count": 1}, [1.5], id="middle"),
    pytest.param(
        {"type": "log", "base": 10, "minval": -5, "maxval": -3, "count": 3},
        [1e-5, 1e-4, 1e-3],
        id="S-19",
    ),
    pytest.param(
        {"type": "log", "base": 2, "minval": 0, "maxval": 3, "count": 4}, [1, 2, 4, 8], id="S-21"
    ),
    pytest.param(
        {"type": "log", "base": 10, "minval": -4, "maxval": -2, "count": 1}, [1e-3], id="log-middle"
    ),
    pytest.param({"type": "categorical", "vals": ["b", None, [1]]}, ["b", None, [1]], id="cat"),
    pytest.param({"type": "const", "val": {"a": [1]}}, [{"a": [1]}], id="const"),
]


@pytest.mark.parametrize(("fields", "expected"), AXES)
def test_grid_axis(fields: dict[str, Any], expected: list[Any]) -> None:
    if fields["type"] in ("double", "log"):
        expected = [pytest.approx(value, rel=1e-12) for value in expected]
    assert _axis(**fields) == expected


def test_grid_varies_the_last_name_fastest() -> None:
    # S-7.
    space = parse_space(
        {
            "2": {"type": "int", "minval": 0, "maxval": 10, "count": 3},
            "1": {"type": "int", "minval": 0, "maxval": 20, "count": 3},
        }
    )
    expected = [{"1": a, "2": b} for a, b in itertools.product((0, 10, 20), (0, 5, 10))]
    assert space.grid() == expected


def test_nested_grid_has_the_same_points() -> None:
    # S-8.
    space = parse_space(
        {
            "net": {
                "2": {"type": "int", "minval": 0, "maxval": 10, "count": 3},
                "1": {"type": "int", "minval": 0, "maxval": 20, "count": 3},
            }
        }
    )
    expected = [{"net": {"1": a, "2": b}} for a, b in itertools.product((0, 10, 20), (0, 5, 10))]
    assert space.grid() == expected


def test_grid_of_categories_is_their_product() -> None:
    # S-9.
    axes = {"a": [3, 5], "b": [7, 11], "c": [13, 17], "d": [10, 100]}
    space = parse_space({k: {"type": "categorical", "vals": v} for k, v in axes.items()})
    expected = [
        dict(zip("abcd", point, strict=True)) for point in itertools.product(*axes.values())
    ]
    assert space.grid() == expected
    assert space.grid_size() == 16


def test_grid_size_is_the_product_of_its_axes() -> None:
    # S-12.
    space = parse_space(
        {
            str(index): {"type": "categorical", "vals": list(range(size))}
            for index, size in enumerate((2, 2, 3, 3, 4, 5))
        }
    )
    points = space.grid()
    assert space.grid_size() == len(points) == 720
    assert len({tuple(point.values()) for point in points}) == 720


def test_grid_point_of_a_huge_grid_needs_no_list() -> None:
    axis = {"type": "int", "minval": 0, "maxval": 10**9, "count": 10**9 + 1}
    space = parse_space({"a": axis, "b": axis})
    assert space.grid_point(space.grid_size() - 1) == {"a": 10**9, "b": 10**9}


@pytest.mark.parametrize("index", [-1, 4])
def test_grid_point_outside_the_grid_is_refused(index: int) -> None:
    space = parse_space({"a": {"type": "categorical", "vals": [1, 2, 3, 4]}})
    with pytest.raises(IndexError, match="must be from 0 to 3"):
        space.grid_point(index)


def test_constants_need_no_type() -> None:
    values = {"a": 1, "b": [1, {"k": 2}], "c": None, "d": "text", "e": True, "f": {}, "g": {"h": 2}}
    space = parse_space(values)
    assert space.grid() == [values]
    assert space.sample(Rng(0)) == values


def test_empty_space_has_one_empty_point() -> None:
    assert parse_space({}).grid() == [{}]


def test_top_level_name_may_be_type() -> None:
    assert parse_space({"type": "resnet"}).grid() == [{"type": "resnet"}]


def test_names_are_drawn_in_sorted_order_at_every_level() -> None:
    axis = {"type": "double", "minval": 0, "maxval": 1}
    shuffled = {"z": axis, "m": {"q": axis, "b": {"y": axis, "x": axis}}, "a": axis}
    ordered = {"a": axis, "m": {"b": {"x": axis, "y": axis}, "q": axis}, "z": axis}
    sample = parse_space(shuffled).sample(Rng(5))
    rng = Rng(5)
    a, x, y, q, z = (rng.real() for _ in range(5))
    assert sample == {"a": a, "m": {"b": {"x": x, "y": y}, "q": q}, "z": z}
    assert sample == parse_space(ordered).sample(Rng(5))
    assert list(sample) == ["a", "m", "z"]
    assert list(sample["m"]) == ["b", "q"]


def test_samples_share_no_values_with_the_space() -> None:
    space = parse_space({"layers": [1, 2], "opt": {"type": "categorical", "vals": [{"a": [1]}]}})
    first = space.sample(Rng(0))
    first["layers"].append(3)
    first["opt"]["a"].append(2)
    assert space.sample(Rng(0)) == {"layers": [1, 2], "opt": {"a": [1]}}


@given(seed=st.integers(0, 2**31 - 1), low=st.integers(-9, 9), width=st.integers(1, 9))
def test_samples_stay_in_their_ranges(seed: int, low: int, width: int) -> None:
    bounds = {"minval": low, "maxval": low + width}
    space = parse_space(
        {
            "i": {"type": "int", **bounds},
            "d": {"type": "double", **bounds},
            "l": {"type": "log", "base": 2, **bounds},
            "c": {"type": "categorical", "vals": ["a", "b"]},
        }
    )
    sample = space.sample(Rng(seed))
    assert isinstance(sample["i"], int)
    assert low <= sample["i"] <= low + width
    assert low <= sample["d"] < low + width
    assert 2.0**low <= sample["l"] < 2.0 ** (low + width)
    assert sample["c"] in ("a", "b")


def test_integers_reach_both_bounds() -> None:
    space = parse_space({"n": {"type": "int", "minval": 1, "maxval": 3}})
    rng = Rng(0)
    assert {space.sample(rng)["n"] for _ in range(100)} == {1, 2, 3}


WRONG = [
    ({"n": {"type": "int", "minval": 3, "maxval": 3}}, "n.minval", r"less than `n.maxval` \(3\)"),
    ({"n": {"type": "int", "minval": 3, "maxval": 1}}, "n.minval", "but got 3"),
    ({"n": {"type": "int", "minval": 0.5, "maxval": 1}}, "n.minval", "an integer .* but got 0.5"),
    ({"n": {"type": "int", "minval": True, "maxval": 3}}, "n.minval", "but got True"),
    ({"n": {"type": "int", "minval": 0, "maxval": 2**62}}, "n.maxval", "at most 2"),
    ({"n": {"type": "int", "maxval": 1}}, "n.minval", "`n.minval` must be given"),
    ({"n": {"type": "int", "minval": 0, "maxval": 1, "count": 0}}, "n.count", "at least 1"),
    ({"n": {"type": "int", "minval": 0, "maxval": 1, "count": 1.5}}, "n.count", "but got 1.5"),
    ({"n": {"type": "int", "minval": 0, "maxval": 1, "step": 2}}, "n.step", "`minval`, `maxval`"),
    ({"o": {"lr": {"type": "double", "minval": 2, "maxval": 1}}}, "o.lr.minval", "but got 2"),
    ({"o": {"lr": {"type": "double", "minval": "1e-3", "maxval": 1}}}, "o.lr.minval", "'1e-3'"),
    ({"d": {"type": "double", "minval": math.nan, "maxval": 1}}, "d.minval", "but got nan"),
    ({"d": {"type": "double", "minval": 0, "maxval": math.inf}}, "d.maxval", "but got inf"),
    ({"d": {"type": "double", "minval": 0, "maxval": 10**400}}, "d.maxval", "a finite number"),
    (
        {"d": {"type": "double", "minval": -sys.float_info.max, "maxval": sys.float_info.max}},
        "d.maxval",
        "minus `d.minval` must be a finite number",
    ),
    ({"l": {"type": "log", "base": 0, "minval": 0, "maxval": 1}}, "l.base", "greater than 0"),
    ({"l": {"type": "log", "minval": 0, "maxval": 1}}, "l.base", "must be given"),
    ({"l": {"type": "log", "base": 10, "minval": 0, "maxval": 999}}, "l", "positive, finite"),
    ({"l": {"type": "log", "base": 10, "minval": -999, "maxval": 0}}, "l", "positive, finite"),
    ({"c": {"type": "categorical", "vals": []}}, "c.vals", "at least one value, but got"),
    ({"c": {"type": "categorical", "vals": "ab"}}, "c.vals", "but got 'ab'"),
    ({"c": {"type": "categorical", "vals": [1, {2}]}}, "c.vals[1]", "of type set"),
    ({"c": {"type": "const"}}, "c.val", "must be given"),
    ({"c": {"type": "const", "val": {"a": [math.inf]}}}, "c.val.a[0]", "but got inf"),
    ({"c": [{1: 2}]}, "c[0]", "must be strings, but got 1"),
    ({"u": {"type": "uniform", "minval": 0, "maxval": 1}}, "u", "`log`, but got 'uniform'"),
    ({"u": {"type": {"type": "int"}}}, "u", "a group needs another name than `type`"),
    ({1: 2}, "", "names in `hyperparameters` must be non-empty strings, but got 1"),
    ({"net": {"": 2}}, "net", "names in `net` must be non-empty strings"),
    ([1], "", "must be a map"),
]


@pytest.mark.parametrize(("hyperparameters", "path", "message"), WRONG)
def test_wrong_space_is_refused_with_its_path(
    hyperparameters: Any, path: str, message: str
) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        parse_space(hyperparameters)
    assert caught.value.path == path
    assert isinstance(caught.value, ValueError)
    assert "\nHint: " in str(caught.value)


@pytest.mark.parametrize("kind", ["int", "double"])
def test_grid_without_count_is_refused(kind: str) -> None:
    space = parse_space({"net": {"width": {"type": kind, "minval": 1, "maxval": 4}}})
    with pytest.raises(SpaceError, match="`net.width.count` must be given for a grid search"):
        space.grid()
