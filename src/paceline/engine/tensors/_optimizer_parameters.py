"""The parameters that an optimizer steps, and those of a whole training."""

from collections.abc import Iterable

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def all_parameters(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.nn.Parameter]:
    """Return the parameters of all models, then those that only optimizers have; each once."""
    found = {id(p): p for model in models for p in model.parameters()}
    for optimizer in optimizers:
        found.update((id(p), p) for p in parameters_of(optimizer) if id(p) not in found)
    return list(found.values())
