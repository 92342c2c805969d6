"""The state of learning-rate schedulers, fit for files."""

from typing import Any


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without functions, which it builds anew by itself."""
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Put back what `scheduler_state` returned; dictionaries keep their types, like `Counter`."""
    present = vars(scheduler)
    typed = {
        name: type(present[name])(value)
        if isinstance(value, dict) and isinstance(present.get(name), dict)
        else value
        for name, value in state.items()
    }
    scheduler.load_state_dict(typed)


def _without_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_functions(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list):
        return [_without_functions(item) for item in value]
    return value
