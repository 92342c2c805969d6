"""Gradients of an accumulated step so far, and their handover to another group of ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from paceline.engine.tensors._stored_tensors import StoredTensor

State = dict[str, Any]


def share_out_window(
    states: Sequence[State],
    rank: int,
    world_size: int,
    *,
    is_sharded: Sequence[bool],
    frequency: int,
) -> State:
    """Return what a rank goes on with within an accumulated step that other ranks began.

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
    # What sharded gradients, which are means, have been divided by; and what others will be.
    stored_divisor = window["num_all"] if is_fed else len(states) * frequency
    divisor = window["num_all"] if is_fed else world_size * frequency
    gradients: list[Any] = [None] * len(is_sharded)
    carried: list[Any] = [None] * len(is_sharded)
    for index, becomes_sharded in enumerate(is_sharded):
        stored = states[0]["gradients"][index]
        was_sharded = isinstance(stored, StoredTensor)
        if becomes_sharded:
            total = None if was_sharded else _total_of_window(states, index, is_fed=is_fed)
            gradients[index] = stored if total is None else total / stored_divisor
        elif own is not None and not was_sharded:
            gradients[index] = own["gradients"][index]
            carried[index] = own["window"]["carried"][index]
        elif rank == 0:
            total = (
                stored.whole() if was_sharded else _total_of_window(states, index, is_fed=is_fed)
            )
            if total is not None and (was_sharded or not is_fed):
                # Backward passes without a loader count equally on all ranks.
                total = total * (divisor if was_sharded else world_size / len(states))
            (carried if is_fed else gradients)[index] = total
    num_own = 0 if own is None else own["window"]["num_own"]
    return {"gradients": gradients, "window": {**window, "num_own": num_own, "carried": carried}}


def has_stored_tensors(state: State) -> bool:
    """Tell whether a rank's state has gradients of parameters that were sharded."""
    return any(isinstance(gradient, StoredTensor) for gradient in state["gradients"])


def _total_of_window(states: Sequence[State], index: int, *, is_fed: bool) -> torch.Tensor | None:
    """Return the sum of one parameter's gradients over all ranks, weighted by their samples."""
    parts = []
    for state in states:
        gradient, carried = state["gradients"][index], state["window"]["carried"][index]
        if gradient is not None:
            parts.append(gradient * state["window"]["num_own"] if is_fed else gradient)
        if carried is not None:
            parts.append(carried)
    return torch.stack(parts).sum(0) if parts else None


class AccumulatedWindow:
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
