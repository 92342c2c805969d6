"""The state of learning-rate schedulers, fit for files."""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch

from paceline.core import DistributedContext


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without functions, which it builds anew by itself."""
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Put back what `scheduler_state` returned; dictionaries keep their types, like `Counter`."""
    scheduler.load_state_dict(_typed(state, scheduler))


def share_schedulers(
    schedulers: Sequence[Any], distributed: DistributedContext, *, is_idle: bool
) -> None:
    """Give the chief's schedulers, and what they have set, to ranks that could not step them.

    Args:
        schedulers: The schedulers, which the code of a batch steps.
        distributed: Where the ranks meet; all of them call this.
        is_idle: Whether this rank had no samples of the batch.
    """
    own = [(scheduler_state(each), _settings(each.optimizer)) for each in schedulers]
    of_chief = distributed.broadcast(own)
    if not is_idle:
        return
    for scheduler, (state, settings) in zip(schedulers, of_chief, strict=True):
        load_scheduler(scheduler, state)
        for group, values in zip(scheduler.optimizer.param_groups, settings, strict=True):
            for name, value in values.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of the parameter groups."""
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _typed(value: Any, present: Any) -> Any:
    """Return a stored value with its dictionaries of the types that are present."""
    if isinstance(value, list) and isinstance(present, (list, tuple)):
        return [_typed(*pair) for pair in zip(value, chain(present, repeat(None)), strict=False)]
    if not isinstance(value, dict):
        return value
    if hasattr(present, "load_state_dict"):
        # A scheduler, which may hold others.
        return {name: _typed(item, vars(present).get(name)) for name, item in value.items()}
    return type(present)(value) if isinstance(present, dict) else value


def _without_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_functions(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list):
        return [_without_functions(item) for item in value]
    return value
