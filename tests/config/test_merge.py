import copy
from typing import Any

import pytest

from paceline.config._validate_config import merge_configs


@pytest.mark.parametrize(
    ("low", "high", "merged"),
    [
        ({"name": "a", "debug": True}, {"name": "b"}, {"name": "b", "debug": True}),
        ({"name": "a"}, {"name": None}, {"name": "a"}),
        ({"name": None}, {}, {}),
        ({"labels": ["x", "y"]}, {"labels": ["y", "z"]}, {"labels": ["x", "y", "z"]}),
        (
            {"resources": {"slots_per_trial": 2, "max_slots": 4}},
            {"resources": {"slots_per_trial": 1}},
            {"resources": {"slots_per_trial": 1, "max_slots": 4}},
        ),
        (
            {"hyperparameters": {"lr": {"type": "int", "minval": 1, "maxval": 2, "count": 2}}},
            {"hyperparameters": {"lr": {"type": "int", "minval": 3, "maxval": 4}, "n": 1}},
            {"hyperparameters": {"lr": {"type": "int", "minval": 3, "maxval": 4}, "n": 1}},
        ),
        (
            {"searcher": {"name": "random", "metric": "a", "smaller_is_better": False}},
            {"searcher": {"objectives": [{"metric": "b"}, {"metric": "a"}]}},
            {"searcher": {"name": "random", "objectives": [{"metric": "b"}, {"metric": "a"}]}},
        ),
        (
            {"searcher": {"name": "random", "metric": "a", "objectives": [{"metric": "a"}]}},
            {"searcher": {"name": "hyperband"}},
            {"searcher": {"name": "hyperband", "metric": "a", "objectives": [{"metric": "a"}]}},
        ),
        (
            {"searcher": {"name": "random", "metric": "a", "objectives": [{"metric": "a"}]}},
            {"searcher": {"name": "single"}},
            {"searcher": {"name": "single", "metric": "a"}},
        ),
        (
            {"hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0}}},
            {"hyperparameters": {"lr": {"maxval": -2, "count": 3}}},
            {
                "hyperparameters": {
                    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2, "count": 3}
                }
            },
        ),
        (
            {"hyperparameters": {"net": {"a": 1, "b": 2}, "lr": 1}},
            {"hyperparameters": {"net": {"b": None, "c": {}}}},
            {"hyperparameters": {"net": {"a": 1, "b": None, "c": {}}, "lr": 1}},
        ),
        (
            {"hyperparameters": {"net": {"a": 1}}},
            {"hyperparameters": {"net": {"type": "const", "val": 3}}},
            {"hyperparameters": {"net": {"type": "const", "val": 3}}},
        ),
        (
            {"searcher": {"name": "random", "metric": "a", "max_trials": 9, "stop_timeout": 5}},
            {"searcher": {"name": "grid"}},
            {"searcher": {"name": "grid", "metric": "a", "stop_timeout": 5}},
        ),
        (
            {"searcher": {"name": "random", "metric": "a", "max_trials": 9}},
            {"searcher": {"max_trials": 3}},
            {"searcher": {"name": "random", "metric": "a", "max_trials": 3}},
        ),
        (
            {"searcher": {"name": "adaptive_asha", "time_metric": "epochs", "max_time": 9}},
            {"searcher": {"name": "adaptive_asha", "max_length": 3}},
            {"searcher": {"name": "adaptive_asha", "max_length": 3}},
        ),
        (
            {"searcher": {"max_length": {"epochs": 3}}},
            {"searcher": {"time_metric": "epochs", "max_time": 9}},
            {"searcher": {"time_metric": "epochs", "max_time": 9}},
        ),
        (
            {"searcher": {"name": "single", "max_length": {"epochs": 3}}},
            {"searcher": {"max_length": {"batches": 9}}},
            {"searcher": {"name": "single", "max_length": {"batches": 9}}},
        ),
        (
            {"min_validation_period": {"epochs": 1}, "min_checkpoint_period": {"batches": 5}},
            {"min_validation_period": {"records": 9}, "min_checkpoint_period": 3},
            {"min_validation_period": {"records": 9}, "min_checkpoint_period": 3},
        ),
        (
            {"checkpoint_storage": {"type": "directory", "path": "/a", "save_trial_best": 3}},
            {"checkpoint_storage": {"type": "shared_fs", "host_path": "/b"}},
            {
                "checkpoint_storage": {
                    "type": "shared_fs",
                    "host_path": "/b",
                    "save_trial_best": 3,
                }
            },
        ),
        (
            {"checkpoint_storage": {"type": "directory", "path": "/a"}},
            {"checkpoint_storage": {"save_trial_best": 3}},
            {"checkpoint_storage": {"type": "directory", "path": "/a", "save_trial_best": 3}},
        ),
        (
            {"checkpoint_storage": {"type": "directory", "container_path": "/a"}},
            {"checkpoint_storage": "/b"},
            {"checkpoint_storage": {"type": "directory", "path": "/b"}},
        ),
        (
            {"environment": {"environment_variables": ["A=1", "B=2"], "python": "python3"}},
            {"environment": {"variables": {"B": "3"}}},
            {"environment": {"variables": {"A": "1", "B": "3"}, "python": "python3"}},
        ),
        ({"data": {"a": {"x": 1}, "b": 1}}, {"data": {"a": {"y": 2}, "b": [2]}},
         {"data": {"a": {"x": 1, "y": 2}, "b": [2]}}),
    ],
)  # fmt: skip
def test_the_higher_config_wins_field_by_field(
    low: dict[str, Any], high: dict[str, Any], merged: dict[str, Any]
) -> None:
    before = copy.deepcopy((low, high))
    assert merge_configs(low, high) == merged
    assert (low, high) == before


def test_merging_shares_nothing_with_its_inputs() -> None:
    low: dict[str, Any] = {"data": {"a": [1]}}
    high: dict[str, Any] = {"hyperparameters": {"x": [1]}}
    merged = merge_configs(low, high)
    merged["data"]["a"].append(2)
    merged["hyperparameters"]["x"].append(2)
    assert (low, high) == ({"data": {"a": [1]}}, {"hyperparameters": {"x": [1]}})
