"""A search method from outside the package: the median stopping rule.

A trial is stopped when the best value that it has reported is worse than the median of the other
trials' running means up to the same time, after Golovin et al., "Google Vizier: A Service for
Black-Box Optimization" (KDD 2017), section 3.2.
"""

import math
from dataclasses import dataclass
from statistics import fmean, median
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
        # The reports of each trial: pairs of the time and the value, smaller is better.
        self._reports: dict[str, list[list[float]]] = {}

    def start(self) -> list[Operation]:
        """Return the operations that create the first trials."""
        number = min(self._config.max_trials, self._config.max_concurrent_trials)
        return [operation for _ in range(number) for operation in self._create()]

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Stop the trial if it is worse than the median of the others."""
        value = metric if self._config.smaller_is_better else -metric
        own = self._reports[request_id]
        # NaN is worse than everything. Infinities have no mean, and JSON does not know them.
        own.append([time, _WORST if math.isnan(value) else max(-_WORST, min(value, _WORST))])
        if time >= self._config.max_time:
            return [Stop(request_id=request_id)]
        means = [
            fmean(value for at, value in reports if at <= time)
            for other, reports in self._reports.items()
            if other != request_id and reports and reports[0][0] <= time
        ]
        if time < self._config.min_time or len(means) < self._config.min_others:
            return []
        is_worse = min(value for _, value in own) > median(means)
        return [Stop(request_id=request_id)] if is_worse else []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Create the next trial; one with invalid hyperparameters does not count."""
        if reason is ExitReason.INVALID_HP:
            self._num_counted -= 1
            del self._reports[request_id]
        return self._create() if self._num_counted < self._config.max_trials else []

    def num_trials(self, num_invalid: int) -> int:
        """Return the configured number: trials with invalid hyperparameters are replaced."""
        return self._config.max_trials

    def trained_share(self, time: float) -> float:
        """Return the part of the longest time."""
        return time / self._config.max_time

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        reports = {trial: list(pairs) for trial, pairs in self._reports.items()}
        return {"num_counted": self._num_counted, "reports": reports}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot."""
        self._num_counted = snapshot["num_counted"]
        self._reports = {trial: list(pairs) for trial, pairs in snapshot["reports"].items()}

    def _create(self) -> list[Operation]:
        self._num_counted += 1
        create = self._maker.sampled()
        self._reports[create.request_id] = []
        return [create, Train(request_id=create.request_id, length=self._config.max_time)]
