"""Functions that run in the workers of a trainer."""

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.creators._replica import Replica
from paceline.creators._spec import PassOrder, PassResult, ReplicaSpec
from paceline.creators._state import load_state as put_back
from paceline.creators._state import rank_state
from paceline.engine import release_device_memory


class ReplicaFacts(NamedTuple):
    """What a worker is, for the driver."""

    node: str
    pid: int
    device: str


_replica: list[Replica] = []


def set_up(spec: ReplicaSpec) -> ReplicaFacts:
    """Make this worker's replica."""
    # An earlier one must not take the place of the new one's state.
    _replica.clear()
    release_device_memory()
    _replica.append(Replica(spec))
    return ReplicaFacts(socket.gethostname(), os.getpid(), str(_replica[0].device))


def train(order: PassOrder) -> PassResult:
    """Train for a pass."""
    return _replica[0].train(order)


def validate(order: PassOrder) -> PassResult:
    """Validate."""
    return _replica[0].validate(order)


def state() -> dict[str, Any]:
    """Return this rank's part of the state."""
    return rank_state(_replica[0])


def load_state(whole: dict[str, Any]) -> None:
    """Put back a state."""
    put_back(_replica[0], whole)


def models() -> list[Any]:
    """Return the models."""
    return _replica[0].models


def update_schedulers(metric: float) -> None:
    """Step all schedulers with a metric."""
    for scheduler in _replica[0].schedulers:
        scheduler.step(metric)


def call(function: Callable[[], Any]) -> Any:
    """Call a function of the user's."""
    return function()
