"""Data on its way to a device, and its length; device memory between trainings."""

import copy
import gc
import inspect
import logging
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence

logger = logging.getLogger(__name__)

TorchData: TypeAlias = Any
"""A batch: a tensor, or a nested dictionary, list or tuple of tensors and other values."""

_LEFT_ALONE = (str, bytes, int, float, complex, type(None))


def to_device(data: TorchData, device: torch.device, warned: set[type] | None = None) -> TorchData:
    """Return `data` with every tensor on a device; NumPy arrays become tensors.

    Containers keep their type, and values with a `to` method of their own move themselves.
    Other values are returned unchanged, with one warning per type.

    Args:
        data: Nested data.
        device: Where to move it.
        warned: The types that were warned of already; updated.
    """
    kind: Any = type(data)
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if kind is list or kind is tuple:
        values = [to_device(value, device, warned) for value in data]
        return values if kind is list else tuple(values)
    # Looked up in the type, as a dictionary's attributes may be its values.
    if hasattr(kind, "to"):
        return data.to(device, non_blocking=True) if _can_move_on(kind) else data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, warned) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, warned) for value in data)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, warned) for key, value in data.items()}
        return moved if type(data) is dict else _like(data, moved)
    if _is_numeric_array(data):
        return to_device(torch.as_tensor(data), device)
    if not isinstance(data, _LEFT_ALONE):
        seen = set() if warned is None else warned
        if type(data) not in seen:
            seen.add(type(data))
            logger.warning(
                "Values of type %s stay where they are. Hint: give the type a method"
                " `to(device)` that returns it moved.",
                type(data).__name__,
            )
    return data


def mover_to(device: torch.device, warned: set[type] | None = None) -> Callable[[Any], Any]:
    """Return `to_device` bound to a device, with a fast path for data already there."""
    if device.type != "cpu":

        def move_on(data: Any) -> Any:
            # Fast path for lists of tensors, the output of torch's collate: runs in every step.
            if type(data) is list:
                for value in data:
                    if type(value) is not torch.Tensor:
                        break
                else:
                    return [value.to(device, non_blocking=True) for value in data]
            return to_device(data, device, warned)

        return move_on

    def move(data: Any) -> Any:
        # Fast path for lists of CPU tensors, the output of torch's collate: runs in every step.
        kind = type(data)
        if kind is list or kind is tuple:
            for value in data:
                if type(value) is not torch.Tensor or not value.is_cpu:
                    break
            else:
                return data
        return to_device(data, device, warned)

    return move


def release_device_memory() -> None:
    """Free GPU memory of earlier trainings in this process, held by reference cycles alone.

    Torch's schedulers make such cycles. Python looks for cycles after it has made many objects,
    and does not know how full a GPU is.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        gc.collect()


def data_length(data: TorchData) -> int:
    """Return the number of samples of a batch: the length of the first leaf other than None.

    Raises:
        ValueError: A container is empty.
        TypeError: The first leaf has no length; override `get_batch_length` then.
    """
    if isinstance(data, PackedSequence):
        return int(data.batch_sizes[0])
    if isinstance(data, (Mapping, list, tuple)):
        values = data.values() if isinstance(data, Mapping) else data
        if not len(data):
            raise ValueError(f"A batch must not be empty, but got an empty {type(data).__name__}.")
        first = next((value for value in values if value is not None), None)
        is_sample = not isinstance(data, Mapping) and _is_single(first)
        return len(data) if is_sample else data_length(first)
    shape = getattr(data, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    if hasattr(data, "__len__") and not isinstance(data, (str, bytes)):
        return len(data)
    raise TypeError(
        f"A batch of type {type(data).__name__} has no length. Hint: override"
        " `get_batch_length` in the trial."
    )


@lru_cache(maxsize=64)
def _can_move_on(kind: Hashable) -> bool:
    """Return whether a type's own `to` can leave the copy to the device, as a tensor's can."""
    # The method takes any arguments, and passes them to the tensors.
    if kind is PackedSequence:
        return True
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False


def _is_single(value: Any) -> bool:
    """Return whether a list element is a single sample of the list, not a container."""
    is_container = isinstance(value, (Mapping, list, tuple)) or hasattr(value, "shape")
    return not is_container


def _is_numeric_array(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return type(value).__module__ == "numpy" and getattr(dtype, "kind", "O") in "biufc"


def _like(data: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return the moved values in a copy of the mapping, or as a plain dict if immutable."""
    if not isinstance(data, MutableMapping):
        return moved
    same = copy.copy(data)
    same.update(moved)
    return same
