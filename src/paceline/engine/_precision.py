"""The number format of the forward pass."""

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch


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
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"`precision` must be one of {names}, but got {value!r}.") from None

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss."""
        if self is Precision.FP32:
            return nullcontext()
        dtype = torch.bfloat16 if self is Precision.BF16 else torch.float16
        return torch.autocast(device.type, dtype)

    def outside_autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context for the backward pass and the step, within that of `autocast`."""
        return (
            nullcontext() if self is Precision.FP32 else torch.autocast(device.type, enabled=False)
        )

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a gradient scaler if this precision needs one."""
        return torch.amp.GradScaler(device.type) if self is Precision.FP16 else None
