"""Functions that run in the workers of a trainer."""

from collections.abc import Callable
from typing import Any

from paceline.creators._replica import Replica
from paceline.creators._replica_spec import ReplicaPassOrder, ReplicaSpec
from paceline.engine import PassResult, join_pass_state, release_device_memory, restore_pass_state
from paceline.workers import read_parts

_replica: list[Replica] = []


def set_up(spec: ReplicaSpec) -> None:
    """Make this worker's replica."""
    # An earlier one must not take the place of the new one's state.
    _replica.clear()
    release_device_memory()
    _replica.append(Replica(spec))


def train(order: ReplicaPassOrder, state_path: str | None = None) -> PassResult:
    """Train for a pass."""
    return _replica[0].train(order, state_path)


def validate(order: ReplicaPassOrder) -> PassResult:
    """Validate."""
    return _replica[0].validate(order)


def state(path: str | None) -> dict[str, Any] | None:
    """Return this rank's part of the state; None if it is in a file now."""
    return _replica[0].state_part(path)


def load_state(path: str | None, parts: list[Any]) -> None:
    """Put back a state; see `read_parts`."""
    restore_pass_state(_replica[0], join_pass_state(read_parts(path, parts)))


def models() -> list[Any] | None:
    """Return the models, on the chief; all ranks take part, as models may be sharded."""
    return _replica[0].whole_models()


def update_schedulers(metric: float) -> None:
    """Step all schedulers with a metric."""
    for scheduler in _replica[0].schedulers:
        scheduler.step(metric)


def call(function: Callable[[], Any]) -> Any:
    """Call a function of the user's."""
    return function()
