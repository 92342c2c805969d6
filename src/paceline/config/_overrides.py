"""`--config a.b=value`: single fields set from the command line."""

from collections.abc import Sequence
from typing import Any

from paceline.config._config_problems import ConfigError, Problem
from paceline.config._read_yaml import parse_scalar

# A single value for one of these fields is a list of one.
_LIST_FIELDS = frozenset({("labels",), ("searcher", "bracket_rungs")})


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` in which each override `a.b=value` is set.

    A value that starts with `[`, `{` or a quote is YAML, one with a comma is a list of YAML
    scalars, and any other is one YAML scalar. Maps on the way are made when they are missing.

    Raises:
        ConfigError: an override has no `=`, an empty name, a value that is not YAML, or leads
            through a field that is not a map.
    """
    result = dict(data)
    problems: list[Problem] = []
    for override in overrides:
        try:
            _apply_override(result, override)
        except ConfigError as e:
            problems.extend(e.problems)
    if problems:
        raise ConfigError(problems)
    return result


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    names = tuple(dotted.strip().split("."))
    if not equals or not all(names):
        raise ConfigError(
            [
                Problem(
                    path="--config",
                    value=override,
                    message="must name a field and its value",
                    allowed="FIELD=VALUE, for example `searcher.max_trials=16`",
                )
            ]
        )
    value = _parse_value(text.strip(), f"--config {dotted}")
    if names in _LIST_FIELDS and value is not None and not isinstance(value, list):
        value = [value]
    *parents, last = names
    target = data
    for depth, name in enumerate(parents):
        child = target.get(name, {})
        child = {} if child is None else child
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            message = f"must be a map for `--config {override}` to apply"
            raise ConfigError([Problem(path=path, value=child, message=message)])
        # The caller's own map stays as it is.
        copied = dict(child)
        target[name] = copied
        target = copied
    target[last] = value


def _parse_value(text: str, name: str) -> Any:
    if not text.startswith(("[", "{", '"', "'")) and "," in text:
        return [parse_scalar(part.strip(), name=name) for part in text.split(",")]
    return parse_scalar(text, name=name)
