"""Deleting the checkpoints of a run that are no longer wanted."""

import logging
from collections.abc import Mapping
from typing import Any

from paceline import core
from paceline.engine._best_validation import BestValidation
from paceline.engine._retention import KeptCheckpoints
from paceline.journal import CheckpointStored, RunDirectory
from paceline.storage import Kept, RetentionRules

logger = logging.getLogger(__name__)


class Retention:
    """Keep the checkpoints of a run that its rules ask for; for the chief.

    Args:
        core_context: The core context.
        best_validation: How good a validation is.
        rules: What to keep.
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
        """Take in a new checkpoint, and delete what the rules do not keep any more.

        It may be called in another thread than `note_validation`.
        """
        self._kept.add(self._scored(stored))

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
