"""Checkpoints that a rank saves when its own loop asks for them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline import core
from paceline.engine.checkpoints._background_saver import CheckpointSaver
from paceline.engine.checkpoints._kept_checkpoints import KeptCheckpoints
from paceline.engine.train_functions._rank_comparison import RankComparison
from paceline.engine.train_functions._rank_reporter import RankReporter
from paceline.journal import RunDirectory
from paceline.storage import CheckpointStorage, Kept, RetentionRules

logger = logging.getLogger(__name__)

# How long parts of other ranks are waited for after an error, in seconds.
_FINISH_S = 1.0


class RankCheckpoints:
    """A rank's part of each checkpoint, stored in the background; the chief commits whole ones.

    Checkpoints are numbered from 1. All ranks that store parts are expected to save equally many.

    Args:
        run: Where checkpoints are noted that are being written.
        storage: Where they go.
        reporter: The rank's journal.
        rank: The rank.
        world_size: The number of ranks.
        local_size: The ranks of this machine.
        existing: The checkpoints that are there, from before.
        rules: Which ones the chief keeps.
        is_score_minimized: Whether a smaller score is better.
        comparison: What compares the ranks before a checkpoint exists.

    Attributes:
        num_saves: How many this rank has saved.
    """

    def __init__(
        self,
        run: RunDirectory,
        storage: CheckpointStorage,
        reporter: RankReporter,
        *,
        rank: int,
        world_size: int,
        local_size: int,
        existing: Iterable[Kept],
        rules: RetentionRules,
        is_score_minimized: bool,
        comparison: RankComparison,
    ) -> None:
        self.num_saves = 0
        self._run = run
        self._storage = storage
        self._reporter = reporter
        self._rank = rank
        self._is_score_minimized = is_score_minimized
        self._comparison = comparison
        storage.watch(partial(reporter.record_store_state, storage.url))
        self._saver = CheckpointSaver(rank, local_size)
        self._parts = core.CheckpointParts(
            run, storage, rank=rank, world_size=world_size, commit=self._commit
        )
        existing = map(self._by_quality, existing)
        self._kept = KeptCheckpoints(existing, rules=rules, delete=self._delete)

    @property
    def num_pending(self) -> int:
        """How many of this rank's checkpoints wait for parts of others."""
        return self._parts.num_pending

    def begin(self) -> int:
        """Wait for the part that is being stored, check it, and return the next number.

        Raises:
            CheckpointWriteError: Training must not go on without what could not be stored.
            RanksDifferError: Ranks differ in what they must have alike.
        """
        self.settle()
        self._parts.check()
        self._comparison.compare_start()
        self._reporter.begin()
        return self.num_saves + 1

    def save(
        self,
        parts: dict[str, Any],
        metadata: Mapping[str, Any],
        write_more: Callable[[Path], None],
        num_parts: int,
    ) -> None:
        """Copy this rank's part of the next checkpoint, and store it in the background.

        Args:
            parts: Names of files to nested states, some of them `StateInPieces`.
            metadata: The checkpoint's "uuid" and "score", and what else is known of it.
            write_more: Called in the thread with the directory before the part is complete.
            num_parts: The first ranks, which store a part; the others do nothing.
        """
        self.num_saves += 1
        if self._rank >= num_parts:
            return
        self._comparison.leave(_digest_name(self.num_saves))
        reporter = self._reporter
        known = {
            "number": self.num_saves,
            "steps_completed": reporter.steps_completed,
            "num_reports": reporter.num_reports,
            "world_size": num_parts,
            "metrics": reporter.last_metrics,
        }
        destination = self._parts.store(
            metadata["uuid"], {**known, **metadata}, num_parts=num_parts
        )
        self._saver.save(parts, destination, write_more, self._storage.file_sender)

    def settle(self) -> None:
        """Wait until this rank's newest part is stored."""
        self._saver.settle()

    def finish(self, error: BaseException | None) -> None:
        """Wait until this rank's parts are stored; after an error a moment for those of others.

        Raises:
            CheckpointWriteError: A part could not be stored.
            RanksDifferError: They differ in what they must have alike.
        """
        try:
            self._saver.finish()
            if error is None:
                self._parts.check()
                self._comparison.compare_start()
            if error is not None:
                self._parts.finish(0, _FINISH_S)
        except Exception:
            if error is None:
                raise
            # The error of the user's function is the one to raise.
            logger.exception("A checkpoint could not be stored.")

    def await_commits(self, num_expected: int, timeout_s: float) -> None:
        """Wait until so many checkpoints exist, but not for longer."""
        self._parts.finish(self.num_saves - num_expected, timeout_s)

    def close(self) -> None:
        """Give up what waits for parts of other ranks."""
        self._parts.close()
        self._storage.watch(None)

    def _commit(self, uuid: str, metadata: dict[str, Any]) -> None:
        self._comparison.compare(_digest_name(metadata["number"]), metadata["world_size"])
        journal = self._reporter.journal
        core.commit_checkpoint(
            self._run, self._storage, journal, uuid, metadata, num_shards=metadata["world_size"]
        )
        kept = Kept(uuid, metadata["steps_completed"], metadata["score"])
        self._kept.add(self._by_quality(kept))

    def _by_quality(self, kept: Kept) -> Kept:
        """Return a checkpoint with a larger score the better it is."""
        if kept.score is None or not self._is_score_minimized:
            return kept
        return kept._replace(score=-kept.score)

    def _delete(self, kept: Kept) -> None:
        core.delete_checkpoint(self._run, self._storage, self._reporter.journal, kept.uuid)


def _digest_name(number: int) -> str:
    return f"checkpoint {number}"
