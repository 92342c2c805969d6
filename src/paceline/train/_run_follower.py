"""Reader of the workers' journals, for the driver."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline import core
from paceline.journal import (
    CheckpointDeleted,
    CheckpointStored,
    JournalKey,
    MetricsReported,
    RunDirectory,
    RunTail,
)
from paceline.storage import CheckpointStorage, Kept
from paceline.train._checkpoint import Checkpoint
from paceline.train._config import CheckpointStrategy
from paceline.train._results import Report, report_of
from paceline.train._run_callbacks import TrainingCallback
from paceline.workers.runs import METRICS_GROUP, StoredAt

_ENTRIES = 1000


class RunFollower:
    """Read the journals of a run, from now on, and tell callbacks of what is new.

    Args:
        run: The run directory.
        callbacks: Who is told.
        storage: Where the run has the checkpoints of its earlier attempts, if it goes on from them.

    Attributes:
        checkpoints: The checkpoints that exist by their UUID, oldest first.
        lags_s: For each rank the longest time from a report to here, in seconds.
        num_commits: How many checkpoints were committed.
    """

    def __init__(
        self,
        run: RunDirectory,
        callbacks: Sequence[TrainingCallback],
        storage: CheckpointStorage | None = None,
    ) -> None:
        self.checkpoints = {} if storage is None else dict(_earlier_checkpoints(run, storage))
        self.lags_s: dict[int, float] = {}
        self.num_commits = 0
        self._callbacks = callbacks
        self._taken: list[Report] = []
        # The journals that are there already are passed over.
        self._tail = RunTail(run, dict.fromkeys(run.journal_keys(), 1 << 62))

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return list(self.checkpoints.values())[-1] if self.checkpoints else None

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The checkpoints that exist, as the chief has to know them."""
        return tuple(
            Kept(c.uuid, int(c.metadata["steps_completed"]), c.score)
            for c in self.checkpoints.values()
        )

    def best_checkpoint(self, strategy: CheckpointStrategy) -> Checkpoint | None:
        """Return the best checkpoint by a strategy, the newest if it names no value."""
        if strategy.checkpoint_score_attribute is None:
            return self.latest_checkpoint
        scored = [(c.score, c) for c in self.checkpoints.values() if c.score is not None]
        sign = 1 if strategy.checkpoint_score_order == "max" else -1
        # Of equals the earlier one.
        best = max(scored, key=lambda pair: sign * pair[0], default=None)
        return None if best is None else best[1]

    def next_start(self, first: StoredAt | None) -> StoredAt | None:
        """Return what workers that follow lost ones go on from: what is newer than `first`."""
        latest = self.latest_checkpoint
        if latest is None or not self.num_commits:
            return first
        return StoredAt(latest.storage, latest.uuid)

    @property
    def has_reports(self) -> bool:
        """Whether `take_reports` has something to return."""
        return bool(self._taken)

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self._taken = self._taken, []
        return reports

    def follow(self) -> None:
        """Take in what the workers have written since the last call."""
        num_read = _ENTRIES
        while num_read == _ENTRIES:
            num_read = 0
            for key, entries in self._tail.read(_ENTRIES):
                num_read += len(entries)
                now = time.time()
                for entry in entries:
                    self._take(key, entry.decode(), now)

    def _take(self, key: JournalKey, record: Any, now: float) -> None:
        if isinstance(record, MetricsReported):
            if record.group != core.group_of_rank(METRICS_GROUP, key.rank):
                return
            report = report_of(key, record, max(0.0, now - record.time))
            self.lags_s[key.rank] = max(self.lags_s.get(key.rank, 0.0), report.lag_s)
            self._taken.append(report)
            for callback in self._callbacks:
                callback.handle_result(report)
        elif isinstance(record, CheckpointStored):
            checkpoint = Checkpoint(
                uuid=record.uuid, storage=record.storage, metadata=record.metadata
            )
            self.checkpoints[record.uuid] = checkpoint
            self.num_commits += 1
            for callback in self._callbacks:
                callback.handle_checkpoint(checkpoint)
        elif isinstance(record, CheckpointDeleted):
            self.checkpoints.pop(record.uuid, None)


def _earlier_checkpoints(
    run: RunDirectory, storage: CheckpointStorage
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield what train functions have stored in a run and is still there, by its UUID."""
    for stored in core.read_checkpoints(run):
        # A run directory may hold checkpoints of other doors.
        if "num_shards" in stored.metadata and storage.exists(stored.uuid):
            yield (
                stored.uuid,
                Checkpoint(uuid=stored.uuid, storage=storage.url, metadata=stored.metadata),
            )
