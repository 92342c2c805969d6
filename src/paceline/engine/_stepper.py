"""From a loss to an optimizer step: weighting, accumulation, reduction over ranks, precision."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from paceline.core import DistributedContext
from paceline.engine._overlap import OverlappedModel
from paceline.engine._precision import Precision
from paceline.engine._reduction import FlatReduction
from paceline.engine._signal import TravellingSignal
from paceline.engine._timing import StepTimer

ClipGrads = Callable[[Iterable[torch.nn.Parameter]], Any]
_Step = tuple[torch.optim.Optimizer, ClipGrads | None, Any]


class DataParallel(str, Enum):
    """How gradients are summed over the ranks.

    FLAT sums them in one buffer after the backward pass, in an order that never changes.
    OVERLAPPED sums them in buckets during the backward pass, which suits GPUs.
    """

    FLAT = "flat"
    OVERLAPPED = "overlapped"

    @classmethod
    def of(cls, value: "str | DataParallel") -> "DataParallel":
        """Return the member of a name.

        Raises:
            ValueError: There is none of this name.
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                f"`data_parallel` must be 'flat' or 'overlapped', but got {value!r}."
            ) from None


@dataclass(slots=True)
class Accumulation:
    """The present place within an aggregation window; set by the loop before each shard.

    A window is `frequency` global batches. The gradient of an optimizer step is the mean over all
    samples of the window (over all shards and ranks), so that accumulation equals the large
    batch; without `average` it is the sum of the batches' means.

    Attributes:
        frequency: Global batches per optimizer step.
        average: Whether gradients are averaged over the window.
        weight: What the present shard's loss counts.
        is_boundary: Whether this is the worker's last shard before an optimizer step.
        can_overlap: Whether every rank has a last shard in this window.
        num_steps: Optimizer steps since the start of training.
    """

    frequency: int = 1
    average: bool = True
    weight: float = 1.0
    is_boundary: bool = True
    can_overlap: bool = True
    num_steps: int = 0

    def is_window_end(self, batches: int) -> bool:
        """Tell whether the window ends with the batch that follows `batches` trained ones."""
        return (batches + 1) % self.frequency == 0


class Stepper:
    """The models and optimizers of a training, and how they step.

    Args:
        distributed: Where the ranks meet.
        device: The device of this rank.
        precision: The number format of the forward pass.
        data_parallel: How gradients are summed over the ranks.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        device: torch.device,
        precision: Precision = Precision.FP32,
        data_parallel: DataParallel = DataParallel.FLAT,
    ) -> None:
        self.device = device
        self.data_parallel = data_parallel
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.use_precision(precision)
        self.accumulation = Accumulation()
        self.signal = TravellingSignal(device)
        self.is_stop_requested = False
        self.timer = None
        self._distributed = distributed
        self._is_alone = distributed.size == 1
        self._reductions: dict[tuple[int, ...], tuple[FlatReduction, FlatReduction]] = {}
        self._has_told = False
        self._num_taken = 0
        self._steps: list[_Step] = []
        self._last_steps: list[_Step] = []

    def use_precision(self, precision: Precision) -> None:
        """Set the number format of the forward pass; for use before training."""
        self.precision = precision
        self.computes_in_fp32 = precision is Precision.FP32
        self.timer = None
        self.scaler: Any = precision.make_scaler(self.device)
        self.is_scaling_automatic = self.scaler is not None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss."""
        return self.precision.autocast(self.device)

    def add_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device and make it the same on all ranks.

        Returns:
            The model to call: the same one, or with OVERLAPPED a wrapper.
        """
        model.to(self.device)
        if self._distributed.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
            has_gradients = any(parameter.requires_grad for parameter in model.parameters())
            if self.data_parallel is DataParallel.OVERLAPPED and has_gradients:
                model = OverlappedModel(model, self.device)
        self.models.append(model)
        return model

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the gradients of an optimizer's parameters summed over the ranks."""
        self.optimizers.append(optimizer)

    def begin_shard(self) -> None:
        """Tell the models whether the backward pass of this shard sums gradients over ranks."""
        if self.data_parallel is DataParallel.OVERLAPPED:
            is_summed = self._is_overlapping()
            for model in self.models:
                if isinstance(model, OverlappedModel):
                    model.require_backward_grad_sync = is_summed

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of a shard's mean loss, weighted by its samples."""
        weight = self.accumulation.weight
        if weight != 1.0:
            loss = loss * weight
        if self.is_scaling_automatic:
            loss = self.scaler.scale(loss)
        if self.computes_in_fp32:
            loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]
            return
        with self.precision.outside_autocast(self.device):
            loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        scaler: Any = None,
    ) -> bool:
        """Step an optimizer if its gradients are complete; tell whether they were.

        Gradients are complete with the last shard of the last batch of an aggregation window.

        Args:
            optimizer: One of the optimizers.
            clip_grads: Called with the optimizer's parameters before the step.
            scaler: A gradient scaler that scaled the loss by hand.
        """
        if not self.accumulation.is_boundary:
            return False
        if self._is_alone and clip_grads is None and scaler is None and self._is_simple:
            # The simplest case costs as little as it can.
            self._num_taken += 1
            optimizer.step()
        else:
            self._take(optimizer, clip_grads, self.scaler if self.is_scaling_automatic else scaler)
        return True

    def step_without_data(self) -> None:
        """Take the steps that the other ranks take, on a rank without samples."""
        own = self.scaler if self.is_scaling_automatic else None
        if own is not None:
            # A scaler refuses to step before it has scaled something.
            own.scale(torch.zeros((), device=self.device))
        steps = self._last_steps or [(optimizer, None, own) for optimizer in self.optimizers]
        for optimizer, clip_grads, scaler in steps:
            self._take(optimizer, clip_grads, scaler)
            optimizer.zero_grad()

    def finish_batch(self) -> bool:
        """Forget the batch's steps; tell whether there were any."""
        if not self._num_taken:
            return False
        self._num_taken = 0
        self.accumulation.num_steps += 1
        if self._steps:
            self._last_steps, self._steps = self._steps, []
            self._has_told = False
        if self.is_scaling_automatic:
            self.scaler.update()
        return True

    @property
    def timer(self) -> StepTimer | None:
        """What measures the optimizer steps of the present batch, if it is to be timed."""
        return self._timer

    @timer.setter
    def timer(self, timer: StepTimer | None) -> None:
        self._timer = timer
        self._is_simple = timer is None and self.computes_in_fp32

    def _take(
        self, optimizer: torch.optim.Optimizer, clip_grads: ClipGrads | None, scaler: Any
    ) -> None:
        self._num_taken += 1
        self._steps.append((optimizer, clip_grads, scaler))
        timing = nullcontext() if self._timer is None else self._timer.measure("optimizer_step_s")
        with timing, self.precision.outside_autocast(self.device):
            if not self._is_alone:
                self._reduce(optimizer)
            if clip_grads is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                clip_grads(_parameters_of(optimizer))
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()

    def _reduce(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = _parameters_of(optimizer)
        # Layers may be frozen and groups added while training goes on.
        key = (id(optimizer), *(parameter.requires_grad for parameter in parameters))
        if key not in self._reductions:
            self._reductions[key] = self._make_reductions(parameters)
        all_gradients, those_outside = self._reductions[key]
        reduction = those_outside if self._is_overlapping() else all_gradients
        if self._has_told:
            reduction.reduce()
        else:
            # The first reduction of a step carries what the ranks tell each other.
            self._has_told = True
            self.signal.receive(reduction.reduce(self.signal.take()))

    def _make_reductions(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[FlatReduction, FlatReduction]:
        overlapped = {
            parameter
            for model in self.models
            if isinstance(model, OverlappedModel)
            for parameter in model.parameters()
        }
        outside = [parameter for parameter in parameters if parameter not in overlapped]
        return FlatReduction(parameters, self.device), FlatReduction(outside, self.device)

    def _is_overlapping(self) -> bool:
        accumulation = self.accumulation
        return (
            self.data_parallel is DataParallel.OVERLAPPED
            and accumulation.is_boundary
            and accumulation.can_overlap
        )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
