"""Data on its way to a device, and its length."""

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader as DataLoader

logger = logging.getLogger(__name__)

TorchData: TypeAlias = Any
"""A batch: a tensor, or a nested dictionary, list or tuple of tensors and other values."""


def to_device(data: TorchData, device: torch.device, warned: set[type] | None = None) -> TorchData:
    """Return `data` with every tensor on a device; NumPy arrays become tensors.

    What cannot be moved is returned as it is, with one warning per type.

    Args:
        data: Nested data.
        device: Where to move it.
        warned: The types that were warned of already; updated.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {key: to_device(value, device, warned) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, warned) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, warned) for value in data)
    if type(data).__module__ == "numpy" and hasattr(data, "dtype"):
        return torch.as_tensor(data).to(device, non_blocking=True)
    if hasattr(data, "to"):
        return data.to(device)
    if not isinstance(data, (str, int, float, bool, type(None))):
        seen = set() if warned is None else warned
        if type(data) not in seen:
            seen.add(type(data))
            logger.warning("Values of type %s stay where they are.", type(data).__name__)
    return data


def data_length(data: TorchData) -> int:
    """Return the number of samples of a batch: the length of its first leaf.

    Raises:
        ValueError: A container is empty.
        TypeError: The first leaf has no length; override `get_batch_length` then.
    """
    if isinstance(data, torch.Tensor):
        return int(data.shape[0]) if data.dim() else 1
    if isinstance(data, Mapping):
        if not data:
            raise ValueError("A batch must not be empty, but got an empty dictionary.")
        return data_length(next(iter(data.values())))
    if isinstance(data, (list, tuple)):
        if not data:
            raise ValueError("A batch must not be empty, but got an empty list.")
        first = data[0]
        is_container = isinstance(first, (torch.Tensor, Mapping, list, tuple))
        return data_length(first) if is_container or hasattr(first, "shape") else len(data)
    if hasattr(data, "shape") and len(data.shape):
        return int(data.shape[0])
    if hasattr(data, "__len__"):
        return len(data)
    raise TypeError(
        f"A batch of type {type(data).__name__} has no length. Hint: override"
        " `get_batch_length` in the trial."
    )
