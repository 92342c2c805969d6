"""Closures of optimizers such as LBFGS, which return the loss of all ranks."""

from collections.abc import Callable
from typing import Any

import torch


def with_mean_loss(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mean_loss: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an optimizer's step, with a closure that returns the mean loss.

    An optimizer with a closure decides by the loss how often to call it, and all ranks must call it
    equally often.

    Args:
        args: The positional arguments, the optimizer first.
        kwargs: The others.
        mean_loss: Returns the mean over all ranks of a rank's loss.
    """
    by_name = "closure" in kwargs
    closure = kwargs["closure"] if by_name else args[1] if len(args) > 1 else None
    if not callable(closure):
        return args, kwargs

    def shared() -> Any:
        loss = closure()
        return mean_loss(torch.as_tensor(loss)) if loss is not None else None

    if by_name:
        return args, {**kwargs, "closure": shared}
    return (args[0], shared, *args[2:]), kwargs
