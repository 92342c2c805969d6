"""State of a single rank: buffers, random generators, gradients within an accumulated step.

With the same number of ranks, each takes up what it had stored. With another number, all take up
the buffers of the chief and draw random numbers of their own; of the gradients, the chief takes up
the sum over all ranks, and the others begin with none.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline._seeds import mix_seed
from paceline.engine.devices._random_generators import restore_random_state, seed_everything
from paceline.engine.tensors._stored_tensors import fit_stored_tensor

Gradients = Sequence[torch.Tensor | None]


def own_buffers(model: torch.nn.Module, *, is_chief: bool) -> dict[str, torch.Tensor]:
    """Return the buffers that the model's stored state, which is the chief's, does not hold."""
    buffers = dict(model.named_buffers())
    shared = model.state_dict().keys() if is_chief and buffers else ()
    return {name: buffer for name, buffer in buffers.items() if name not in shared}


def load_buffers(model: torch.nn.Module, stored: Mapping[str, torch.Tensor]) -> None:
    """Put back what `own_buffers` returned; unknown names are left out."""
    for name, buffer in list(model.named_buffers()):
        value = fit_stored_tensor(stored.get(name), buffer)
        if value is None:
            continue
        if not torch.nn.parameter.is_lazy(buffer) and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            # Such as a cache that has grown.
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, value.to(buffer.device, buffer.dtype))


def load_gradients(parameters: Iterable[torch.nn.Parameter], gradients: Gradients | None) -> None:
    """Put back gradients, in the order of the parameters; None for none at all."""
    known = iter(gradients or ())
    for parameter in parameters:
        gradient = next(known, None)
        parameter.grad = (
            None
            if gradient is None
            else fit_stored_tensor(gradient, parameter).to(parameter.device)
        )


def summed_gradients(by_rank: Iterable[Gradients | None]) -> list[torch.Tensor | None] | None:
    """Return the sum of the gradients of all ranks, taken rank by rank; None if nobody has any."""
    total: list[torch.Tensor | None] | None = None
    for gradients in by_rank:
        if gradients is None:
            continue
        if total is None:
            total = list(gradients)
            continue
        for index, gradient in enumerate(gradients):
            before = total[index]
            total[index] = gradient if before is None else _sum(before, gradient)
    return total


def restore_generators(stored: Any, *, seed: int, num_steps: int, rank: int) -> None:
    """Put back the generators, or seed them where this rank has none; as the last of all.

    Args:
        stored: What `capture_random_state` returned on this rank, or None.
        seed: The seed of the training.
        num_steps: The number of batches or steps so far.
        rank: The rank.
    """
    if stored is not None:
        restore_random_state(stored)
    else:
        # Two ranks must not draw the same numbers.
        seed_everything(mix_seed(seed, num_steps), rank)


def _sum(first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    return first if second is None else first + second
