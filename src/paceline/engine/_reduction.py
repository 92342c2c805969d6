"""Gradients of all ranks, summed once per optimizer step in one flat buffer."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class FlatReduction:
    """Sum the gradients of some parameters over all ranks.

    All gradients of a device and dtype travel in one buffer in parameter order, so the order of
    additions does not depend on when gradients became ready. A parameter without a gradient
    counts as zero on this rank, and stays without one if no rank has any.

    Args:
        parameters: The parameters, in an order that is the same on all ranks.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def reduce(self, signal: float = 0.0, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Replace each gradient by its sum over all ranks.

        Args:
            signal: A number that travels along; the sum over ranks is returned.
            divisor: A count of this rank, as a 0-d tensor: gradients are divided by its sum over
                all ranks. None if they are weighted already.

        Returns:
            The sum of `signal`, a 0-d tensor on the gradients' device.
        """
        groups = self._grouped()
        total = torch.zeros(())
        for index, (key, parameters) in enumerate(groups.items()):
            flat = self._fill(key, parameters)
            tail = flat[-(len(parameters) + 2) :]
            tail[0] = signal if index == 0 else 0.0
            tail[1] = 0.0 if divisor is None else divisor
            dist.all_reduce(flat)
            if divisor is not None:
                flat[: -(len(parameters) + 2)] /= tail[1]
            self._spread(flat, tail, parameters)
            if index == 0:
                total = tail[0].clone()
        return total

    def _grouped(self) -> dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]]:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in self._parameters:
            groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return groups

    def _fill(
        self, key: tuple[torch.device, torch.dtype], parameters: Sequence[torch.nn.Parameter]
    ) -> torch.Tensor:
        size = sum(p.numel() for p in parameters) + len(parameters) + 2
        flat = self._buffers.get(key)
        if flat is None:
            flat = self._buffers[key] = torch.empty(size, device=key[0], dtype=key[1])
        offset = 0
        has_gradient = []
        for parameter in parameters:
            part = flat[offset : offset + parameter.numel()]
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.detach().reshape(-1))
            has_gradient.append(float(parameter.grad is not None))
            offset += parameter.numel()
        flat[offset + 2 :] = torch.tensor(has_gradient, dtype=key[1])
        return flat

    def _spread(
        self, flat: torch.Tensor, tail: torch.Tensor, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        offset = 0
        for index, parameter in enumerate(parameters):
            part = flat[offset : offset + parameter.numel()]
            offset += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif tail[2 + index] > 0:
                parameter.grad = part.view_as(parameter).clone()
