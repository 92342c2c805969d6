"""Precision of forward passes, and their outputs in single precision."""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch

from paceline._base.arguments_and_errors import one_of


class Precision(str, Enum):
    """Number format of the forward pass; parameters and optimizers keep their own.

    FP32 changes nothing. BF16 and FP16 run it under torch's autocast, FP16 with gradient scaling.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def of(cls, value: "str | Precision") -> "Precision":
        """Return the precision of a name.

        Raises:
            ValueError: There is none of this name.
        """
        return cls(one_of(*(member.value for member in cls))("precision", value))

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss."""
        if self is Precision.FP32:
            return nullcontext()
        dtype = torch.bfloat16 if self is Precision.BF16 else torch.float16
        return torch.autocast(device.type, dtype)

    def outside_autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context for the backward pass and the step, nested in `autocast`'s."""
        return nullcontext() if self is Precision.FP32 else _OutsideAutocast(device.type)

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a gradient scaler for FP16; None for other precisions."""
        return torch.amp.GradScaler(device.type) if self is Precision.FP16 else None


class _OutsideAutocast(AbstractContextManager[None]):
    """As `torch.autocast(device_type, enabled=False)`, at a third of its cost to each step.

    That looks up and sets four properties of autocast besides, which stay as they are here.
    """

    __slots__ = ("_device_type", "_was_enabled")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._was_enabled = False

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self._device_type, self._was_enabled)


def compute_in(model: torch.nn.Module, precision: Precision, device: torch.device) -> None:
    """Make a model's forward pass run in a precision, with its outputs in single precision."""
    forward: Any = _InPrecision(model.forward, precision, device)
    model.forward = forward


class _InPrecision:
    """Wrapper of a forward pass: runs in another number format, returns single precision."""

    def __init__(self, forward: Any, precision: Precision, device: torch.device) -> None:
        self._forward = forward
        self._precision = precision
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.autocast(self._device):
            return _in_single_precision(self._forward(*args, **kwargs))

    def __reduce__(self) -> Any:
        # A model that is returned, copied or saved as a whole is the user's own again.
        return unwrapped_forward, (self._forward,)


def unwrapped_forward(forward: Any) -> Any:
    """Return the forward method itself, when a pickled model is loaded."""
    return forward


def _in_single_precision(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_half = value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if is_half else value
    if isinstance(value, Mapping):
        # Models return mappings with attributes, which a plain dictionary would not have.
        converted = copy.copy(value)
        for key, item in value.items():
            converted[key] = _in_single_precision(item)  # type: ignore[index]  # outputs are
        return converted
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_in_single_precision, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_in_single_precision, value))
    return value
