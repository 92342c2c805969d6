"""Which checkpoints of a run are stored for their validation, and which are kept."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

from paceline import core
from paceline._base.journal_records import CheckpointStored
from paceline._base.run_directory import RunDirectory
from paceline.storage._checkpoint_files import CheckpointError, CheckpointNotFoundError
from paceline.storage._checkpoint_storage import Kept, RetentionRules, to_delete

logger = logging.getLogger(__name__)


class BestValidation:
    """Best validation so far, deciding for each new validation whether to store a checkpoint.

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
        """Return the object recorded by `state`, also from within a larger state."""
        made = cls("best", *state["judged_by"])
        made.best, made.best_metrics = state["best"], state["best_metrics"]
        return made

    def state(self) -> dict[str, Any]:
        """Return the best metrics so far, with the metric and the direction of comparison."""
        return {
            "best": self.best,
            "best_metrics": self.best_metrics,
            "judged_by": [self.metric, self.is_smaller_better],
        }

    def carry_on(self, earlier: "BestValidation") -> None:
        """Take over the best metrics of `earlier`, unless judged by another metric."""
        if (earlier.metric, earlier.is_smaller_better) == (self.metric, self.is_smaller_better):
            self.best, self.best_metrics = earlier.best, earlier.best_metrics

    def wants_checkpoint(self, metrics: Mapping[str, Any]) -> bool:
        """Take a validation's metrics in and return whether they deserve a checkpoint.

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
    """Return a number (also of NumPy or in a tensor) as a float; None for other values."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class KeptCheckpoints:
    """Existing checkpoints of a run; checkpoints not kept by the rules are deleted.

    Args:
        existing: What exists at first, in the order of storing.
        rules: The checkpoints to keep.
        delete: Deletes one. If it raises a CheckpointError or OSError, training continues, and it
            is called again with the next checkpoint.
    """

    def __init__(
        self, existing: Iterable[Kept], *, rules: RetentionRules, delete: Callable[[Kept], None]
    ) -> None:
        self._existing = list(existing)
        self._rules = rules
        self._delete = delete

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of the existing checkpoints, the newest last."""
        return [kept.uuid for kept in self._existing]

    def add(self, checkpoint: Kept) -> None:
        """Add a new checkpoint, and delete checkpoints no longer kept by the rules."""
        self._existing.append(checkpoint)
        for kept in to_delete(self._existing, self._rules, now_s=time.time()):
            try:
                self._delete(kept)
            except CheckpointNotFoundError:
                # Someone else has removed it.
                pass
            except (CheckpointError, OSError) as error:
                logger.warning("A checkpoint is not deleted before the next one. %s", error)
                continue
            self._existing.remove(kept)


class CheckpointRetention:
    """Retention of a run's checkpoints by the rules; used on the chief only.

    Args:
        core_context: The core context.
        best_validation: How good a validation is.
        rules: The checkpoints to keep.
    """

    def __init__(
        self, core_context: core.Context, best_validation: BestValidation, rules: RetentionRules
    ) -> None:
        self._core = core_context
        self._best_validation = best_validation
        self._scores: dict[int, float | None] = {}
        run = RunDirectory(core_context.run_dir)
        for row in core.read_metrics(run, "validation"):
            if not row.is_superseded:
                self.note_validation(row.steps_completed, row.metrics)
        existing = [self._scored(stored) for stored in core.read_checkpoints(run)]
        self._kept = KeptCheckpoints(existing, rules=rules, delete=self._delete)

    def note_validation(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Take in how good the state at a step is."""
        self._scores[steps_completed] = self._best_validation.score(metrics)

    def note_checkpoint(self, stored: CheckpointStored) -> None:
        """Add a new checkpoint, and delete checkpoints no longer kept by the rules.

        It may be called in another thread than `note_validation`.
        """
        self._kept.add(self._scored(stored))

    def kept_of(self, uuids: Iterable[str]) -> list[str]:
        """Return the still existing checkpoints of `uuids`, in the given order."""
        existing = {*self._kept.uuids}
        return [uuid for uuid in uuids if uuid in existing]

    def _delete(self, kept: Kept) -> None:
        logger.debug("Deleting the checkpoint of step %d.", kept.steps_completed)
        self._core.checkpoint.delete(kept.uuid)

    def _scored(self, stored: CheckpointStored) -> Kept:
        return Kept(
            stored.uuid,
            stored.steps_completed,
            self._scores.get(stored.steps_completed),
            sum(stored.resources.values()),
            stored.time,
        )
