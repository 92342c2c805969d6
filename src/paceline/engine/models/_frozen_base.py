"""Parameters that are not trained, which checkpoints leave out if that was asked for."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from paceline.engine.tensors._sharded_tensors import is_sharded


class FrozenBase:
    """The frozen parameters of a model as it was built, told by digests of their contents.

    The digests are those of whole parameters, so that they do not depend on how the model is
    sharded.

    Args:
        model: The model, with all its weights, on its device. All ranks call this if it is sharded.
        name: What the base is called in messages, such as the name of a pre-trained model.
    """

    def __init__(self, model: torch.nn.Module, name: str | None) -> None:
        self._name = name
        self._digests = {name: _digest(value) for name, value in _frozen(model).items()}
        # What each rank compares at a checkpoint: no parameter is gathered then.
        self._pieces = self._digests

    def note_sharded(self, model: torch.nn.Module) -> None:
        """Note that the model was sharded since this was made."""
        self._pieces = {name: _digest_of_piece(value) for name, value in _frozen(model).items()}

    def leave_out(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Take the parameters that are frozen and as they were out of a model's state.

        All ranks call it if the model is sharded.

        Returns:
            What a checkpoint holds in their place.
        """
        # Each time, as a change that is made by way of `.data` leaves no trace.
        parameters = _frozen(model)
        names = [name for name in self._digests if name in parameters and name in state]
        is_same = [self._pieces[name] == _digest_of_piece(parameters[name]) for name in names]
        if any(is_sharded(parameter) for parameter in parameters.values()):
            is_same = _on_all_ranks(is_same, next(iter(parameters.values())).device)
        same = [name for name, is_so in zip(names, is_same, strict=True) if is_so]
        for name in same:
            del state[name]
        return {"name": self._name, "parameters": {name: self._digests[name] for name in same}}


def frozen_base(model: torch.nn.Module, trainable_only: bool | str) -> FrozenBase | None:
    """Return what checkpoints of a model leave out, None if they hold all of it.

    Args:
        model: The model.
        trainable_only: Whether to leave out what is frozen; a text is the base's name.

    Raises:
        TypeError: `trainable_only` is neither.
        ValueError: Nothing is frozen.
    """
    if not isinstance(trainable_only, (bool, str)):
        raise TypeError(
            "`trainable_only` must be True, False or the name of the base, but got"
            f" {trainable_only!r}."
        )
    if trainable_only is False:
        return None
    if all(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "`trainable_only` leaves out frozen parameters, but the model has none. Hint: freeze"
            " the base by `requires_grad_(False)` before `context.wrap_model`."
        )
    return FrozenBase(model, None if trainable_only is True else trainable_only)


def base_problem(model: torch.nn.Module, facts: Mapping[str, Any]) -> str | None:
    """Return what keeps a model from completing a checkpoint without a base; None if nothing.

    All ranks call it if the model is sharded: they gather one parameter after the other.
    """
    parameters = _parameters(model)
    stored = facts["parameters"]
    lacking = sorted(stored.keys() - parameters.keys())
    if lacking:
        return f"the model here has no parameter {lacking[0]!r} of the base"
    other = [name for name, digest in stored.items() if _digest(parameters[name]) != digest]
    if other:
        return (
            f"{len(other)} of {len(stored)} parameters of the base have other values here, the"
            f" first is {other[0]!r}"
        )
    return None


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return all parameters, tied ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _frozen(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in _parameters(model).items() if not value.requires_grad}


def _on_all_ranks(flags: list[bool], device: torch.device) -> list[bool]:
    """Return which flags are set on all ranks."""
    common = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(common, op=dist.ReduceOp.MIN)
    return [bool(flag) for flag in common.tolist()]


def _digest(parameter: Any) -> str:
    return _digest_of(parameter.full_tensor() if is_sharded(parameter) else parameter)


def _digest_of_piece(parameter: Any) -> str:
    return _digest_of(parameter.to_local() if is_sharded(parameter) else parameter)


def _digest_of(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    described = f"{tensor.dtype} {list(tensor.shape)}".encode()
    hasher = xxhash.xxh3_128(described)
    hasher.update(content.data)
    return hasher.hexdigest()
