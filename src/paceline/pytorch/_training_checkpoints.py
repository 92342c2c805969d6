"""Checkpoints of a training: when they are stored, committed and deleted."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline._base.journal_records import CheckpointStored
from paceline._base.run_directory import RunDirectory
from paceline._training.engine.checkpoints.checkpoint_saver import (
    BestValidation,
    CheckpointRetention,
    CheckpointSaver,
    Destination,
)
from paceline.core._core_context import Context
from paceline.core._read_runs import read_checkpoints
from paceline.core._run_storage import failing_together
from paceline.pytorch._memory_checkpoints import MemoryCheckpoints
from paceline.storage._checkpoint_errors import CheckpointWriteError
from paceline.storage._checkpoint_storage import series_uuid
from paceline.storage._retention_rules import RetentionRules
from paceline.storage._uploads import UploadLimits

logger = logging.getLogger(__name__)

ContinuousPeriod: TypeAlias = Literal["continuous"]
"""A checkpoint period: the next checkpoint begins when the last one is stored."""

CONTINUOUS: ContinuousPeriod = "continuous"

_HOUR_S = 3600.0
# Delay before a retry: storage that fails at once would fail twice more within a moment, and
# the third failure ends training.
_RETRY_S = 60.0


class ContinuousSaves:
    """Pacing of continuous checkpoints, by a byte limit and a delay after failures.

    Args:
        bytes_per_hour: How many bytes to store in an hour at most, on average since the last
            checkpoint: each begins later by the share of the hour that the last one has used. None
            for no limit.
    """

    def __init__(self, bytes_per_hour: int | None = None) -> None:
        self._seconds_per_byte = 0.0 if bytes_per_hour is None else _HOUR_S / bytes_per_hour
        self._begun_s = self._next_s = 0.0
        self._retry_s: float | None = None

    def carry_on(self, num_bytes: int, stored_s: float) -> None:
        """Take in the last checkpoint of an earlier process of the run.

        Args:
            num_bytes: Its size.
            stored_s: When it was stored, in seconds since the epoch.
        """
        self._next_s = time.monotonic() + num_bytes * self._seconds_per_byte
        # Negative ages are ignored: the clock may have been set back.
        self._next_s -= max(time.time() - stored_s, 0.0)

    def is_due(self, *, is_newest_lost: bool) -> bool:
        """Return whether the next checkpoint is due, given no other being stored.

        Args:
            is_newest_lost: Whether the newest one could not be stored.
        """
        now = time.monotonic()
        if is_newest_lost:
            if self._retry_s is None:
                self._retry_s = now + _RETRY_S
            if now < self._retry_s:
                return False
        return now >= self._next_s

    def note_begun(self) -> None:
        """Record the beginning of any checkpoint, for pacing."""
        self._begun_s, self._retry_s = time.monotonic(), None

    def note_stored(self, num_bytes: int) -> None:
        """Record the size of the last stored checkpoint."""
        self._next_s = max(self._next_s, self._begun_s) + num_bytes * self._seconds_per_byte


# Time limit of the chief for other ranks' parts of a checkpoint, in seconds, besides the time
# that an object store may take to answer.
_PARTS_S = 60.0
_STORE_TRIES = 3
# After an error other ranks may be gone, and their parts will never come.
_PARTS_AFTER_ERROR_S = 1.0
_MUST_STORE = "All ranks must store their parts of a checkpoint"


class CommittedCheckpoints:
    """New checkpoints on the chief: recorded by the thread that commits them.

    The committing thread knows these and no training: with a way back to it, a finished training
    would keep its models' memory.

    Attributes:
        news: The records that training has not seen yet, oldest first.
        retention: Which checkpoints to keep; None for all.
    """

    def __init__(self) -> None:
        self.news: list[CheckpointStored] = []
        self.retention: CheckpointRetention | None = None

    def add(self, stored: CheckpointStored) -> None:
        """Record a checkpoint, and delete those no longer kept."""
        self.news.append(stored)
        if self.retention is not None:
            self.retention.note_checkpoint(stored)


class TrainingCheckpoints:
    """Checkpoints of a training: each rank stores its part, the chief commits them.

    Args:
        core: The core context.
        on_stored: Called with the UUID of each checkpoint that exists: at once on a chief that is
            alone, else on every rank in the batch after the next checkpoint.

    Attributes:
        uuids: Checkpoints of the present call of `fit`, oldest first, as far as this rank knows.
        latest: The newest there is, also from before; empty without one.
        continuous: When the next one of continuous checkpoints begins.
        memory: The saver of states to memory between checkpoints, or None.
    """

    def __init__(self, core: Context, on_stored: Callable[[str], None]) -> None:
        self.uuids: list[str] = []
        self.latest = ""
        self.continuous = ContinuousSaves()
        self.memory: MemoryCheckpoints | None = None
        self._core = core
        self._distributed = core.distributed
        self._on_stored = on_stored
        self._saver = CheckpointSaver(core.distributed.rank, core.distributed.local_size)
        self._committed = CommittedCheckpoints()
        self._parts = core.checkpoint.parts(self._committed.add)
        self._series = ""
        self._num_saves = self._num_announced = 0

    @property
    def retention(self) -> CheckpointRetention | None:
        """Retention rule on the chief; None to keep all."""
        return self._committed.retention

    @property
    def _is_newest_lost(self) -> bool:
        return self._saver.is_newest_lost or self._parts.is_newest_lost

    def begin_series(self) -> None:
        """Agree on the names of the next checkpoints; collective over all ranks."""
        is_chief = self._distributed.rank == 0
        series = self._parts.new_series() if is_chief else ""
        self._series = self._distributed.broadcast(series)

    def forget_uuids(self) -> None:
        """Forget the checkpoints of an earlier call of `fit`."""
        self.uuids, self._num_announced = [], 0

    def kept_uuids(self) -> list[str]:
        """Return the existing checkpoints of the present `fit` call; all ranks call this."""
        uuids = self.uuids if self.retention is None else self.retention.kept_of(self.uuids)
        return self._distributed.broadcast(uuids)

    def keep(self, best_validation: BestValidation, rules: RetentionRules) -> None:
        """Set the chief's rules for deleting checkpoints; ignored under a master's own rules."""
        self._committed.retention = None
        if rules.is_empty or self._distributed.rank:
            return
        if self._core.info is not None and self._core.info.cluster_id:
            logger.info("The checkpoints to keep are those of the master's rules.")
            return
        self._committed.retention = CheckpointRetention(self._core, best_validation, rules)

    def pace(self, bytes_per_hour: int | None) -> None:
        """Have continuous checkpoints take no more bytes than allowed; None for no limit."""
        self.continuous = ContinuousSaves(bytes_per_hour)
        if bytes_per_hour is not None and self._distributed.rank == 0:
            for stored in read_checkpoints(RunDirectory(self._core.run_dir))[-1:]:
                self.continuous.carry_on(sum(stored.resources.values()), stored.time)

    def check(self) -> None:
        """Raise the error of a failed checkpoint, and record the committed checkpoints."""
        self._saver.check()
        self._note_committed()

    def settle(self) -> None:
        """Wait until the last part is stored."""
        self._saver.settle()
        self._note_committed()

    def announce(self) -> None:
        """Send all ranks the checkpoints stored since the last call; collective."""
        if self._distributed.size == 1:
            return
        self._note_committed()
        news = self._distributed.broadcast(self.uuids[self._num_announced :])
        if self._distributed.rank:
            self.uuids += news
            self.latest = news[-1] if news else self.latest
        self._num_announced = len(self.uuids)
        for uuid in news:
            self._on_stored(uuid)

    def begin_next(self, metadata: Mapping[str, Any]) -> Destination:
        """Return where this rank's part of the next checkpoint goes."""
        self._num_saves += 1
        self.continuous.note_begun()
        return self._parts.store(series_uuid(self._series, self._num_saves), metadata)

    def save(
        self,
        parts: dict[str, Any],
        destination: Destination,
        write_more: Callable[[Path], None],
        *,
        reads_files: bool,
    ) -> None:
        """Store this rank's part in the background; see `CheckpointSaver.save`.

        Args:
            parts: The state.
            destination: The result of `begin_next`.
            write_more: Called in the thread with the directory before the commit.
            reads_files: Whether `write_more` may want all files in the directory.
        """
        sender_for = _no_sender if reads_files else self._core.checkpoint.storage.file_sender
        self._saver.save(parts, destination, write_more, sender_for)

    def settle_ranks(self) -> bool:
        """Wait on all ranks until the last parts are stored; return whether one of them is lost."""
        with failing_together(self._distributed, _MUST_STORE):
            self._saver.settle()
        return any(self._distributed.allgather(self._is_newest_lost))

    def complete(self) -> None:
        """Wait on all ranks until the newest checkpoint is whole.

        Raises:
            CheckpointWriteError: Parts of some ranks are missing.
        """
        with failing_together(self._distributed, _MUST_STORE):
            self._saver.finish()
        self._await_parts(is_failing=False)
        self.announce()

    def wants_next(self) -> bool:
        """Return whether the next continuous checkpoint is due, from this rank's view.

        The chief sees when the last one is whole. Another rank wants one if its part was lost.
        """
        is_chief, is_lost = self._distributed.rank == 0, self._is_newest_lost
        if self._saver.is_storing or (self._parts.num_pending if is_chief else not is_lost):
            return False
        return self.continuous.is_due(is_newest_lost=is_lost)

    def finish(self, error: BaseException | None) -> None:
        """Wait for the checkpoint being stored.

        Args:
            error: The error that ended the training, if it failed.
        """
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.finish(error)
        try:
            # A second Ctrl-C means now: an unfinished checkpoint stays without a manifest.
            if self._num_saves and not isinstance(error, KeyboardInterrupt):
                self._saver.finish()
                # After an error, other ranks may never store their parts.
                self._await_parts(is_failing=error is not None)
        finally:
            self._parts.close()

    # ---- small parts ---------------------------------------------------------------------

    def _await_parts(self, *, is_failing: bool) -> None:
        """Wait, on the chief, for all ranks' parts of the checkpoints and for their commit."""
        patience_s = _PARTS_S
        if self._core.checkpoint.storage.is_remote:
            patience_s += _STORE_TRIES * UploadLimits.from_environment().part_s
        num_lacking = self._parts.finish(
            timeout_s=_PARTS_AFTER_ERROR_S if is_failing else patience_s
        )
        self._note_committed()
        if num_lacking and not is_failing:
            raise CheckpointWriteError(
                f"A checkpoint must have the parts of all ranks within {patience_s:.0f} s, but"
                f" lacks some in {self._core.checkpoint.storage.url!r}. Hint: all ranks must see"
                " the same storage, such as a shared file system."
            )

    def _note_committed(self) -> None:
        self._parts.check()
        while self._committed.news:
            stored = self._committed.news.pop(0)
            self.continuous.note_stored(sum(stored.resources.values()))
            self.uuids.append(stored.uuid)
            self.latest = stored.uuid
            if self._distributed.size == 1:
                self._on_stored(stored.uuid)


def _no_sender(directory: Path) -> None:
    """Have all files written to the directory."""
