"""Gradients of an accumulated step on one rank: weights of losses, the open window, clipping.

Also: closures.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline._training.engine.checkpoints.stored_tensors import StoredTensor
from paceline._training.engine.schedules import Position
from paceline._training.engine.tensors import is_sharded, local_part
from paceline.data._order_and_random_generators import EpochOrder

State = dict[str, Any]


def share_out_window(
    states: Sequence[State],
    rank: int,
    world_size: int,
    *,
    is_sharded: Sequence[bool],
    frequency: int,
) -> State:
    """Return a rank's share of an accumulated step begun by another group of ranks.

    The chief takes over what all of them have accumulated; the others begin with nothing. Of
    parameters that are sharded now, each rank takes its piece.

    Args:
        states: What `GradientSync.state` returned on each rank.
        rank: The rank.
        world_size: The number of ranks now.
        is_sharded: For each parameter whether it is sharded now.
        frequency: The batches of a step.
    """
    window, own = states[0]["window"], states[rank] if len(states) == world_size else None
    is_fed = window["num_all"] > 0
    # Divisors: of the stored sharded gradients, already means, and of the other gradients now.
    stored_divisor = window["num_all"] if is_fed else len(states) * frequency
    divisor = window["num_all"] if is_fed else world_size * frequency
    gradients: list[Any] = [None] * len(is_sharded)
    carried: list[Any] = [None] * len(is_sharded)
    for index, becomes_sharded in enumerate(is_sharded):
        stored = states[0]["gradients"][index]
        was_sharded = isinstance(stored, StoredTensor)
        if becomes_sharded:
            total = None if was_sharded else _window_total(states, index, is_fed=is_fed)
            gradients[index] = stored if total is None else total / stored_divisor
        elif own is not None and not was_sharded:
            gradients[index] = own["gradients"][index]
            carried[index] = own["window"]["carried"][index]
        elif rank == 0:
            total = stored.whole() if was_sharded else _window_total(states, index, is_fed=is_fed)
            if total is not None and (was_sharded or not is_fed):
                # Backward passes without a loader count equally on all ranks.
                total = total * (divisor if was_sharded else world_size / len(states))
            (carried if is_fed else gradients)[index] = total
    num_own = 0 if own is None else own["window"]["num_own"]
    return {"gradients": gradients, "window": {**window, "num_own": num_own, "carried": carried}}


def has_stored_tensors(state: State) -> bool:
    """Return whether a rank's state has gradients of formerly sharded parameters."""
    return any(isinstance(gradient, StoredTensor) for gradient in state["gradients"])


def _window_total(states: Sequence[State], index: int, *, is_fed: bool) -> torch.Tensor | None:
    """Return a parameter's gradient summed over all ranks, weighted by their samples."""
    parts = []
    for state in states:
        gradient, carried = state["gradients"][index], state["window"]["carried"][index]
        if gradient is not None:
            parts.append(gradient * state["window"]["num_own"] if is_fed else gradient)
        if carried is not None:
            parts.append(carried)
    return torch.stack(parts).sum(0) if parts else None


class AccumulatedWindow:
    """Batches of an accumulated step so far, with gradients set aside for weighting.

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
        """Add the gradients set aside to the already averaged gradients."""
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


@dataclass(slots=True)
class Accumulation:
    """The present place within an aggregation window; set by the loop before each shard.

    A window is `frequency` global batches. The gradient of an optimizer step is the mean over all
    samples of the window (over all shards and ranks), so that accumulation equals the large
    batch; without `average` it is the sum of the batches' means.

    Attributes:
        frequency: Global batches per optimizer step.
        average: Whether gradients are averaged over the window.
        weight: The weight of the present shard's loss.
        is_boundary: Whether this is the worker's last shard before an optimizer step.
        is_even: Whether every rank has a last shard in this window.
        is_idle: Whether this rank has no samples of the present batch.
        num_steps: Optimizer steps since the start of training.
    """

    frequency: int = 1
    average: bool = True
    weight: float = 1.0
    is_boundary: bool = True
    is_even: bool = True
    is_idle: bool = False
    num_steps: int = 0

    def is_window_end(self, batches: int) -> bool:
        """Return whether the next batch, after `batches` trained batches, ends a window."""
        return (batches + 1) % self.frequency == 0

    def num_window_records(
        self, position: Position, order_of: Callable[[int], EpochOrder | None]
    ) -> int:
        """Return the number of samples averaged by the current window's gradient.

        Args:
            position: Where the batch lies that is trained next.
            order_of: Returns the order of an epoch; the data have a length.
        """
        epoch, batch = position.epochs, position.batch_in_epoch
        order = _known(order_of(epoch))
        if not self.average:
            return order.num_records(batch)
        # The window may have begun in the epoch before and may end in the next one.
        batch -= position.batches % self.frequency
        while batch < 0:
            epoch -= 1
            batch += _known(order_of(epoch)).num_batches
        total = 0
        for _ in range(self.frequency):
            order = _known(order_of(epoch))
            total += order.num_records(batch)
            batch += 1
            if batch == order.num_batches:
                epoch, batch = epoch + 1, 0
        return total


def _known(order: EpochOrder | None) -> EpochOrder:
    assert order is not None
    return order


# Each backward pass at first, then one of so many is looked at: code that changes gradients by
# hand does so in every batch, and a look costs 0.1 us for each parameter.
_INTERVAL = 16

_Mark = tuple[int, float]


class ChangedGradients:
    """Detector of gradients changed between a backward pass and the optimizer's step.

    Attributes:
        is_scaled: Whether losses are scaled, so that gradients are too until the step.
    """

    def __init__(self) -> None:
        self.is_scaled = False
        self._num_passes = 0
        self._is_found = False
        # The marks of the parameters' gradients after the last backward pass.
        self._seen: dict[int, _Mark] = {}

    def note(
        self, parameters: Callable[[], Iterable[torch.nn.Parameter]], *, is_complete: bool
    ) -> None:
        """Note, on the chief, the gradients after a backward pass if the step will get others.

        Args:
            parameters: Returns the parameters.
            is_complete: Whether nothing will be added to the gradients.
        """
        self._num_passes += 1
        is_early = self._num_passes <= _INTERVAL
        is_due = not self._is_found and (is_early or self._num_passes % _INTERVAL == 0)
        is_left_alone = is_complete and not self.is_scaled
        is_seen = is_due and not is_left_alone and _is_chief()
        self._seen = _gradient_marks(parameters()) if is_seen else {}

    def find(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's gradients have changed since; True once only.

        Gradients that are gone, as by `zero_grad`, are no changed ones.
        """
        if not self._seen:
            return False
        now = _gradient_marks(p for group in optimizer.param_groups for p in group["params"])
        was_found = self._is_found
        self._is_found = was_found or any(self._seen.get(key, now[key]) != now[key] for key in now)
        # The step will change them too.
        self._seen = {key: seen for key, seen in self._seen.items() if key not in now}
        return self._is_found and not was_found


def _is_chief() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gradient_marks(parameters: Iterable[torch.nn.Parameter]) -> dict[int, _Mark]:
    """Return a mark per parameter with a gradient; a changed gradient has another mark."""
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    marks: dict[int, _Mark] = {key: (id(g), g._version) for key, g in gradients.items()}
    # Norms for sharded tensors: torch may change them in place without a new version.
    pieces = {key: local_part(g) for key, g in gradients.items() if is_sharded(g)}
    if pieces:
        norms = torch.stack(torch._foreach_norm([*pieces.values()])).nan_to_num_(-1.0).tolist()
        marks.update(
            (key, (id(gradients[key]), norm)) for key, norm in zip(pieces, norms, strict=True)
        )
    return marks


def with_mean_loss(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mean_loss: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a step's arguments with the closure, if any, wrapped to return the mean loss.

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


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most `max_norm`.

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
    # Single norm: equal to torch's result to the last bit.
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
    """Return the gradient norm of parameters divided over the same ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
    whole: torch.Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return whole


def clipping(norm: float | None, value: float | None) -> Callable[[Any], Any]:
    """Return a function clipping the gradients of a step by norm and by value.

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
