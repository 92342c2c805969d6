"""The median stopping rule."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from paceline.search import _grid_random_single as simple
from paceline.search import _search_messages as messages
from paceline.search import _search_method as base

_WORST = 1e300


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianStoppingConfig(simple.RandomConfig):
    """Configuration of the median stopping rule."""

    max_time: int
    min_time: int = 1
    """The time before which no trial is stopped."""
    min_others: int = 3
    """The other trials that must have reported at a time before one is stopped there."""

    kind: ClassVar[str] = "median_stopping"

    def __post_init__(self) -> None:
        simple.RandomConfig.__post_init__(self)
        for name in ("max_time", "min_time", "min_others"):
            base.check_integer(name, getattr(self, name), least=1)

    def make_method(self, maker: base.TrialMaker) -> base.SearchMethod:
        """Return the method."""
        return MedianStoppingMethod(maker, self)


class MedianStoppingMethod(simple.RandomMethod):
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
        self._means = [_RunningMeans() for _ in config.metrics]

    def reported(self, request_id: str, time: float, metric: float) -> list[messages.Operation]:
        """Stop the trial if it is worse than the median of the others."""
        loss = metric if self._config.smaller_is_better else -metric
        return self.reported_several(request_id, time, (loss,))

    def reported_several(
        self, request_id: str, time: float, losses: tuple[float, ...]
    ) -> list[messages.Operation]:
        """Stop the trial if it is worse than the median of the others in every objective."""
        config = self._config
        if time <= self._means[0].last_time(request_id):
            # An attempt that was started again repeats what was told before.
            return []
        least = math.inf if time < config.min_time else config.min_others
        if not all(map(math.isfinite, losses)):
            # What is not finite in one objective counts as that in all.
            losses = (math.inf,) * len(losses)
        worse = [
            means.add(request_id, time, loss, least)
            for means, loss in zip(self._means, losses, strict=True)
        ]
        is_over = all(worse) or time >= config.max_time
        return [messages.Stop(request_id=request_id)] if is_over else []

    def trained_share(self, time: float) -> float:
        """Return the part of the longest time."""
        return time / self._config.max_time

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        first, *others = (means.snapshot() for means in self._means)
        return {**super().snapshot(), **first, **({"others": others} if others else {})}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """
        super().load(snapshot)
        stored = [snapshot, *snapshot.get("others", ())]
        for means, one in zip(self._means, stored, strict=True):
            means.load(one)


class _RunningMeans:
    """What trials have reported of one objective."""

    def __init__(self) -> None:
        # Of each trial: the number of its reports, their sum, the best one and the last time.
        self._reports: dict[str, list[float]] = {}
        # The running means of all trials at each time, in order: each report adds one in O(log n).
        self._means: dict[float, list[float]] = {}

    def last_time(self, request_id: str) -> float:
        found = self._reports.get(request_id)
        return -math.inf if found is None else found[3]

    def add(self, request_id: str, time: float, loss: float, least: float) -> bool:
        """Add a report; return whether its trial is worse than the median of at least `least`."""
        number, total, best, _ = self._reports.get(request_id, (0, 0.0, _WORST, 0.0))
        # What is not finite is worse than everything.
        loss = max(-_WORST, min(loss, _WORST)) if math.isfinite(loss) else _WORST
        number, total, best = number + 1, total + loss, min(best, loss)
        self._reports[request_id] = [number, total, best, time]
        others = self._means.setdefault(time, [])
        is_worse = len(others) >= least and best > median(others)
        insort(others, total / number)
        return is_worse

    def snapshot(self) -> dict[str, Any]:
        return {
            "reports": {trial: list(facts) for trial, facts in self._reports.items()},
            "means": [[time, list(means)] for time, means in self._means.items()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        self._reports = {trial: list(facts) for trial, facts in snapshot["reports"].items()}
        self._means = {time: list(means) for time, means in snapshot["means"]}
