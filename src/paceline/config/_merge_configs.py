"""Two configs as one: the lower gives what the higher leaves open."""

import copy
from typing import Any, TypeGuard

from paceline.config._storage_section import expand_location

# What every kind of a section knows, and so outlives a change of its kind.
_SHARED = {
    "searcher": (
        "metric",
        "smaller_is_better",
        "source_trial_id",
        "source_checkpoint_uuid",
        "stop_timeout",
    ),
    "checkpoint_storage": (
        "save_experiment_best",
        "save_trial_best",
        "save_trial_latest",
        "save_age",
        "save_bytes",
    ),
}
_KIND = {"searcher": "name", "checkpoint_storage": "type"}
# Of fields that say the same thing, those of the lower config go when the higher has any.
_ALTERNATIVES = {
    "searcher": (
        (("max_length",), ("time_metric", "max_time")),
        (("source_trial_id",), ("source_checkpoint_uuid",)),
    ),
    "checkpoint_storage": ((("path",), ("container_path",)),),
    "environment": ((("variables",), ("environment_variables",)),),
}
# A map of one unit and its number is one value.
_LENGTHS = (("searcher", "max_length"), ("min_validation_period",), ("min_checkpoint_period",))


def merge_configs(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return `high` with what it leaves open taken from `low`; neither is changed.

    Fields are merged one by one, through nested maps. Labels are united. A hyperparameter and a
    length are replaced as a whole, and only nested maps of hyperparameters are merged. A searcher
    or storage of another kind replaces the lower one, save for the fields that all kinds share. A
    field that is null is left open, except for a hyperparameter, where null is a value.
    """
    merged = _merge_fields(copy.deepcopy(low), copy.deepcopy(high), path=())
    return {key: value for key, value in merged.items() if value is not None}


def _merge_fields(
    low: dict[str, Any], high: dict[str, Any], path: tuple[str, ...]
) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        if value is None and below is not None:
            continue
        result[key] = value if below is None else _merge_values(below, value, (*path, key))
    return result


def _merge_values(low: Any, high: Any, path: tuple[str, ...]) -> Any:
    name = path[0]
    if path == ("labels",) and isinstance(low, list) and isinstance(high, list):
        return low + [label for label in high if label not in low]
    if path == ("checkpoint_storage",):
        low, high = expand_location(low), expand_location(high)
    if path == ("environment",):
        low, high = _with_maps(low), _with_maps(high)
    if not isinstance(low, dict) or not isinstance(high, dict) or path in _LENGTHS:
        return high
    if path == ("hyperparameters",):
        return _merge_space(low, high)
    if len(path) == 1 and name in _KIND:
        low = _keep_shared(low, high, name)
    if len(path) == 1:
        low = _drop_alternatives(low, high, name)
    return _merge_fields(low, high, path)


def _merge_space(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        result[key] = (
            _merge_space(below, value) if _is_nested(below) and _is_nested(value) else value
        )
    return result


def _is_nested(node: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict) and "type" not in node


def _keep_shared(low: dict[str, Any], high: dict[str, Any], name: str) -> dict[str, Any]:
    kind = high.get(_KIND[name])
    if kind is None or kind == low.get(_KIND[name]):
        return low
    return {key: value for key, value in low.items() if key in _SHARED[name]}


def _drop_alternatives(low: dict[str, Any], high: dict[str, Any], name: str) -> dict[str, Any]:
    dropped: set[str] = set()
    for pair in _ALTERNATIVES.get(name, ()):
        for ours, theirs in (pair, pair[::-1]):
            if any(high.get(field) is not None for field in ours):
                dropped.update(theirs)
    return {key: value for key, value in low.items() if key not in dropped}


def _with_maps(environment: Any) -> Any:
    """Return the environment with variables and secrets as maps under their own names."""
    if not isinstance(environment, dict):
        return environment
    result = dict(environment)
    if result.get("variables") is None and "environment_variables" in result:
        result["variables"] = result.pop("environment_variables")
    for field in ("variables", "secrets"):
        entries = result.get(field)
        if isinstance(entries, list) and all(isinstance(e, str) and "=" in e for e in entries):
            result[field] = dict(entry.split("=", 1) for entry in entries)
    return result
