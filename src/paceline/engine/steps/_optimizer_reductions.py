"""Reductions that sum the gradients of each optimizer's parameters over the ranks."""

from collections.abc import Sequence

import torch

from paceline.engine.parallel._flat_all_reduce import AllReduce, FlatReduction
from paceline.engine.parallel._overlapped_all_reduce import OverlappedModel
from paceline.engine.tensors._optimizer_parameters import parameters_of
from paceline.engine.tensors._sharded_tensors import is_sharded


class OptimizerReductions:
    """The reductions of optimizers, made when they are needed.

    Args:
        device: The device of this rank.
        all_reduce: Sums a tensor over the ranks; None for that of torch.
        models: The models of the training, which may still come.
        sums_gradients: Whether the ranks have gradients to sum.
        sums_sharded: Whether those of sharded parameters are summed here. FSDP sums them in the
            backward pass.
    """

    def __init__(
        self,
        device: torch.device,
        all_reduce: AllReduce | None,
        models: Sequence[torch.nn.Module],
        *,
        sums_gradients: bool,
        sums_sharded: bool,
    ) -> None:
        self._device = device
        self._all_reduce = all_reduce
        self._models = models
        self._sums_gradients = sums_gradients
        self._sums_sharded = sums_sharded
        self._known: dict[int, tuple[tuple[bool, ...], FlatReduction, FlatReduction]] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[FlatReduction, FlatReduction]:
        """Return the reductions of all parameters, and of those outside overlapped models."""
        parameters = parameters_of(optimizer)
        # Layers may be frozen and groups added while training goes on.
        pattern = tuple(parameter.requires_grad for parameter in parameters)
        known = self._known.get(id(optimizer))
        if known is None or known[0] != pattern:
            known = (pattern, *self._make(parameters))
            self._known[id(optimizer)] = known
        return known[1], known[2]

    def _make(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[FlatReduction, FlatReduction]:
        summed = [p for p in parameters if self._is_summed(p)]
        overlapped = {
            parameter
            for model in self._models
            if isinstance(model, OverlappedModel)
            for parameter in model.parameters()
        }
        outside = [parameter for parameter in summed if parameter not in overlapped]
        complete = FlatReduction(summed, self._device, self._all_reduce)
        if len(outside) == len(summed):
            return complete, complete
        return complete, FlatReduction(outside, self._device, self._all_reduce)

    def _is_summed(self, parameter: torch.nn.Parameter) -> bool:
        return self._sums_gradients and (self._sums_sharded or not is_sharded(parameter))
