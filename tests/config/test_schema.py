import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from paceline.config import ConfigError, json_schema, validate_config

Make = Callable[..., dict[str, Any]]

PUBLISHED = Path(__file__).parents[2] / "docs" / "experiment-config.schema.json"
ASHA = {"name": "adaptive_asha", "metric": "loss", "max_trials": 9}
LOG = {"type": "log", "base": 10, "minval": -3, "maxval": -1}


@pytest.fixture(scope="module")
def schema() -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json_schema())


def test_the_published_schema_is_up_to_date() -> None:
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    assert PUBLISHED.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"searcher": {**ASHA, "max_length": {"epochs": 3}}},
        {"searcher": {**ASHA, "max_length": 3, "time_metric": None}},
        {"searcher": {**ASHA, "time_metric": "epochs", "max_time": 3, "max_length": None}},
        {
            "searcher": {"name": "grid", "metric": "a"},
            "hyperparameters": {"lr": {**LOG, "count": 3}},
        },
        {"hyperparameters": {"lr": LOG, "a": 1, "b": None, "c": [1], "d": {"e": LOG, "f": {}}}},
        {"checkpoint_storage": "/a"},
        {"checkpoint_storage": None},
        {"checkpoint_storage": {"type": "directory", "container_path": "/a"}},
        {"checkpoint_storage": {"type": "shared_fs", "host_path": "/a"}},
        {"checkpoint_storage": {"save_trial_best": 3}},
        {"environment": {"variables": ["A=1"]}},
        {"environment": {"environment_variables": {"A": "1"}}},
        {"resources": {"max_slots": None}},
        {"entrypoint": ["python3", "train.py"]},
        {"min_validation_period": {"records": 0}, "min_checkpoint_period": 3},
        {"min_checkpoint_period": "continuous", "checkpoint_bytes_per_hour": "1.5 GiB"},
        {"memory_checkpoints": True},
        {"memory_checkpoints": 0.05},
        {"checkpoint_storage": {"save_age": "7d", "save_bytes": 10**9}},
        {"scheduling_unit": 5, "perform_initial_validation": None},
        {"optimizations": {"aggregation_frequency": 2, "mixed_precision": "O1"}},
        {"optimizations": {"gradient_compression": True, "tensor_fusion_threshold": None}},
    ],
)
def test_the_schema_accepts_what_validation_accepts(
    make: Make, schema: jsonschema_rs.Draft202012Validator, fields: dict[str, Any]
) -> None:
    data = make(**fields)
    resolved = validate_config(data).to_json()
    assert [error.message for error in schema.iter_errors(data)] == []
    assert [error.message for error in schema.iter_errors(resolved)] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"entrypoint": None},
        {"entrypoint": []},
        {"unknown": 1},
        {"max_restarts": "3"},
        {"searcher": {"metric": "a"}},
        {"searcher": {"name": "pbt", "metric": "a"}},
        {"searcher": ASHA},
        {"searcher": {**ASHA, "time_metric": "epochs"}},
        {"searcher": {**ASHA, "max_length": 3, "time_metric": "epochs", "max_time": 3}},
        {"searcher": {**ASHA, "max_length": {"steps": 3}}},
        {"hyperparameters": {"lr": {"type": "log", "minval": 1, "maxval": 2}}},
        {"hyperparameters": {"a": {"b": {"type": "uniform"}}}},
        {"checkpoint_storage": {"type": "gcs", "bucket": "b"}},
        {"checkpoint_storage": {"type": "s3"}},
        {"checkpoint_storage": {"type": "directory"}},
        {"checkpoint_storage": {"path": "/a"}},
        {"environment": {"image": "x"}},
        {"resources": {"slots_per_trial": 0}},
        {"min_validation_period": {"steps": 3}},
        {"min_checkpoint_period": -1},
        {"scheduling_unit": 0},
        {"optimizations": {"mixed_precision": "O3"}},
    ],
)
def test_the_schema_refuses_what_validation_refuses(
    make: Make, schema: jsonschema_rs.Draft202012Validator, fields: dict[str, Any]
) -> None:
    data = make(**fields)
    with pytest.raises(ConfigError, match="`"):
        validate_config(data)
    assert not schema.is_valid(data)
