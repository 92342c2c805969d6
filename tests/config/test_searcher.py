from collections.abc import Callable
from typing import Any

import pytest

from paceline import search
from paceline.config import validate_config
from paceline.config._fields_and_problems import MISSING, Problem
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig

Make = Callable[..., dict[str, Any]]
Collect = Callable[[dict[str, Any]], dict[str, Problem]]

HALVING = {"name": "async_halving", "metric": "loss", "max_trials": 9, "num_rungs": 3}
ASHA = {"name": "adaptive_asha", "metric": "loss", "max_trials": 9}


@pytest.mark.parametrize(
    ("searcher", "expected"),
    [
        ({"name": "single", "metric": "a"}, SingleConfig(metric="a")),
        (
            {"name": "single", "metric": "a", "max_length": {"epochs": 7}},
            SingleConfig(metric="a", max_length=7),
        ),
        (
            {"name": "random", "metric": "a", "max_trials": 3, "smaller_is_better": False},
            RandomConfig(metric="a", max_trials=3, smaller_is_better=False),
        ),
        (
            {"name": "random", "metric": "a", "max_trials": 3, "max_concurrent_trials": 0,
             "max_length": 5},
            RandomConfig(metric="a", max_trials=3, max_concurrent_trials=0, max_length=5),
        ),
        (
            {"name": "grid", "metric": "a", "max_concurrent_trials": 2},
            GridConfig(metric="a", max_concurrent_trials=2),
        ),
        (
            {**HALVING, "time_metric": "epochs", "max_time": 27, "divisor": 3},
            AsyncHalvingConfig(
                metric="loss", max_trials=9, num_rungs=3, time_metric="epochs", max_time=27,
                divisor=3,
            ),
        ),
        (
            {**HALVING, "max_length": {"records": 900}, "divisor": 2.5},
            AsyncHalvingConfig(
                metric="loss", max_trials=9, num_rungs=3, time_metric="records", max_time=900,
                divisor=2.5,
            ),
        ),
        (
            {**ASHA, "max_length": 100},
            AdaptiveAshaConfig(
                metric="loss", max_trials=9, time_metric="batches", max_time=100
            ),
        ),
        (
            {**ASHA, "max_length": {"epochs": 8}, "mode": "aggressive", "max_rungs": 2,
             "bracket_rungs": [2, 1], "max_concurrent_trials": 4},
            AdaptiveAshaConfig(
                metric="loss", max_trials=9, time_metric="epochs", max_time=8,
                mode=search.Mode.AGGRESSIVE, max_rungs=2, bracket_rungs=(2, 1),
                max_concurrent_trials=4,
            ),
        ),
    ],
)  # fmt: skip
def test_each_method_gives_its_own_configuration(
    make: Make, searcher: dict[str, Any], expected: search.SearchConfig
) -> None:
    config = validate_config(make(searcher=searcher))
    assert config.search_config() == expected
    assert validate_config(config.to_json()).search_config() == expected


def test_an_integral_divisor_reaches_the_search_as_an_integer(make: Make) -> None:
    config = validate_config(make(searcher={**ASHA, "max_length": 8, "divisor": 3.0}))
    assert type(config.search_config().divisor) is int


@pytest.mark.parametrize(
    ("searcher", "length", "unit"),
    [
        ({"name": "single", "metric": "a"}, None, None),
        ({"name": "single", "metric": "a", "max_length": 9}, 9, "batches"),
        ({"name": "grid", "metric": "a", "max_length": {"epochs": 9}}, 9, "epochs"),
        ({**ASHA, "max_length": {"epochs": 8}}, 8, "epochs"),
        ({**ASHA, "time_metric": "steps", "max_time": 8}, 8, "steps"),
    ],
)
def test_a_length_has_a_number_and_a_unit(
    make: Make, searcher: dict[str, Any], length: int | None, unit: str | None
) -> None:
    built = validate_config(make(searcher=searcher)).searcher
    assert (built.length, built.length_unit) == (length, unit)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("adaptive", "use adaptive_asha."),
        ("adaptive_simple", "use adaptive_asha."),
        ("sync_halving", "use async_halving."),
        (
            "custom",
            "use `random` with `sampler: external`, as in examples/own_search, or a plug-in.",
        ),
        ("adaptive-asha", "did you mean `adaptive_asha`?"),
    ],
)
def test_a_method_that_is_not_there_is_refused_with_what_to_use(
    make: Make, problems_of: Collect, name: str, instead: str
) -> None:
    problem = problems_of(make(searcher={"name": name, "metric": "a"}))["searcher.name"]
    assert problem.value == name
    assert problem.hint == instead
    assert "`grid`" in problem.allowed


@pytest.mark.parametrize(
    ("searcher", "paths"),
    [
        (None, ["searcher"]),
        ("single", ["searcher"]),
        ({"metric": "a"}, ["searcher.name"]),
        ({"name": None, "metric": "a"}, ["searcher.name"]),
        ({"name": ["single"], "metric": "a"}, ["searcher.name"]),
        ({"name": "single"}, ["searcher.metric"]),
        ({"name": "single", "metric": " "}, ["searcher.metric"]),
        ({"name": "random", "metric": "a"}, ["searcher.max_trials"]),
        ({"name": "single", "metric": "a", "max_trials": 3}, ["searcher.max_trials"]),
        (
            {"name": "single", "metric": "a", "source_trial_id": 1, "source_checkpoint_uuid": "u"},
            ["searcher.source_checkpoint_uuid"],
        ),
        ({"name": "single", "metric": "a", "stop_timeout": -1}, ["searcher.stop_timeout"]),
        ({"name": "single", "metric": "a", "max_length": 0}, ["searcher.max_length"]),
        ({"name": "single", "metric": "a", "max_length": {"steps": 3}}, ["searcher.max_length"]),
        (
            {"name": "single", "metric": "a", "max_length": {"epochs": 1, "batches": 2}},
            ["searcher.max_length"],
        ),
        (ASHA, ["searcher.time_metric", "searcher.max_time"]),
        ({**ASHA, "time_metric": "epochs"}, ["searcher.max_time"]),
        ({**ASHA, "max_time": 3}, ["searcher.time_metric"]),
        ({**ASHA, "time_metric": "epochs", "max_time": 0}, ["searcher.max_time"]),
        ({**ASHA, "time_metric": "", "max_time": 3}, ["searcher.time_metric"]),
        ({**ASHA, "max_length": {"epochs": -1}}, ["searcher.max_length"]),
        ({**ASHA, "max_length": 3, "max_time": 3}, ["searcher.max_length"]),
        (
            {**ASHA, "max_length": 3, "max_time": 3, "time_metric": "epochs"},
            ["searcher.max_length"],
        ),
        ({**ASHA, "max_length": 3, "divisor": 1}, ["searcher.divisor"]),
        ({**ASHA, "max_length": 3, "divisor": float("inf")}, ["searcher.divisor"]),
        ({**ASHA, "max_length": 3, "mode": "careful"}, ["searcher.mode"]),
        ({**ASHA, "max_length": 3, "bracket_rungs": [2, 0]}, ["searcher.bracket_rungs[1]"]),
        ({**ASHA, "max_length": 3, "max_rungs": 0}, ["searcher.max_rungs"]),
        ({**ASHA, "max_length": 3, "max_concurrent_trials": -1},
         ["searcher.max_concurrent_trials"]),
        (
            {"name": "async_halving", "metric": "a", "max_trials": 3, "max_length": 3},
            ["searcher.num_rungs"],
        ),
    ],
)  # fmt: skip
def test_a_wrong_searcher_is_refused_at_the_field_in_question(
    make: Make, problems_of: Collect, searcher: object, paths: list[str]
) -> None:
    assert list(problems_of(make(searcher=searcher))) == paths


def test_a_missing_time_is_told_with_the_shorter_form(make: Make, problems_of: Collect) -> None:
    problem = problems_of(make(searcher=ASHA))["searcher.max_time"]
    assert problem.value is MISSING
    assert "`searcher.max_length`" in problem.hint
