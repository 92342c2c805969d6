"""Models put back from a checkpoint, with errors that tell how it differs from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.engine.models._frozen_base import base_problem
from paceline.engine.tensors._stored_tensors import StoredTensor, fit_stored_tensor
from paceline.storage import CheckpointMismatchError

# What torch.compile adds to the names of parameters.
COMPILED = "_orig_mod."
_NUM_SHOWN = 5


class ModelMismatchError(CheckpointMismatchError, RuntimeError):
    """Raised when a checkpoint is of another model; torch raises a RuntimeError for that."""


def check_numbers(kind: str, stored: Sequence[Any], present: Sequence[Any]) -> None:
    """Check that there are as many of a kind as are stored.

    Raises:
        CheckpointMismatchError: There are others.
    """
    if len(stored) != len(present):
        raise CheckpointMismatchError(
            f"The checkpoint must hold as many {kind}s as are trained here, but it holds"
            f" {len(stored)}, and here are {len(present)}. Hint: go on with the code that stored"
            " it."
        )


def load_models(
    models: Sequence[torch.nn.Module],
    states: Sequence[dict[str, Any]],
    bases: Sequence[Mapping[str, Any] | None] = (),
) -> None:
    """Put back models.

    Args:
        models: The models.
        states: Their states.
        bases: What stands for the parameters that were left out of each, if any were.

    Raises:
        CheckpointMismatchError: Numbers, names or shapes differ; the message says which.
    """
    check_numbers("model", states, models)
    for index, (model, state) in enumerate(zip(models, states, strict=True)):
        _load_model(model, state, index, bases[index] if bases else None)


def _load_model(
    model: torch.nn.Module, state: dict[str, Any], index: int, base: Mapping[str, Any] | None
) -> None:
    if base is not None:
        state = {**state, **_base_parameters(model, base, index)}
    present = model.state_dict()
    missing, unknown = sorted(present.keys() - state.keys()), sorted(state.keys() - present.keys())
    shapes = [
        f"{name!r} is {list(state[name].shape)} there and {list(value.shape)} here"
        for name, value in present.items()
        if name in state and shape_of_state(value) not in (None, shape_of_state(state[name]))
    ]
    problems = [f"it lacks {_some(missing)}"] if missing else []
    problems += [f"it has {_some(unknown)} besides"] if unknown else []
    problems += [", ".join(shapes[:_NUM_SHOWN]) + _more(shapes)] if shapes else []
    if problems:
        hint = "go on with the model that was trained"
        if any(COMPILED in name for name in {*missing} ^ {*unknown}):
            # torch.compile gives the parameters other names, `wrap_model(compile=True)` does not.
            hint = (
                "one of the two models was compiled by `torch.compile` itself; compile with"
                " `compile=True` of `wrap_model`, which keeps the names"
            )
        raise ModelMismatchError(
            f"The checkpoint is of another model {index}: {'; '.join(problems)}. Hint: {hint}."
        )
    try:
        model.load_state_dict(
            {name: fit_stored_tensor(v, present.get(name)) for name, v in state.items()}
        )
    except RuntimeError as error:
        raise ModelMismatchError(f"The checkpoint is of another model {index}: {error}") from error


def _base_parameters(
    model: torch.nn.Module, base: Mapping[str, Any], index: int
) -> dict[str, torch.Tensor]:
    """Return the parameters that a checkpoint has left out, as the model has them."""
    problem = base_problem(model, base)
    if problem is not None:
        name = "" if base["name"] is None else f" ({base['name']})"
        raise ModelMismatchError(
            f"The checkpoint holds only what was trained of model {index}, which must be built on"
            f" the same base{name}, but {problem}. Hint: load the weights of the base before"
            " `context.wrap_model`."
        )
    present = model.state_dict()
    return {name: present[name] for name in base["parameters"]}


def _some(names: list[str]) -> str:
    return f"{names[:_NUM_SHOWN]}{_more(names)}"


def _more(names: list[str]) -> str:
    num_more = len(names) - _NUM_SHOWN
    return f" and {num_more} more" if num_more > 0 else ""


def shape_of_state(value: Any) -> Any:
    """Return a tensor's shape; None where there is none to compare, as before a first batch."""
    if isinstance(value, StoredTensor):
        return value.shape
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return value.shape
