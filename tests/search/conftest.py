from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.search import Create, Exited, Reported, Shutdown, SimulationResult, Stop
from paceline.search._adaptive_asha import AsyncHalvingConfig


@pytest.fixture
def space() -> dict[str, Any]:
    """The space of the random stream's conformance table."""
    return {
        "opt": {"type": "categorical", "vals": ["sgd", "adam", "rmsprop"]},
        "n": {"type": "int", "minval": 1, "maxval": 10},
        "lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1},
        "drop": {"type": "double", "minval": 0.2, "maxval": 0.5},
    }


@pytest.fixture
def halving() -> Callable[..., AsyncHalvingConfig]:
    """Make one bracket with rungs at 1, 3 and 9, six trials and two at once, unless said."""

    def make(**changes: Any) -> AsyncHalvingConfig:
        fields: dict[str, Any] = {
            "metric": "loss",
            "num_rungs": 3,
            "max_trials": 6,
            "max_time": 9,
            "time_metric": "batches",
            "divisor": 3,
            "max_concurrent_trials": 2,
        }
        return AsyncHalvingConfig(**(fields | changes))

    return make


@pytest.fixture
def trace() -> Callable[[SimulationResult], list[str]]:
    """Write a simulated search as lines like `t2@1 S2 C3`; trials are numbered by creation."""

    def write(result: SimulationResult) -> list[str]:
        numbers = {request_id: n for n, request_id in enumerate(result.trained, start=1)}
        lines = []
        for given, operations in zip(result.inputs, result.operations, strict=True):
            words = ["init"]
            if isinstance(given, Reported):
                words = [f"t{numbers[given.request_id]}@{given.time:g}"]
            elif isinstance(given, Exited):
                words = [f"x{numbers[given.request_id]}"]
            for operation in operations:
                if isinstance(operation, Create):
                    words.append(f"C{numbers[operation.request_id]}")
                elif isinstance(operation, Stop):
                    words.append(f"S{numbers[operation.request_id]}")
                elif isinstance(operation, Shutdown):
                    words.append("SHUTDOWN")
            if len(words) > 1 or isinstance(given, Reported):
                lines.append(" ".join(words))
        return lines

    return write
