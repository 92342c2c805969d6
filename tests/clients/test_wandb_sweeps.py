"""Configs of W&B's sweeps as spaces: which values each distribution gives, and what is refused."""

import json
from typing import Any

import pytest

from paceline._cluster.master.trackers.wandb_graphql import GraphqlError
from paceline._cluster.master.trackers.wandb_sweeps import point_of, read_config


def points(config: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the first points of a sweep with a config, checked."""
    checked, _ = read_config(json.dumps(config))
    document = {**checked, "seed": 7, "run_cap": checked.get("run_cap")}
    found = [point_of(document, index) for index in range(number)]
    assert found == [point_of(document, index) for index in range(number)]
    return [each for each in found if each is not None]


def test_grid_gives_each_combination_once_up_to_its_cap() -> None:
    """Choices, integers, steps, constants and groups have points; a group may hold any name."""
    parameters = {
        "kind": {"values": ["a", None]},
        "fixed": {"value": 3},
        "net": {"parameters": {"type": {"min": 1, "max": 2}}},
        "rate": {"distribution": "q_uniform", "min": 0.1, "max": 0.3, "q": 0.1},
    }
    config = {"method": "grid", "parameters": parameters}
    found = points(config, 20)
    assert found == [
        {"fixed": 3, "kind": kind, "net": {"type": size}, "rate": rate}
        for kind in ("a", None)
        for size in (1, 2)
        for rate in (0.1, 0.2, 0.3)
    ]
    assert points({**config, "run_cap": 5}, 20) == found[:5]


@pytest.mark.parametrize(
    ("given", "low", "high", "kind"),
    [
        ({"min": 0.5, "max": 1.5}, 0.5, 1.5, float),
        ({"min": 1, "max": 4}, 1, 4, int),
        ({"distribution": "uniform", "min": 1, "max": 4}, 1, 4, float),
        ({"distribution": "int_uniform", "min": -2, "max": 2}, -2, 2, int),
        ({"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1}, 1e-4, 1e-1, float),
        ({"distribution": "log_uniform", "min": -3, "max": 0}, 0.049, 1, float),
        ({"distribution": "q_uniform", "min": 3, "max": 11, "q": 2}, 4, 10, int),
    ],
)
def test_random_draws_lie_within_the_bounds(
    given: dict[str, Any], low: float, high: float, kind: type
) -> None:
    """Draws differ from each other, have the type of the distribution, and reach both halves."""
    found = [each["x"] for each in points({"method": "random", "parameters": {"x": given}}, 200)]
    assert {type(each) for each in found} == {kind}
    assert low <= min(found) < max(found) <= high * (1 + 1e-9)
    middle = (low * high) ** 0.5 if "log" in given.get("distribution", "") else (low + high) / 2
    assert sum(each < middle for each in found) > 30
    assert sum(each > middle for each in found) > 30


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "bayes"}, "`method` must be one of grid, random, but got 'bayes'"),
        ({"method": ["grid"]}, "`method` must be one of grid, random"),
        ({"parameters": {}}, "`parameters` must be a map of names to parameters"),
        ({"parameters": {"": {"value": 1}}}, "`parameters` must be a map of names"),
        ({"parameters": {"x": 3}}, "`parameters.x` must be a map such as"),
        ({"parameters": {"x": {}}}, "`parameters.x` must have max, min"),
        ({"parameters": {"x": {"values": []}}}, "must be a list of at least one value"),
        ({"parameters": {"x": {"values": [1], "probabilities": [1]}}}, "but has probabilities"),
        ({"parameters": {"x": {"distribution": "normal"}}}, "`parameters.x.distribution` must be"),
        ({"parameters": {"x": {"min": 1, "max": "2"}}}, "`parameters.x.max` must be a finite"),
        ({"parameters": {"x": {"min": 1, "max": True}}}, "`parameters.x.max` must be a finite"),
        ({"parameters": {"x": {"min": 2, "max": 1}}}, "`parameters.x.min` must be less than"),
        ({"parameters": {"x": {"min": 0.0, "max": 1.0}}}, "`parameters.x` must be `values`"),
        ({"run_cap": 0}, "`run_cap` must be an integer of at least 1"),
        ({"controller": {"type": "local"}}, "`controller` must be left out"),
        (
            {"parameters": {"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}}},
            "`parameters.x.min` must be greater than 0",
        ),
        (
            {"parameters": {"x": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 1e-9}}},
            "`parameters.x.q` must be greater than 0",
        ),
        (
            {"parameters": {"x": {"distribution": "q_uniform", "min": 1, "max": 2, "q": 5}}},
            "must have a multiple of 5",
        ),
    ],
)
def test_wrong_config_is_refused_with_its_place(config: dict[str, Any], message: str) -> None:
    """The message names what is at fault."""
    usual = {"method": "grid", "parameters": {"x": {"values": [1]}}}
    with pytest.raises(GraphqlError) as caught:
        read_config(json.dumps(usual | config))
    assert message in str(caught.value)


def test_what_is_not_served_is_said() -> None:
    """Fields that change nothing here are named in the answer."""
    config = {"method": "random", "parameters": {"x": {"value": 1}}, "name": "n", "program": "p.py"}
    _, warnings = read_config(json.dumps(config | {"early_terminate": {}, "apiVersion": 2}))
    assert warnings == [
        "`apiVersion` is not served here.",
        "`early_terminate` is not served here. Runs go on to their end.",
    ]
