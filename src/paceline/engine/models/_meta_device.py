"""Weights for models that were made on the meta device, which have none."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.engine.tensors._sharded_tensors import copy_piece, is_sharded

InitWeights = Callable[[torch.nn.Module], Any] | None


def is_on_meta(model: torch.nn.Module) -> bool:
    """Tell whether a model is on the meta device.

    Raises:
        ValueError: Only a part of it is.
    """
    names = {name: value.is_meta for name, value in _tensors(model)}
    if any(names.values()) and not all(names.values()):
        on_meta = next(name for name, is_meta in names.items() if is_meta)
        elsewhere = next(name for name, is_meta in names.items() if not is_meta)
        raise ValueError(
            "A model must be on the meta device as a whole or not at all, but"
            f" {on_meta!r} is there and {elsewhere!r} is not."
        )
    return any(names.values())


def materialize(
    model: torch.nn.Module, device: torch.device, init_weights: InitWeights, *, has_ranks: bool
) -> None:
    """Give a model on the meta device its weights, one module at a time.

    Each module is whole on each rank while it is initialised, and only its pieces are kept. The
    weights are those that the chief draws, so they do not depend on the number of ranks.

    Args:
        model: The model, sharded or not.
        device: The device for it.
        init_weights: Called with each module that has parameters or buffers of its own, after its
            `reset_parameters` if it has that. Inner modules come first.
        has_ranks: Whether there are other ranks, which all call this.

    Raises:
        ValueError: Parameters or buffers have no values afterwards.
    """
    model.to_empty(device=device)
    without: list[str] = []
    for name, module in _inner_first(model):
        if any(True for _ in _own_tensors(module)):
            without += [
                f"{name}.{each}".lstrip(".")
                for each in _initialize(module, device, init_weights, has_ranks=has_ranks)
            ]
    if without:
        raise ValueError(
            "A model on the meta device must have a `reset_parameters` in each module with"
            f" parameters or buffers, or `init_weights` must set them, but {without[0]!r} and"
            f" {len(without) - 1} more have no values. Hint:"
            " context.wrap_model(model, init_weights=function_of_a_module)."
        )


@torch.no_grad()
def _initialize(
    module: torch.nn.Module, device: torch.device, init_weights: InitWeights, *, has_ranks: bool
) -> list[str]:
    """Initialise the tensors of a module without those of inner ones; return what got no values."""
    sharded = {name: value for name, value in module._parameters.items() if is_sharded(value)}
    for name, parameter in sharded.items():
        assert parameter is not None
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = torch.nn.Parameter(empty, parameter.requires_grad)
    for _, tensor in _own_tensors(module):
        _mark(tensor)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    if init_weights is not None:
        init_weights(module)
    without = [name for name, tensor in _own_tensors(module) if _is_marked(tensor)]
    if has_ranks:
        for _, tensor in _own_tensors(module):
            dist.broadcast(tensor, src=0)
    for name, parameter in sharded.items():
        whole = module._parameters[name]
        module._parameters[name] = parameter
        copy_piece(whole, parameter)
    return without


def _inner_first(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for child_name, child in module.named_children():
        yield from _inner_first(child, f"{name}.{child_name}".lstrip("."))
    yield name, module


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _mark(tensor: torch.Tensor) -> None:
    """Fill a tensor with what no initialisation leaves everywhere."""
    tensor.fill_(_marker(tensor.dtype))


def _is_marked(tensor: torch.Tensor) -> bool:
    marker = _marker(tensor.dtype)
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    return bool((tensor.isnan() if marker != marker else tensor == marker).all())


def _marker(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    is_number = dtype.is_floating_point or dtype.is_complex
    return float("nan") if is_number else torch.iinfo(dtype).min if dtype.is_signed else 255
