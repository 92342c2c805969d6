"""The median stopping rule."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from paceline.search import _search_method as base

_WORST = 1e300


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianStoppingConfig(base.RandomConfig):
    """Configuration of the median stopping rule."""

    max_time: int
    min_time: int = 1
    """The time before which no trial is stopped."""
    min_others: int = 3
    """The other trials that must have reported at a time before one is stopped there."""

    kind: ClassVar[str] = "median_stopping"

    def __post_init__(self) -> None:
        base.RandomConfig.__post_init__(self)
        for name in ("max_time", "min_time", "min_others"):
            base.check_integer(name, getattr(self, name), least=1)

    def make_method(self, maker: base.TrialMaker) -> base.SearchMethod:
        """Return the method."""
        return MedianStoppingMethod(maker, self)


class MedianStoppingMethod(base.RandomMethod):
    """Random search that stops trials that are worse than the median of the others.

    A trial is stopped when the best value that it has reported is worse than the median of the
    running means that other trials had when they reported at the same time, after Golovin et al.,
    "Google Vizier: A Service for Black-Box Optimization" (KDD 2017), section 3.2. So trials must
    validate at the same times.
    """

    def __init__(self, maker: base.TrialMaker, config: MedianStoppingConfig) -> None:
        super().__init__(
            maker,
            max_trials=config.max_trials,
            max_concurrent_trials=config.max_concurrent_trials,
            length=config.max_time,
            is_invalid_replaced=True,
        )
        self._config = config
        # Of each trial: the number of its reports, their sum, the best one and the last time.
        self._reports: dict[str, list[float]] = {}
        # The running means of all trials at each time, in order: each report adds one in O(log n).
        self._means: dict[float, list[float]] = {}

    def reported(self, request_id: str, time: float, metric: float) -> list[base.Operation]:
        """Stop the trial if it is worse than the median of the others."""
        config = self._config
        number, total, best, last = self._reports.get(request_id, (0, 0.0, _WORST, -math.inf))
        if time <= last:
            # An attempt that was started again repeats what was told before.
            return []
        value = metric if config.smaller_is_better else -metric
        # What is not finite is worse than everything.
        value = max(-_WORST, min(value, _WORST)) if math.isfinite(value) else _WORST
        number, total, best = number + 1, total + value, min(best, value)
        self._reports[request_id] = [number, total, best, time]
        others = self._means.setdefault(time, [])
        is_early = time < config.min_time or len(others) < config.min_others
        is_worse = not is_early and best > median(others)
        insort(others, total / number)
        return [base.Stop(request_id=request_id)] if is_worse or time >= config.max_time else []

    def trained_share(self, time: float) -> float:
        """Return the part of the longest time."""
        return time / self._config.max_time

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {
            **super().snapshot(),
            "reports": {trial: list(facts) for trial, facts in self._reports.items()},
            "means": [[time, list(means)] for time, means in self._means.items()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """
        super().load(snapshot)
        self._reports = {trial: list(facts) for trial, facts in snapshot["reports"].items()}
        self._means = {time: list(means) for time, means in snapshot["means"]}
