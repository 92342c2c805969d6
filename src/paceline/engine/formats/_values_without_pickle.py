"""Conversion of users' values to a form without pickle."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.formats._json_and_safetensors import (
    MAX_DEPTH,
    MAX_DIGITS,
    is_storable,
    is_too_large,
    kind_of,
)
from paceline.engine.parallel._overlapped_all_reduce import plain_model

_PICKLED = "paceline:pickled"


def packed_without_pickle(value: Any, *, allow_pickle: bool) -> Any:
    """Return a nested value with everything that has a `state_dict()` replaced by that.

    Args:
        value: What the user saves.
        allow_pickle: Whether what the safe format does not know is pickled.

    Raises:
        TypeError: Something is not known to the safe format; the message names its key.
    """
    return _packed(value, "", allow_pickle, 0)


def unpacked_without_pickle(value: Any) -> Any:
    """Return what `packed_without_pickle` was given, with states in place of what had them."""
    if isinstance(value, dict):
        if value.keys() == {_PICKLED}:
            import cloudpickle

            return cloudpickle.loads(value[_PICKLED].numpy().tobytes())
        return {key: unpacked_without_pickle(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(unpacked_without_pickle(item) for item in value)
    if isinstance(value, list):
        return [unpacked_without_pickle(item) for item in value]
    return value


def _packed(value: Any, path: str, allow_pickle: bool, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(
            f"`save_checkpoint` stores what is nested {MAX_DEPTH} deep at most, but"
            f" `state{path[:40]}...` is deeper, or holds itself. Hint: save a flat list of its"
            " parts."
        )
    below = depth + 1
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return _packed(_plain(value).state_dict(), path, allow_pickle, below)
    if isinstance(value, Mapping):
        if any(map(is_too_large, value)):
            raise TypeError(
                f"Keys of a state must be strings or integers of {MAX_DIGITS} digits at most, but"
                f" `state{path}` has a longer one. Hint: use a string."
            )
        return {k: _packed(v, f"{path}[{k!r}]", allow_pickle, below) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_packed(v, f"{path}[{i}]", allow_pickle, below) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if is_storable(value):
        # Training goes on while the checkpoint is written.
        return value.copy() if hasattr(value, "__array__") else value
    if allow_pickle:
        return {_PICKLED: _pickled(value, path)}
    raise TypeError(
        "`save_checkpoint` stores tensors, numbers, strings, booleans, None, lists, tuples,"
        " dictionaries, and what has a `state_dict()`, but"
        f" `state{path}` is {kind_of(value)}. Hint: save what it is made of, or pass"
        " `allow_pickle=True`."
    )


def _plain(value: Any) -> Any:
    """Return the module that the user made, whose state has names without a prefix."""
    if isinstance(value, DistributedDataParallel):
        return value.module
    return plain_model(value) if isinstance(value, torch.nn.Module) else value


def _pickled(value: Any, path: str) -> torch.Tensor:
    import cloudpickle

    buffer = io.BytesIO()
    try:
        cloudpickle.dump(value, buffer)  # type: ignore[no-untyped-call]
    except Exception as error:
        # Objects raise anything from their own methods of pickling.
        raise TypeError(
            f"`state{path}` cannot be pickled for `save_checkpoint`: {error}"
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
