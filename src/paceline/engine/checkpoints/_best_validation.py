"""Which validations deserve a checkpoint."""

from collections.abc import Mapping
from math import isfinite
from typing import Any


class BestValidation:
    """Decide which validations ask for a checkpoint.

    Args:
        policy: "best", "all" or "none".
        metric: The metric to judge by; without one "best" works as "all".
        is_smaller_better: Whether smaller values are better.
    """

    def __init__(
        self, policy: str = "best", metric: str | None = None, is_smaller_better: bool = True
    ) -> None:
        self.policy = policy
        self.metric = metric
        self.is_smaller_better = is_smaller_better
        self.best: float | None = None
        self.best_metrics: dict[str, Any] | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "BestValidation":
        """Return what `state` has told, also as a part of a larger state."""
        made = cls("best", *state.get("judged_by", (None, True)))
        made.best, made.best_metrics = state["best"], state["best_metrics"]
        return made

    def state(self) -> dict[str, Any]:
        """Return the best so far and what it was judged by."""
        return {
            "best": self.best,
            "best_metrics": self.best_metrics,
            "judged_by": [self.metric, self.is_smaller_better],
        }

    def carry_on(self, earlier: "BestValidation") -> None:
        """Take over the best so far, unless it was judged by another metric."""
        if (earlier.metric, earlier.is_smaller_better) == (self.metric, self.is_smaller_better):
            self.best, self.best_metrics = earlier.best, earlier.best_metrics

    def wants_checkpoint(self, metrics: Mapping[str, Any]) -> bool:
        """Take a validation's metrics in and tell whether they deserve a checkpoint.

        Raises:
            ValueError: The policy is "best" and the metric was not returned or is no number.
        """
        is_best = self.metric is not None and self._is_new_best(metrics)
        if self.policy == "best" and self.metric is not None:
            return is_best
        return self.policy != "none"

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return how good a validation is, larger is better; None if the metric cannot tell."""
        value = None if self.metric is None else _number(metrics.get(self.metric))
        if value is None or not isfinite(value):
            return None
        return -value if self.is_smaller_better else value

    def _is_new_best(self, metrics: Mapping[str, Any]) -> bool:
        assert self.metric is not None
        if self.metric not in metrics:
            if self.policy != "best":
                return False
            raise ValueError(
                f"The policy 'best' needs the metric {self.metric!r}, but the validation returned"
                f" {sorted(metrics)}."
            )
        value = _number(metrics[self.metric])
        if value is None and self.policy == "best":
            raise ValueError(
                f"The policy 'best' needs the metric {self.metric!r} to be a number, but the"
                f" validation returned {metrics[self.metric]!r}. Hint: return a float."
            )
        if value is None or not isfinite(value):
            return False
        is_better = self.best is None or (
            value < self.best if self.is_smaller_better else value > self.best
        )
        if is_better:
            self.best, self.best_metrics = value, dict(metrics)
        return is_better


def _number(value: Any) -> float | None:
    """Return a number, such as one of NumPy's or in a tensor, as a float; None for all else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
