"""Clipping gradients by their norm, whatever ranks divide the parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.engine.tensors._sharded_tensors import is_sharded


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm is `max_norm` at most, in place.

    It does what torch's function of this name does, which refuses tensors that are divided over
    different ranks, and divided ones together with others. All ranks call it.

    Args:
        parameters: The parameters, divided or not; a gradient counts once, however many ranks hold
            it.
        max_norm: The largest norm.
        norm_type: The order of the norm, `inf` for the largest value.
        error_if_nonfinite: Whether a norm that is NaN or infinite is an error.

    Returns:
        The norm of all gradients before, a 0-d tensor.

    Raises:
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in given:
        gradient: Any = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if is_sharded(gradient) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_norm(members, norm_type) for members in by_mesh.values()]
    # One alone is torch's, to the last bit.
    total = norms[0] if len(norms) == 1 else torch.zeros(())
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients must be finite, but is {total.item()}."
            " Hint: error_if_nonfinite=False scales by it all the same."
        )
    for members in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def _norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of the gradients of parameters that the same ranks divide."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
    whole: torch.Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return whole


def clipping(norm: float | None, value: float | None) -> Callable[[Any], Any]:
    """Return what clips the gradients of a step.

    Args:
        norm: The largest norm of all of them; None for any.
        value: The largest absolute value in them; None for any.
    """

    def clip(parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        if value is not None:
            # torch clips divided gradients together with others one by one only.
            kinds = {type(each.grad) for each in parameters if each.grad is not None}
            foreach = None if len(kinds) <= 1 else False
            nn.utils.clip_grad_value_(parameters, value, foreach=foreach)
        if norm is not None:
            clip_grad_norm_(parameters, norm)

    return clip
