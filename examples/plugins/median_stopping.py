"""A search method from outside the package: the median stopping rule.

A trial is stopped when the best value that it has reported is worse than the median of the running
means that other trials had when they reported at the same time, after Golovin et al., "Google
Vizier: A Service for Black-Box Optimization" (KDD 2017), section 3.2. So trials must validate at
the same times.
"""

import math
from bisect import insort
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from paceline.config import Searcher
from paceline.search import (
    ExitReason,
    Operation,
    SearchConfig,
    SearchMethod,
    Space,
    Stop,
    Train,
    TrialMaker,
)

_WORST = 1e300


class MedianStopping(Searcher):
    """The `searcher` section of a config with ``name: median_stopping``."""

    wants_reports = True

    name: Literal["median_stopping"] = Field(
        default="median_stopping", description="Search method."
    )
    max_trials: int = Field(ge=1, description="Trials that the search creates.")
    max_concurrent_trials: int = Field(default=16, ge=1, description="Trials that run at once.")
    time_metric: str = Field(
        default="batches", description="Key of every validation report that tells the time."
    )
    max_time: int = Field(ge=1, description="Time that the best trials train to.")
    min_time: int = Field(default=1, ge=1, description="Time before which no trial is stopped.")
    min_others: int = Field(
        default=3, ge=1, description="Other trials that must have reported before one is stopped."
    )

    @property
    def length(self) -> int:
        """Return the time that the best trials train to."""
        return self.max_time

    @property
    def length_unit(self) -> str:
        """Return the name of the time metric."""
        return self.time_metric

    def search_config(self) -> "MedianConfig":
        """Return the method's configuration."""
        return MedianConfig(
            metric=self.metric,
            smaller_is_better=self.smaller_is_better,
            max_trials=self.max_trials,
            max_concurrent_trials=self.max_concurrent_trials,
            max_time=self.max_time,
            min_time=self.min_time,
            min_others=self.min_others,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianConfig(SearchConfig):
    """What the method needs."""

    max_trials: int
    max_concurrent_trials: int
    max_time: int
    min_time: int
    min_others: int

    kind: ClassVar[str] = "median_stopping"

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return MedianMethod(maker, self)

    def num_planned(self, space: Space) -> int:
        """Return the number of trials."""
        return self.max_trials


class MedianMethod(SearchMethod):
    """Create random trials, and stop those that are worse than the median."""

    def __init__(self, maker: TrialMaker, config: MedianConfig) -> None:
        self._maker = maker
        self._config = config
        self._num_counted = 0
        # Of each trial: the number of its reports, their sum, the best one and the last time.
        self._trials: dict[str, list[float]] = {}
        # The running means of all trials at each time, in order: each report adds one in O(log n).
        self._means: dict[float, list[float]] = {}

    def start(self) -> list[Operation]:
        """Return the operations that create the first trials."""
        number = min(self._config.max_trials, self._config.max_concurrent_trials)
        return [operation for _ in range(number) for operation in self._create()]

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Stop the trial if it is worse than the median of the others."""
        number, total, best, last_time = self._trials[request_id]
        if time <= last_time:
            # An attempt that was started again repeats what was told before.
            return []
        value = metric if self._config.smaller_is_better else -metric
        # What is not finite is worse than everything.
        value = max(-_WORST, min(value, _WORST)) if math.isfinite(value) else _WORST
        number, total, best = number + 1, total + value, min(best, value)
        self._trials[request_id] = [number, total, best, time]
        others = self._means.setdefault(time, [])
        is_early = time < self._config.min_time or len(others) < self._config.min_others
        is_worse = not is_early and best > _median(others)
        insort(others, total / number)
        is_over = is_worse or time >= self._config.max_time
        return [Stop(request_id=request_id)] if is_over else []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Create the next trial; one with invalid hyperparameters does not count."""
        if reason is ExitReason.INVALID_HP:
            self._num_counted -= 1
        return self._create() if self._num_counted < self._config.max_trials else []

    def num_trials(self, num_invalid: int) -> int:
        """Return the configured number: trials with invalid hyperparameters are replaced."""
        return self._config.max_trials

    def trained_share(self, time: float) -> float:
        """Return the part of the longest time."""
        return time / self._config.max_time

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {
            "num_counted": self._num_counted,
            "trials": {trial: list(facts) for trial, facts in self._trials.items()},
            "means": [[time, list(means)] for time, means in self._means.items()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot."""
        self._num_counted = snapshot["num_counted"]
        self._trials = {trial: list(facts) for trial, facts in snapshot["trials"].items()}
        self._means = {time: list(means) for time, means in snapshot["means"]}

    def _create(self) -> list[Operation]:
        self._num_counted += 1
        create = self._maker.sampled()
        self._trials[create.request_id] = [0, 0.0, _WORST, 0.0]
        return [create, Train(request_id=create.request_id, length=self._config.max_time)]


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
