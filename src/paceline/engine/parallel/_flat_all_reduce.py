"""Gradients of all ranks, summed once per optimizer step in one flat buffer."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from paceline.engine.tensors._sharded_tensors import is_sharded, like_piece, local_part

# Behind the gradients: the travelling signal and the divisor, then one flag per parameter.
_NUM_EXTRAS = 2

AllReduce: TypeAlias = Callable[[torch.Tensor], object]
"""Replaces a tensor by its sum over all ranks."""


class FlatReduction:
    """Sum the gradients of some parameters over all ranks.

    All gradients of a device and dtype travel in one buffer in parameter order, so the order of
    additions does not depend on when gradients became ready. A parameter without a gradient
    counts as zero on this rank, and stays without one if no rank has any. Of a parameter that a
    tensor-parallel plan divides, this rank's piece travels.

    Args:
        parameters: The parameters, in an order that is the same on all ranks.
        device: Where the signal travels if there are no parameters.
        all_reduce: What sums a buffer; the default process group by default.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        device: torch.device,
        all_reduce: AllReduce | None = None,
    ) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                key = (parameter.device, parameter.dtype)
                groups.setdefault(key, []).append(parameter)
        # Then there are no gradients to sum.
        self.is_empty = not groups
        if not groups:
            groups[(device, torch.float32)] = []
        all_reduce = all_reduce or dist.all_reduce
        self._buffers = [_FlatBuffer(*key, members, all_reduce) for key, members in groups.items()]

    def reduce(self, signal: float = 0.0, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Replace each gradient by its sum over all ranks; the host does not wait for a device.

        Args:
            signal: A number that travels along; the sum over ranks is returned.
            divisor: A count of this rank, as a 0-d tensor: gradients are divided by its sum over
                all ranks. None if they are weighted already.

        Returns:
            The sum of `signal`, a 0-d tensor on the gradients' device.
        """
        totals = [buffer.reduce(signal, divisor) for buffer in self._buffers]
        return totals[0]


class _FlatBuffer:
    """The gradients of one device and dtype."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        parameters: Sequence[torch.nn.Parameter],
        all_reduce: AllReduce,
    ) -> None:
        self._all_reduce = all_reduce
        self._is_divided = any(map(is_sharded, parameters))
        locals_ = [local_part(parameter) for parameter in parameters]
        sizes = [local.numel() for local in locals_]
        num_values = sum(sizes)
        self._parameters = parameters
        self._flat = torch.zeros(
            num_values + _NUM_EXTRAS + len(parameters), device=device, dtype=dtype
        )
        self._gradients = self._flat[:num_values]
        self._signal = self._flat[num_values]
        self._divisor = self._flat[num_values + 1]
        self._flags = self._flat[num_values + _NUM_EXTRAS :]
        pieces = torch.split(self._gradients, sizes) if sizes else ()
        self._views = [
            piece.view(local.shape) for piece, local in zip(pieces, locals_, strict=True)
        ]
        self._present: list[bool] = []
        self._own_flags = torch.zeros_like(self._flags)

    def reduce(self, signal: float, divisor: torch.Tensor | None) -> torch.Tensor:
        present = [parameter.grad is not None for parameter in self._parameters]
        views = self._views
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._is_divided:
            gradients = [*map(local_part, gradients)]
        if len(gradients) < len(views):
            self._gradients.zero_()
            views = [view for view, has in zip(views, present, strict=True) if has]
        if gradients:
            torch._foreach_copy_(views, [gradient.detach() for gradient in gradients])
        if present != self._present:
            self._present = present
            self._own_flags.copy_(torch.tensor(present, dtype=self._flat.dtype))
        self._flags.copy_(self._own_flags)
        self._signal.fill_(signal)
        if divisor is None:
            self._divisor.zero_()
        else:
            self._divisor.copy_(divisor)
        self._all_reduce(self._flat)
        if divisor is not None:
            self._gradients /= self._divisor
        if gradients:
            torch._foreach_copy_(gradients, views)
        if len(gradients) < len(self._views):
            self._give_missing(present)
        return self._signal

    def _give_missing(self, present: Sequence[bool]) -> None:
        """Give a gradient to the parameters for which only other ranks have one."""
        # Complex numbers know no order.
        anywhere = (self._flags != 0).tolist()
        for index, parameter in enumerate(self._parameters):
            if anywhere[index] and not present[index]:
                parameter.grad = like_piece(self._views[index].clone(), parameter)
