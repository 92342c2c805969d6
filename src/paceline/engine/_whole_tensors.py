"""Conversion between whole tensors and the pieces of sharded models."""

from collections.abc import Mapping
from typing import Any

import torch

from paceline.engine._sharded_state import fitted, is_sharded
from paceline.engine._trained_objects import divided


def accept_whole_tensors(model: torch.nn.Module) -> None:
    """Have `load_state_dict` of a sharded model and of its parts take whole tensors too."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_fit_parameters)  # type: ignore[no-untyped-call]


def accept_whole_states(optimizer: torch.optim.Optimizer) -> None:
    """Have `load_state_dict` of an optimizer of sharded parameters take whole tensors too."""
    optimizer.register_load_state_dict_pre_hook(_fit_states)


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
            state[prefix + name] = fitted(stored, parameter)


def _fit_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": divided(state["state"], optimizer)}
