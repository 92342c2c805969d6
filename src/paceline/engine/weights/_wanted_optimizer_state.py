"""Whether the state of an optimizer that is stored by names is that of the one here."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from paceline.engine.state._load_models import shape_of_state
from paceline.engine.tensors._optimizer_parameters import parameters_of
from paceline.storage import CheckpointMismatchError

_NUM_SHOWN = 5
# How a step computes, which is nothing to what it keeps.
_WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")

# The states of a parameter, by what the optimizer calls them.
Slots: TypeAlias = Mapping[str, Any]


def check_optimizer_slots(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    found: Mapping[str, Slots],
    place: str,
) -> None:
    """Check that stored states are those that an optimizer keeps, before any of them is loaded.

    Args:
        optimizer: The optimizer.
        names: The names of each of its parameters; tied ones have several.
        found: The stored states by the names of parameters.
        place: Where they are, for the error.

    Raises:
        CheckpointMismatchError: They are not; the message says which.
    """
    kind = type(optimizer).__name__
    wanted = wanted_slots(optimizer)
    missing = [
        some[0]
        for some, parameter, slots in zip(names, parameters_of(optimizer), wanted, strict=True)
        if (parameter.requires_grad and slots != {} and found.keys().isdisjoint(some))
        or not all(_has_tensors(found.get(name, {})) for name in some)
    ]
    if missing:
        hint = (
            "load it into the model that it was stored with"
            if found
            else "`key` is the name under which the result of `get_optimizer_state_dict` was saved"
        )
        raise CheckpointMismatchError(
            f"{place} must hold tensors for each parameter of {kind}, but not for"
            f" {missing[:_NUM_SHOWN]}. Hint: {hint}."
        )
    if foreign := sorted(found.keys() - {name for some in names for name in some}):
        raise CheckpointMismatchError(
            f"{place} must hold the state of the parameters of {kind} alone, but it holds that of"
            f" {foreign[:_NUM_SHOWN]} too. Hint: load it into the model that it was stored with."
        )
    for some, slots in zip(names, wanted, strict=True):
        for name in some:
            if name in found and slots is not None:
                _check_slots(kind, name, slots, found[name], place)


def _has_tensors(slots: Slots) -> bool:
    return all(shape_of_state(value) is not None for value in slots.values())


def _check_slots(kind: str, parameter: str, wanted: Slots, found: Slots, place: str) -> None:
    text = f"{place} must hold the state of {kind}"
    hint = "Hint: build model and optimizer as the code did that stored it, or begin without it."
    if wanted.keys() != found.keys():
        raise CheckpointMismatchError(
            f"{text}, which keeps {sorted(wanted) or 'nothing'} of each parameter, but for"
            f" {parameter!r} it holds {sorted(found)}: those of another optimizer or of other"
            f" options. {hint}"
        )
    for name, value in wanted.items():
        here, there = shape_of_state(value), shape_of_state(found[name])
        if here is not None and there is not None and here != there:
            raise CheckpointMismatchError(
                f"{text}, but {name!r} of {parameter!r} is {list(there)} there and {list(here)}"
                f" here. {hint}"
            )


def wanted_slots(optimizer: torch.optim.Optimizer) -> list[Slots | None]:
    """Return what an optimizer keeps of each parameter; None where that cannot be known.

    Those of torch tell by a step of a copy whose parameters have no memory, as most keep nothing
    before a first step. Where the step needs values, the copy tells the names, but no shapes.
    """
    step = inspect.unwrap(type(optimizer).step)
    if step.__module__.startswith("torch.optim."):
        # Some need more than gradients, such as a closure.
        with suppress(Exception):
            return [*_slots_after_step(_twin(optimizer, _without_memory), step)]
        with suppress(Exception):
            slots = _slots_after_step(_twin(optimizer, _of_one_value), step)
            return [dict.fromkeys(each) for each in slots]
    return [optimizer.state.get(each) or None for each in parameters_of(optimizer)]


def _slots_after_step(
    twin: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]
) -> list[Slots]:
    with torch.no_grad():
        step(twin)
    return [dict(twin.state.get(each, {})) for each in parameters_of(twin)]


def _twin(
    optimizer: torch.optim.Optimizer, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> torch.optim.Optimizer:
    """Return a copy that has other parameters, with gradients, and keeps nothing of them yet."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[])
    for group in optimizer.param_groups:
        plain = {name: False for name in _WAYS_TO_COMPUTE if name in group}
        parameters = [stand_in(each) for each in group["params"]]
        for each in parameters:
            each.grad = torch.zeros_like(each)
        twin.param_groups.append({**group, **plain, "params": parameters})
    return twin


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _of_one_value(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros([1] * parameter.ndim, dtype=parameter.dtype)
