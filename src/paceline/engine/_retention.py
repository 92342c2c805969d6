"""The checkpoints of a run that are kept; the others are deleted."""

import logging
import time
from collections.abc import Callable, Iterable

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
        delete: Deletes one. If it raises a CheckpointError, training goes on, and it is called
            again with the next checkpoint.
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
            except CheckpointError as error:
                logger.warning("A checkpoint is not deleted before the next one. %s", error)
                continue
            self._existing.remove(kept)
