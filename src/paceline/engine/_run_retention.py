"""Deleting the checkpoints of a run that are no longer wanted."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline import core
from paceline.engine._best_validation import BestValidation
from paceline.engine._retention import Kept, KeptCheckpoints
from paceline.journal import RunDirectory
from paceline.storage import CheckpointNotFoundError

logger = logging.getLogger(__name__)


class Retention:
    """Keep the newest and the best checkpoints of a run; for the chief.

    Args:
        core_context: The core context.
        best_validation: How good a validation is.
        keep_latest: How many of the newest to keep; None for no such rule.
        keep_best: How many of the best to keep; None for no such rule.
    """

    def __init__(
        self,
        core_context: core.Context,
        best_validation: BestValidation,
        keep_latest: int | None,
        keep_best: int | None,
    ) -> None:
        self._core = core_context
        self._best_validation = best_validation
        self._scores: dict[int, float | None] = {}
        run = RunDirectory(core_context.run_dir)
        for row in core.read_metrics(run, "validation"):
            if not row.is_superseded:
                self.note_validation(row.steps_completed, row.metrics)
        existing = [
            self._scored(stored.uuid, stored.steps_completed)
            for stored in core.read_checkpoints(run)
        ]
        self._kept = KeptCheckpoints(
            existing, keep_latest=keep_latest, keep_best=keep_best, delete=self._delete
        )

    def note_validation(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Take in how good the state at a step is."""
        self._scores[steps_completed] = self._best_validation.score(metrics)

    def note_checkpoint(self, uuid: str) -> None:
        """Take in a new checkpoint, and delete what no rule keeps any more."""
        steps = self._core.checkpoint.get_metadata(uuid)["steps_completed"]
        self._kept.add(self._scored(uuid, steps))

    def _delete(self, kept: Kept) -> None:
        logger.info("Deleting the checkpoint of step %d.", kept.steps_completed)
        # Someone else may have removed it.
        with suppress(CheckpointNotFoundError):
            self._core.checkpoint.delete(kept.uuid)

    def _scored(self, uuid: str, steps_completed: int) -> Kept:
        return Kept(uuid, steps_completed, self._scores.get(steps_completed))
