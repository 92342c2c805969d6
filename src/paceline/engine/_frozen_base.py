"""Parameters that are not trained, which checkpoints leave out if that was asked for."""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash


class FrozenBase:
    """The frozen parameters of a model as it was built, told by digests of their contents.

    Args:
        model: The model, with all its weights, on its device.
        name: What the base is called in messages, such as the name of a pre-trained model.
    """

    def __init__(self, model: torch.nn.Module, name: str | None) -> None:
        self._name = name
        self._digests = _digests_of_frozen(model)

    def leave_out(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Take the parameters that are frozen and as they were out of a model's state.

        Returns:
            What a checkpoint holds in their place.
        """
        # Each time, as a change that is made by way of `.data` leaves no trace.
        present = _digests_of_frozen(model)
        names = [
            name
            for name, digest in present.items()
            if name in state and self._digests.get(name) == digest
        ]
        for name in names:
            del state[name]
        return {"name": self._name, "parameters": {name: present[name] for name in names}}


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
    """Return what keeps a model from completing a checkpoint without a base; None if nothing."""
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


def _digests_of_frozen(model: torch.nn.Module) -> dict[str, str]:
    parameters = _parameters(model).items()
    return {name: _digest(value) for name, value in parameters if not value.requires_grad}


def _digest(parameter: torch.nn.Parameter) -> str:
    content = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    described = f"{parameter.dtype} {list(parameter.shape)}".encode()
    hasher = xxhash.xxh3_128(described)
    hasher.update(content.data)
    return hasher.hexdigest()
