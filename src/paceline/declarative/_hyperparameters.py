"""Hyperparameters of a search in the place of fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.declarative._config_object import OptionContainer


def with_hyperparameters(configs: Any, hparams: Mapping[str, Any]) -> Any:
    """Return a copy of a config in which hyperparameters take the place of fields.

    A map changes the fields of a config object, and the entries of a dict, that it names.

    Args:
        configs: The config; it stays as it is.
        hparams: Values by field; a name with dots, such as `model_params.width`, leads into a map.

    Raises:
        ValueError: A hyperparameter is no field.
        TypeError: A value has the wrong type.
    """
    changed = dataclasses.replace(configs)
    for name, value in hparams.items():
        first, *rest = name.split(".")
        for part in reversed(rest):
            value = {part: value}
        current = getattr(changed, first, None)
        if isinstance(current, dict) and isinstance(value, Mapping):
            value = {**current, **value}
        elif isinstance(current, OptionContainer) and isinstance(value, Mapping):
            value = _with_fields(first, current, value)
        try:
            changed.load_dict({first: value} if _is_plain(value) else {})
        except ValueError as error:
            raise ValueError(f"The hyperparameter {name!r} must be a field: {error}") from error
        if not _is_plain(value):
            setattr(changed, first, value)
    return changed


def _with_fields(name: str, current: OptionContainer, value: Mapping[str, Any]) -> OptionContainer:
    known = current.values()
    if unknown := sorted(value.keys() - known.keys()):
        raise ValueError(
            f"The hyperparameter '{name}.{unknown[0]}' must be a field, but"
            f" {type(current).__name__} has only {', '.join(sorted(known))}."
        )
    return dataclasses.replace(current, **value)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (OptionContainer, dict))
