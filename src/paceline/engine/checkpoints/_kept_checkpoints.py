"""The checkpoints of a run that its rules keep; the others are deleted."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline import core
from paceline.engine.checkpoints._best_validation import BestValidation
from paceline.journal import CheckpointStored, RunDirectory
from paceline.storage import (
    CheckpointError,
    CheckpointNotFoundError,
    Kept,
    RetentionRules,
    to_delete,
)

logger = logging.getLogger(__name__)


class KeptCheckpoints:
    """The checkpoints of a run that exist; those that its rules do not keep are deleted.

    Args:
        existing: What exists at first, in the order of storing.
        rules: What to keep.
        delete: Deletes one. If it raises a CheckpointError or OSError, training goes on, and it is
            called again with the next checkpoint.
    """

    def __init__(
        self, existing: Iterable[Kept], *, rules: RetentionRules, delete: Callable[[Kept], None]
    ) -> None:
        self._existing = list(existing)
        self._rules = rules
        self._delete = delete

    @property
    def uuids(self) -> list[str]:
        """The checkpoints that exist, the newest last."""
        return [kept.uuid for kept in self._existing]

    def add(self, checkpoint: Kept) -> None:
        """Take in a new one, and delete what the rules do not keep any more."""
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

    def kept_of(self, uuids: Iterable[str]) -> list[str]:
        """Return those of some checkpoints that exist, in their order."""
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
