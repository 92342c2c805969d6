"""Gradients of a user's own loop: averaged over all samples of all ranks after each backward pass.

A hook on each parameter notices a backward pass; when that ends, the gradients are summed over the
ranks in one flat buffer, so that whatever the loop does with them next (clipping, scaling, the
optimizer's step) finds the same numbers on every rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paceline.engine._overlap import OverlappedModel
from paceline.engine._reduction import FlatReduction


class GradientSync:
    """The prepared models of a rank, and what their gradients count at the moment.

    Args:
        world_size: The number of ranks.
        device: The rank's device.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.models: list[torch.nn.Module] = []
        self.num_backwards = 0
        self.frequency = 1
        self.is_boundary = True
        self.has_open_gradients = False
        self.has_optimizer = False
        self._world_size = world_size
        self._device = device
        self._groups: list[_Group] = []
        self._watched: set[int] = set()
        self._is_queued = False
        self._is_fed = False
        self._is_paused = False
        self._weight = 1 / world_size
        self._window = _Window()

    def add_model(self, model: torch.nn.Module) -> None:
        """Make a model the same on all ranks and have its gradients summed."""
        if self._world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        self.models.append(model)
        self.watch(model.parameters())

    def overlap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a wrapper that sums a model's gradients while the backward pass still runs."""
        if self._world_size == 1 or not any(p.requires_grad for p in model.parameters()):
            self.add_model(model)
            return model
        self.models.append(model)
        self._watched.update(map(id, model.parameters()))
        return OverlappedModel(model, self._device, self._weight_in_backward)

    def _weight_in_backward(self) -> float:
        self.num_backwards += 1
        return self._weight

    def watch(
        self, parameters: Iterable[torch.nn.Parameter], *, is_overlapped: bool = False
    ) -> None:
        """Have the gradients of those parameters summed that are not yet.

        Args:
            parameters: The parameters.
            is_overlapped: Whether their model itself can sum them while the backward pass runs.
        """
        new = [p for p in parameters if id(p) not in self._watched]
        self._watched.update(map(id, new))
        if new:
            group = _Group(new, self._device, is_overlapped=is_overlapped)
            self._groups.append(group)
            if self._world_size > 1 or self.frequency > 1:
                self._hook(group)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch an optimizer's parameters, and give it the loss of all ranks where it asks."""
        for group in optimizer.param_groups:
            self.watch(group["params"])
        if self._world_size > 1:
            optimizer.register_step_pre_hook(
                lambda _, args, kwargs: self.with_shared_loss(args, kwargs)
            )

    def release(self) -> None:
        """Watch no parameter any more."""
        for group in self._groups:
            for hook in group.hooks:
                hook.remove()
        self._groups.clear()
        self._watched.clear()

    def accumulate(self, frequency: int) -> None:
        """Complete gradients once in so many batches only."""
        self.frequency = frequency
        for group in self._groups:
            if not group.is_hooked:
                self._hook(group)

    def _hook(self, group: "_Group") -> None:
        group.is_hooked = True
        for parameter in group.parameters:
            hook = _call_after_gradient(parameter, lambda _: self._notice(group))
            if hook is not None:
                group.hooks.append(hook)

    # ---- told by loaders -----------------------------------------------------------------

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool) -> None:
        """Tell how many samples the gradients of the next backward passes come from."""
        self._is_fed = True
        if self.frequency == 1:
            self._weight = num_own / num_all
            return
        window = self._window
        if self.is_boundary:
            window.clear()
            self.has_open_gradients = False
        elif window.num_own != num_own:
            # What counts otherwise must not be added to the gradients of this batch.
            window.carry(self._parameters())
        window.num_own = num_own
        window.num_all += num_all
        window.num_batches += 1
        self.is_boundary = is_last or window.num_batches == self.frequency
        self._weight = num_own / window.num_all
        for group in self._groups:
            group.is_complete = False

    def end_data(self) -> None:
        """Tell that the next gradients come from no loader."""
        self._is_fed = False
        self._weight = 1 / (self._world_size * self.frequency)
        self._window.clear()
        self.is_boundary = True
        self.has_open_gradients = False

    # ---- accumulated steps in checkpoints ------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the gradients within an accumulated step, or None outside of one."""
        if not self.has_open_gradients or self.is_boundary:
            return None
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        return {"gradients": gradients, "window": self._window.state(parameters)}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Put back what `state` returned."""
        if state is None:
            return
        parameters = self._parameters()
        for parameter, gradient in zip(parameters, state["gradients"], strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self._window.load_state(state["window"], parameters)
        self.is_boundary = False
        self.has_open_gradients = True
        self._is_fed = state["window"]["num_all"] > 0

    # ---- during the backward pass --------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the gradients of backward passes within this context to each rank."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _notice(self, group: "_Group") -> None:
        if self._is_paused:
            return
        group.is_fired = True
        if not self._is_queued:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._is_queued = False
        if self.frequency > 1 and not self.has_optimizer:
            raise RuntimeError(
                "With `gradient_accumulation` above 1 the optimizer must be prepared, as it has to"
                " wait. Hint: optimizer = train.prepare_optimizer(optimizer)."
            )
        self.num_backwards += 1
        self.has_open_gradients = True
        if self.frequency > 1 and not self._is_fed:
            self._count_backward()
        if self.is_boundary:
            for group in self._groups:
                if group.is_fired:
                    group.is_fired = False
                    self._complete(group)

    def _count_backward(self) -> None:
        """Take a backward pass for a batch, as no loader tells of those."""
        if self.is_boundary:
            self._window.clear()
        self._window.num_batches += 1
        self.is_boundary = self._window.num_batches == self.frequency
        self._weight = 1 / (self._world_size * self.frequency)
        for group in self._groups:
            group.is_complete = False

    def _complete(self, group: "_Group") -> None:
        if self.frequency > 1 and group.is_complete:
            raise RuntimeError(
                "With `gradient_accumulation` above 1 each batch must have one backward pass, but"
                " this is the second one of this batch. Hint: add the losses up first."
            )
        group.is_complete = True
        gradients = [p.grad for p in group.parameters if p.grad is not None]
        if self._weight != 1.0 and gradients:
            torch._foreach_mul_(gradients, self._weight)
        self._window.give_back(group.parameters)
        if self._world_size > 1:
            group.reduction().reduce()

    # ---- closures ------------------------------------------------------------------------

    def with_shared_loss(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an optimizer's step, with a closure that returns all ranks' loss.

        What steps by a closure, such as LBFGS, decides by the loss how often to call it, which must
        be equally often on all ranks.

        Args:
            args: The positional arguments, the optimizer first.
            kwargs: The others.
        """
        by_name = "closure" in kwargs
        closure = kwargs["closure"] if by_name else args[1] if len(args) > 1 else None
        if not callable(closure):
            return args, kwargs

        def shared() -> Any:
            loss = closure()
            return self._mean_loss(torch.as_tensor(loss)) if loss is not None else None

        if by_name:
            return args, {**kwargs, "closure": shared}
        return (args[0], shared, *args[2:]), kwargs

    def _mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        mean = (loss.detach() * self._weight).double()
        dist.all_reduce(mean)
        return mean.to(loss.dtype)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._groups for parameter in group.parameters]


def shared_out(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return what a rank goes on with within an accumulated step that other ranks began.

    The chief takes over what all of them have accumulated; the others begin with nothing.

    Args:
        states: What `GradientSync.state` returned on each rank.
        rank: The rank.
        world_size: The number of ranks now.
    """
    window = states[0]["window"]
    num_parameters = len(states[0]["gradients"])
    nothing: list[torch.Tensor | None] = [None] * num_parameters
    if rank > 0:
        return {"gradients": nothing, "window": {**window, "num_own": 0, "carried": nothing}}
    is_fed = window["num_all"] > 0
    totals = [_total(states, index, is_fed=is_fed) for index in range(num_parameters)]
    if is_fed:
        return {"gradients": nothing, "window": {**window, "num_own": 0, "carried": totals}}
    # Backward passes without a loader count equally on all ranks.
    ratio = world_size / len(states)
    gradients = [None if total is None else total * ratio for total in totals]
    return {"gradients": gradients, "window": window}


def _total(states: Sequence[dict[str, Any]], index: int, *, is_fed: bool) -> torch.Tensor | None:
    """Return the sum of one parameter's gradients over all ranks, weighted by their samples."""
    parts = []
    for state in states:
        gradient, carried = state["gradients"][index], state["window"]["carried"][index]
        if gradient is not None:
            parts.append(gradient * state["window"]["num_own"] if is_fed else gradient)
        if carried is not None:
            parts.append(carried)
    return torch.stack(parts).sum(0) if parts else None


class _Group:
    """Parameters whose gradients are summed together."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], device: torch.device, *, is_overlapped: bool
    ) -> None:
        self.parameters = parameters
        self.is_overlapped = is_overlapped
        self.hooks: list[Any] = []
        self.is_hooked = False
        self.is_fired = False
        self.is_complete = False
        self._device = device
        self._reductions: dict[tuple[bool, ...], FlatReduction] = {}

    def reduction(self) -> FlatReduction:
        """Return what sums the gradients of those parameters that are trained now."""
        # Layers may be frozen and thawed while training goes on.
        key = tuple(parameter.requires_grad for parameter in self.parameters)
        if key not in self._reductions:
            self._reductions[key] = FlatReduction(self.parameters, self._device)
        return self._reductions[key]


class _Window:
    """The batches of one accumulated step so far.

    Gradients of batches with equally many samples add up by themselves; the sums of those with
    other numbers are carried beside them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_batches = 0
        self.num_own = 0
        self.num_all = 0
        self._carried: dict[torch.nn.Parameter, torch.Tensor] = {}

    def carry(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take the gradients so far aside, weighted by their samples."""
        for parameter in parameters:
            if parameter.grad is not None:
                weighted = parameter.grad * self.num_own
                known = self._carried.get(parameter)
                self._carried[parameter] = weighted if known is None else known + weighted
                parameter.grad = None

    def give_back(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add what was taken aside to the gradients, which are averaged already."""
        for parameter in parameters if self._carried else ():
            carried = self._carried.pop(parameter, None)
            if carried is not None:
                mean = carried / self.num_all
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def state(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        return {
            "num_batches": self.num_batches,
            "num_own": self.num_own,
            "num_all": self.num_all,
            "carried": [self._carried.get(parameter) for parameter in parameters],
        }

    def load_state(self, state: dict[str, Any], parameters: Sequence[torch.nn.Parameter]) -> None:
        self.num_batches, self.num_own = state["num_batches"], state["num_own"]
        self.num_all = state["num_all"]
        self._carried = {
            parameter: value.to(parameter.device)
            for parameter, value in zip(parameters, state["carried"], strict=True)
            if value is not None
        }


def _call_after_gradient(parameter: torch.nn.Parameter, function: Any) -> Any:
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
