"""What `Trainer.run(dataset=...)` was given: one data set, or several."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from paceline.data import Dataset, Fold, read
from paceline.workers import RayShards, is_ray_dataset


def is_data_set(value: Any) -> bool:
    """Tell whether a value can only be a data set, and no sample."""
    if isinstance(value, (Dataset, RayShards)) or is_ray_dataset(value):
        return True
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.Dataset)


def is_pair(value: Any) -> bool:
    """Tell whether a value is what to train on and what to validate on."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_data_set, value))


def is_several(value: Any) -> bool:
    """Tell whether a value is several data sets; a sequence of samples is one."""
    if isinstance(value, Mapping):
        return True
    is_sequence = isinstance(value, (list, tuple)) and len(value) > 0
    return is_sequence and all(is_data_set(each) or is_pair(each) for each in value)


def is_made(value: Any) -> bool:
    """Tell whether a value is a function that makes data sets."""
    return callable(value) and not is_data_set(value) and not hasattr(value, "__getitem__")


def made_dataset(function: Any, config: dict[str, Any] | None) -> Any:
    """Return what a function of the config, or of nothing, makes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # What is written in C has no signature.
        return function()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    if positional and (positional[0].default is inspect.Parameter.empty):
        return function(config or {})
    return function()


def given_dataset(data: Any, name: str = "dataset") -> Any:
    """Return data with what lies at paths and URLs in place of these.

    Raises:
        TypeError: One is bytes.
        ValueError: A dictionary is empty, or one of several has no samples.
        DataError: See `paceline.data.read`.
    """
    if isinstance(data, bytes):
        raise TypeError(f"`{name}` must be a data set, a path or a URL, but got bytes.")
    if isinstance(data, (str, PathLike)):
        return read(data)
    if isinstance(data, Mapping):
        if not data:
            raise ValueError(f"`{name}` must have a data set for each name, but got {data!r}.")
        return {key: given_dataset(each, f"{name}[{key!r}]") for key, each in data.items()}
    for path, each in _parts_of_dataset(data, name) if is_several(data) else ():
        if _is_empty(each):
            raise ValueError(
                f"Each of several data sets must have samples, but `{path}` has none. Hint: fewer"
                " folds."
            )
    return data


def _parts_of_dataset(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the data sets of several, with the text that leads to each."""
    names = data._fields if isinstance(data, Fold) else range(len(data))
    for key, each in zip(names, data, strict=True):
        path = f"{name}.{key}" if isinstance(data, Fold) else f"{name}[{key}]"
        if is_pair(each):
            yield from _parts_of_dataset(each, path)
        else:
            yield path, each


def _is_empty(data: Any) -> bool:
    try:
        return len(data) == 0
    except (AttributeError, TypeError):
        # A stream, or a data set of Ray.
        return False
