"""Outcome of a trial, as far as its search knows it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class TrialOutcome:
    """One trial of a search.

    Attributes:
        number: Its number, from 1, in the order in which the search has created trials.
        config: What the function is given.
        run_dir: Its run directory.
        state: "waiting", "running", "paused", "stopped" by the search, "completed", "failed",
            "diverged", if its loss was not finite (`NonFiniteError`),
            "invalid", if the function has refused its hyperparameters, or "canceled".
        value: The best value of the searched metric that it has reported; None before the first.
        metrics: Its last report.
        num_reports: How many reports it has made.
        time: How long it has trained, in units of the search's time metric.
        error: The exception that has ended it, for a failed trial of this process.
    """

    number: int
    config: dict[str, Any]
    run_dir: Path
    state: str = "waiting"
    value: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    num_reports: int = 0
    time: float = 0.0
    error: BaseException | None = None
