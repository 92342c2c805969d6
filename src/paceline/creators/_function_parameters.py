"""Users' functions, called with what their parameters are named after."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.workers import RankInfo

# What a function can ask for, in the order in which those without a signature get the first six,
# and the names under which it is known.
_NAMES: Mapping[str, Sequence[str]] = {
    "config": ("config",),
    "models": ("model", "models"),
    "batches": (
        *("train_iterator", "val_iterator", "validation_iterator", "iterator"),
        *("dataloader", "data_loader", "loader", "train_loader", "val_loader"),
        *("validation_loader", "batches"),
    ),
    "criterion": ("criterion", "loss", "loss_fn"),
    "optimizers": ("optimizer", "optimizers"),
    "schedulers": ("scheduler", "schedulers"),
    "info": ("info",),
    "scaler": ("scaler",),
    "device": ("device",),
}
_MEANING = {name: meaning for meaning, names in _NAMES.items() for name in names}
_NUM_BY_ORDER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HookWorker(RankInfo):
    """Facts about a worker, for an `initialization_hook` with a parameter.

    Attributes:
        rank: The worker among all.
        world_size: The number of workers.
        local_rank: The worker among those of its node.
        local_world_size: The number of workers of its node.
        node_rank: The node.
        config: The user's config.
    """

    config: Mapping[str, Any]


class GivenParameters(NamedTuple):
    """Objects that a train or validation function can take as parameters."""

    config: dict[str, Any]
    models: Any
    batches: Any
    criterion: Any
    optimizers: Any
    schedulers: Any
    info: dict[str, Any]
    scaler: Any
    device: Any


def check_function(name: str, function: Callable[..., Any]) -> None:
    """Check that every parameter a function requires has a known name.

    Raises:
        ValueError: One has not.
    """
    for parameter in _parameters(function) or ():
        is_required = parameter.default is parameter.empty
        if is_required and parameter.name not in _MEANING and not _is_variable(parameter):
            raise ValueError(
                f"The parameters of `{name}` must be named after what they get, but"
                f" {parameter.name!r} is none of {', '.join(_MEANING)}. Hint: rename it, or give"
                " it a default."
            )


def call_with(function: Callable[..., Any], given: GivenParameters) -> Any:
    """Call a function with what its parameters name."""
    parameters = _parameters(function)
    if parameters is None:
        # What is written in C has no signature.
        return function(*given[:_NUM_BY_ORDER])
    values = given._asdict()
    args, kwargs = [], {}
    for parameter in parameters:
        meaning = _MEANING.get(parameter.name)
        if meaning is None or _is_variable(parameter):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(values[meaning])
        else:
            kwargs[parameter.name] = values[meaning]
    return function(*args, **kwargs)


def call_hook(hook: Callable[..., Any], worker: HookWorker) -> None:
    """Call an initialization hook with its worker, or with nothing if it takes nothing."""
    takes_worker = any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in _parameters(hook) or ()
    )
    if takes_worker:
        hook(worker)
    else:
        hook()


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_variable(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
