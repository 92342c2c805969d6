"""The state of learning-rate schedulers, fit for files."""

from itertools import chain, repeat
from typing import Any


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without functions, which it builds anew by itself."""
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Put back what `scheduler_state` returned; dictionaries keep their types, like `Counter`."""
    scheduler.load_state_dict(_typed(state, scheduler))


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
