"""Parameters whose gradients are summed together, and hooks on them."""

from collections.abc import Iterable
from typing import Any

import torch

from paceline.engine.parallel._flat_all_reduce import AllReduce, FlatReduction


class GradientGroup:
    """Parameters whose gradients are summed together."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        device: torch.device,
        all_reduce: AllReduce | None,
        *,
        is_overlapped: bool,
    ) -> None:
        self.parameters = parameters
        self.is_overlapped = is_overlapped
        self.is_sharded = False
        self.hooks: list[Any] = []
        self.is_hooked = False
        self.is_fired = False
        self.is_complete = False
        self._device = device
        self._all_reduce = all_reduce
        self._reductions: dict[tuple[bool, ...], FlatReduction] = {}

    def reduction(self) -> FlatReduction:
        """Return what sums the gradients of those parameters that are trained now."""
        # Layers may be frozen and thawed while training goes on.
        key = tuple(parameter.requires_grad for parameter in self.parameters)
        if key not in self._reductions:
            self._reductions[key] = FlatReduction(self.parameters, self._device, self._all_reduce)
        return self._reductions[key]


def call_after_gradient(parameter: torch.nn.Parameter, function: Any) -> Any:
    """Have a function called after each gradient of a parameter, frozen as it may be now.

    Returns:
        The hook, to be removed; None if the parameter can have no gradient.
    """
    is_trained = parameter.requires_grad
    if not is_trained and not parameter.is_floating_point():
        return None
    parameter.requires_grad_(True)
    hook: Any = parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)
    return hook


def scale_sharded(groups: Iterable[GradientGroup], factor: float) -> None:
    """Multiply the gradients of sharded parameters."""
    sharded = [group for group in groups if group.is_sharded]
    gradients = [p.grad for group in sharded for p in group.parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
