"""Conversion between whole tensors and the pieces of sharded models."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from paceline.engine.state._models_and_optimizers import divided_optimizer_states
from paceline.engine.tensors._optimizer_parameters import parameters_of
from paceline.engine.tensors._sharded_tensors import is_sharded
from paceline.engine.tensors._stored_tensors import fit_stored_tensor


def accept_whole_tensors(model: torch.nn.Module) -> None:
    """Have `load_state_dict` of a sharded model and of its parts take whole tensors too."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_fit_parameters)  # type: ignore[no-untyped-call]


def accept_whole_states(optimizer: torch.optim.Optimizer) -> None:
    """Have `load_state_dict` of an optimizer of sharded parameters take whole tensors too."""
    optimizer.register_load_state_dict_pre_hook(_fit_states)


def check_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can step the pieces of sharded models.

    Raises:
        ValueError: It was made before its model was sharded, or joins parameters.
    """
    name = type(optimizer).__name__
    if not any(map(is_sharded, parameters_of(optimizer))):
        raise ValueError(
            'With `data_parallel="fsdp"` an optimizer must be made of the parameters of a model'
            f" that was prepared before, but those of {name} are not sharded. Hint: prepare the"
            " model first, then Optimizer(model.parameters())."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            'With `data_parallel="fsdp"` an optimizer must step each parameter by itself, but'
            f' {name} joins all of them. Hint: another optimizer, or `data_parallel="flat"`.'
        )


def outline_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model that is not sharded yet, without the values of its parameters."""
    memo: dict[int, Any] = {
        id(each): torch.nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for each in model.parameters()
    }
    return copy.deepcopy(model, memo)


def whole_model(outline: torch.nn.Module, sharded: torch.nn.Module) -> torch.nn.Module:
    """Return a sharded model as a whole one on the CPU; all ranks call it.

    Args:
        outline: What `outline_of` returned before it was sharded.
        sharded: The model.
    """
    memo: dict[int, Any] = {}
    parameters, buffers = dict(sharded.named_parameters()), dict(sharded.named_buffers())
    for name, parameter in outline.named_parameters():
        value = gathered(parameters[name])
        memo[id(parameter)] = torch.nn.Parameter(value, parameters[name].requires_grad)
    for name, buffer in outline.named_buffers():
        memo[id(buffer)] = gathered(buffers[name])
    return copy.deepcopy(outline, memo).train(sharded.training)


def gathered(state: Any) -> Any:
    """Return a nested state with whole tensors on the CPU; all ranks call it with the same."""
    if is_sharded(state):
        return state.full_tensor().detach().cpu()
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: gathered(item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = map(gathered, state)
        return list(items) if isinstance(state, list) else tuple(items)
    return state


def replace_parameters(
    optimizer: torch.optim.Optimizer, pieces: Mapping[int, torch.nn.Parameter]
) -> None:
    """Have an optimizer step the pieces of a model that was sharded after it was made.

    Args:
        optimizer: The optimizer.
        pieces: The sharded parameters by the `id` of the parameters whose place they take.

    Raises:
        ValueError: It has a state already, which belongs to whole parameters.
    """
    for group in optimizer.param_groups:
        if not any(id(parameter) in pieces for parameter in group["params"]):
            continue
        if optimizer.state:
            raise ValueError(
                'With `data_parallel="fsdp"` an optimizer must have no state when its model is'
                f" prepared, but {type(optimizer).__name__} has stepped or loaded one. Hint:"
                " prepare the model first, then load the optimizer's state."
            )
        # In place, as an optimizer may keep the list.
        group["params"][:] = [pieces.get(id(each), each) for each in group["params"]]


def _fit_parameters(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        stored = state.get(prefix + name)
        # What has another shape is for torch to refuse.
        if stored is not None and getattr(stored, "shape", None) == parameter.shape:
            state[prefix + name] = fit_stored_tensor(stored, parameter)


def _fit_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": divided_optimizer_states(state["state"], optimizer)}
