"""Filters and orders of W&B's lists of runs."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline._cluster.master.trackers.wandb_graphql import GraphqlError

_NAMES = {
    "display_name": "displayName",
    "created_at": "createdAt",
    "heartbeat_at": "heartbeatAt",
    "updated_at": "heartbeatAt",
    "job_type": "jobType",
    "summary": "summaryMetrics",
    "summary_metrics": "summaryMetrics",
    "description": "displayName",
    "username": "user",
}
_MAX_PATTERN = 200
_MAX_TEXT = 500
# Repeated groups and many repetitions can take for ever.
_COSTLY = re.compile(r"\)[*+?{]|\\\d")
_MAX_REPETITIONS = 3
_MISSING = object()


def matches(run: Mapping[str, Any], condition: Any) -> bool:
    """Return whether a run fulfils a filter in MongoDB's form.

    Args:
        run: Its fields; `config` and `summaryMetrics` are objects.
        condition: The filter.

    Raises:
        GraphqlError: The filter has something that is not known here.
    """
    if not isinstance(condition, dict):
        raise GraphqlError(f"A filter must be an object, but got {condition!r:.200}.")
    for name, wanted in condition.items():
        if name in ("$and", "$or", "$nor"):
            if not isinstance(wanted, list):
                raise GraphqlError(
                    f"`{name}` must have a list of filters, but got {wanted!r:.200}."
                )
            found = [matches(run, each) for each in wanted]
            is_fit = all(found) if name == "$and" else any(found) == (name == "$or")
        elif name == "$not":
            is_fit = not matches(run, wanted)
        else:
            is_fit = _fits(field_of(run, name), wanted)
        if not is_fit:
            return False
    return True


def field_of(run: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field such as `config.lr`; dots in names of metrics count too."""
    first, _, rest = name.partition(".")
    first = _NAMES.get(first, first)
    value = run.get(first, _MISSING)
    if first == "config":
        rest = rest.removesuffix(".value")
    while rest and isinstance(value, Mapping):
        if rest in value:
            return value[rest]
        part, _, rest = rest.partition(".")
        value = value.get(part, _MISSING)
    return _MISSING if rest else value


def _fits(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, dict) or not any(key.startswith("$") for key in wanted):
        return _is_equal(value, wanted)
    for name, operand in wanted.items():
        if name == "$not":
            is_fit = not _fits(value, operand)
        elif name in _OPERATORS:
            is_fit = _OPERATORS[name](value, operand)
        else:
            raise GraphqlError(
                f"A filter must have operators of {[*_OPERATORS]}, but has {name!r}."
            )
        if not is_fit:
            return False
    return True


def _is_equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, list) and not isinstance(wanted, list):
        return wanted in value
    if value is _MISSING:
        return wanted is None
    return bool(value == wanted)


def _compare(is_fit: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(value: Any, operand: Any) -> bool:
        kinds = ((int, float), str)
        is_alike = any(isinstance(value, kind) and isinstance(operand, kind) for kind in kinds)
        return is_alike and is_fit(value, operand)

    return compare


def _has_pattern(value: Any, pattern: Any) -> bool:
    text = str(pattern)
    repetitions = sum(map(text.count, "*+{"))
    if len(text) > _MAX_PATTERN or repetitions > _MAX_REPETITIONS or _COSTLY.search(text):
        raise GraphqlError(
            f"`$regex` must have at most {_MAX_PATTERN} characters, {_MAX_REPETITIONS} repetitions"
            f" and no repeated group, but got {text!r:.200}."
        )
    try:
        found = re.compile(text)
    except re.error as error:
        raise GraphqlError(f"`$regex` must be a regular expression: {error}.") from error
    values = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and found.search(each[:_MAX_TEXT]) for each in values)


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _is_equal,
    "$ne": lambda value, operand: not _is_equal(value, operand),
    "$in": lambda value, operand: any(_is_equal(value, each) for each in operand or ()),
    "$nin": lambda value, operand: not any(_is_equal(value, each) for each in operand or ()),
    "$gt": _compare(lambda value, operand: value > operand),
    "$gte": _compare(lambda value, operand: value >= operand),
    "$lt": _compare(lambda value, operand: value < operand),
    "$lte": _compare(lambda value, operand: value <= operand),
    "$exists": lambda value, operand: (value is not _MISSING) == bool(operand),
    "$regex": _has_pattern,
}


def chosen_runs(
    runs: Sequence[Mapping[str, Any]], filters: Any, order: Any
) -> list[Mapping[str, Any]]:
    """Return the runs that fulfil a filter, in an order such as `-summary_metrics.loss`."""
    try:
        condition = json.loads(filters or "{}")
    except (TypeError, ValueError) as error:
        raise GraphqlError(f"`filters` must be JSON, but got {filters!r:.200}.") from error
    found = [run for run in runs if matches(run, condition)]
    for name in reversed(str(order or "").split(",")):
        key = name.strip().lstrip("+-")
        if key:
            found.sort(key=lambda run: _rank(field_of(run, key)), reverse=name.startswith("-"))
    return found


def _rank(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 1, float(value), ""
    return (2, 0.0, value) if isinstance(value, str) else (0, 0.0, "")
