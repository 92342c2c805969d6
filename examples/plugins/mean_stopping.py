"""A search method from outside the package: trials that are worse than the mean are stopped.

A trial is stopped when the best value that it has reported is worse than the mean of the values
that other trials reported at the same time. So trials must validate at the same times.
"""

import math
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


class MeanStopping(Searcher):
    """The `searcher` section of a config with ``name: mean_stopping``."""

    wants_reports = True

    name: Literal["mean_stopping"] = Field(default="mean_stopping", description="Search method.")
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

    def search_config(self) -> "MeanConfig":
        """Return the method's configuration."""
        return MeanConfig(
            metric=self.metric,
            smaller_is_better=self.smaller_is_better,
            max_trials=self.max_trials,
            max_concurrent_trials=self.max_concurrent_trials,
            max_time=self.max_time,
            min_time=self.min_time,
            min_others=self.min_others,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanConfig(SearchConfig):
    """What the method needs."""

    max_trials: int
    max_concurrent_trials: int
    max_time: int
    min_time: int
    min_others: int

    kind: ClassVar[str] = "mean_stopping"

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return MeanMethod(maker, self)

    def num_planned(self, space: Space) -> int:
        """Return the number of trials."""
        return self.max_trials


class MeanMethod(SearchMethod):
    """Create random trials, and stop those that are worse than the mean."""

    def __init__(self, maker: TrialMaker, config: MeanConfig) -> None:
        self._maker = maker
        self._config = config
        self._num_counted = 0
        # Of each trial: its best value and the last time.
        self._trials: dict[str, tuple[float, float]] = {}
        # At each time: the number of the values and their sum.
        self._values: dict[float, tuple[int, float]] = {}

    def start(self) -> list[Operation]:
        """Return the operations that create the first trials."""
        number = min(self._config.max_trials, self._config.max_concurrent_trials)
        return [operation for _ in range(number) for operation in self._create()]

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Stop the trial if it is worse than the mean of the others."""
        best, last_time = self._trials[request_id]
        if time <= last_time:
            # An attempt that was started again repeats what was told before.
            return []
        value = metric if self._config.smaller_is_better else -metric
        # What is not finite is worse than everything.
        value = value if math.isfinite(value) else _WORST
        best = min(best, value)
        self._trials[request_id] = best, time
        number, total = self._values.get(time, (0, 0.0))
        is_early = time < self._config.min_time or number < self._config.min_others
        is_worse = not is_early and best > total / number
        if value < _WORST:
            self._values[time] = number + 1, total + value
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
            "values": [[time, *facts] for time, facts in self._values.items()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot."""
        self._num_counted = snapshot["num_counted"]
        self._trials = {trial: (best, last) for trial, (best, last) in snapshot["trials"].items()}
        self._values = {time: (number, total) for time, number, total in snapshot["values"]}

    def _create(self) -> list[Operation]:
        self._num_counted += 1
        create = self._maker.sampled()
        self._trials[create.request_id] = _WORST, 0.0
        return [create, Train(request_id=create.request_id, length=self._config.max_time)]
