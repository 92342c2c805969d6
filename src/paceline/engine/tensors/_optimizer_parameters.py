"""The parameters that an optimizer steps, and those of a whole training."""

from collections.abc import Iterable

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return what the model's own method yields, without a hash of each parameter.

    Each hash is a call of Python, which takes half of the time where modules have many parameters.
    Training stands still while the state of a model is captured.
    """
    if type(model).named_parameters is not torch.nn.Module.named_parameters:
        return [*model.named_parameters()]
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in found:
                found[id(parameter)] = (prefix + name, parameter)
    return [*found.values()]


def all_parameters(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.nn.Parameter]:
    """Return the parameters of all models, then those that only optimizers have; each once."""
    found = {id(p): p for model in models for _, p in named_parameters(model)}
    for optimizer in optimizers:
        found.update((id(p), p) for p in parameters_of(optimizer) if id(p) not in found)
    return list(found.values())
