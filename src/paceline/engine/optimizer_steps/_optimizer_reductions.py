"""Reductions that sum the gradients of each optimizer's parameters over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.parallel._flat_all_reduce import AllReduce, FlatReduction
from paceline.engine.parallel._overlapped_all_reduce import OverlappedAllReduce
from paceline.engine.tensors._optimizer_parameters import parameters_of
from paceline.engine.tensors._sharded_tensors import is_sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """The reductions of an optimizer, and what they were made for."""

    num_parameters: int
    summed: Sequence[torch.nn.Parameter]
    pattern: Sequence[bool]
    complete: FlatReduction
    outside: FlatReduction

    def is_of(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Tell whether they hold still: layers may be frozen, and groups added."""
        if len(parameters) != self.num_parameters:
            return False
        return [parameter.requires_grad for parameter in self.summed] == self.pattern


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
        self._known: dict[int, _Known] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[FlatReduction, FlatReduction]:
        """Return the reductions of all parameters, and of those outside overlapped models."""
        parameters = parameters_of(optimizer)
        known = self._known.get(id(optimizer))
        if known is None or not known.is_of(parameters):
            known = self._known[id(optimizer)] = self._make(parameters)
        return known.complete, known.outside

    def _make(self, parameters: Sequence[torch.nn.Parameter]) -> "_Known":
        summed = [p for p in parameters if self._is_summed(p)]
        overlapped = {
            parameter
            for model in self._models
            if isinstance(model, OverlappedAllReduce)
            for parameter in model.summed
        }
        outside = [parameter for parameter in summed if parameter not in overlapped]
        complete = FlatReduction(summed, self._device, self._all_reduce)
        is_all = len(outside) == len(summed)
        return _Known(
            num_parameters=len(parameters),
            summed=summed,
            pattern=[parameter.requires_grad for parameter in summed],
            complete=complete,
            outside=complete if is_all else FlatReduction(outside, self._device, self._all_reduce),
        )

    def _is_summed(self, parameter: torch.nn.Parameter) -> bool:
        return self._sums_gradients and (self._sums_sharded or not is_sharded(parameter))
