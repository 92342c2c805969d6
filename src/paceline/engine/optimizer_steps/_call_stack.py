"""Which code has made the present call, for messages and checks."""

import sys
from collections.abc import Iterable, Iterator
from types import FrameType

_SCALERS = "torch.amp.grad_scaler"


def calling_method() -> str:
    """Return the name of the innermost function on the stack that is neither torch's nor ours."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "paceline"):
            owner = frame.f_locals.get("self")
            prefix = "" if owner is None else f"{type(owner).__name__}."
            return f"`{prefix}{frame.f_code.co_name}`"
    return "A training"


def is_called_by_scaler() -> bool:
    """Tell whether a gradient scaler of torch is on the stack."""
    return any(frame.f_globals.get("__name__") == _SCALERS for frame in _frames())


def is_within_step_of(optimizers: Iterable[object]) -> bool:
    """Tell whether one of some optimizers is stepping, such as by another one within it."""
    known = {id(optimizer) for optimizer in optimizers}
    return any(id(frame.f_locals.get("self")) in known for frame in _frames())


def is_in_method(owner: object, name: str) -> bool:
    """Tell whether a method of an object is on the stack."""
    return any(
        frame.f_code.co_name == name and frame.f_locals.get("self") is owner for frame in _frames()
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
