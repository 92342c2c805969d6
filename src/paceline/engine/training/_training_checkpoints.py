"""The checkpoints of a training: stored in the background, and told to all ranks."""

import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.core import Context, failing_together, read_checkpoints
from paceline.engine.checkpoints._background_saver import CheckpointSaver, Destination
from paceline.engine.checkpoints._best_validation import BestValidation
from paceline.engine.checkpoints._continuous_saves import ContinuousSaves
from paceline.engine.checkpoints._kept_checkpoints import CheckpointRetention
from paceline.engine.training._training_loop import TrainingLoop
from paceline.journal import CheckpointStored, RunDirectory
from paceline.storage import CheckpointWriteError, RetentionRules, UploadLimits, uuid_of_series

logger = logging.getLogger(__name__)

# For how long the chief waits for other ranks' parts of a checkpoint, in seconds, besides what an
# object store may take to answer.
_PARTS_S = 60.0
_STORE_TRIES = 3
_PARTS_AFTER_ERROR_S = 1.0


class TrainingCheckpoints:
    """Each rank stores its part of a checkpoint; the chief commits it when all parts are there.

    Args:
        core: The core context.
        on_stored: Called with the UUID of each checkpoint that exists: at once on a chief that is
            alone, else on every rank in the batch after the next checkpoint.

    Attributes:
        uuids: Those of the present call of `fit`, oldest first, as far as this rank knows.
        latest: The newest there is, also from before; empty without one.
        retention: On the chief, which ones to keep; None for all.
        continuous: When the next one of continuous checkpoints begins.
    """

    def __init__(self, core: Context, on_stored: Callable[[str], None]) -> None:
        self.uuids: list[str] = []
        self.latest = ""
        self.retention: CheckpointRetention | None = None
        self.continuous = ContinuousSaves()
        self._core = core
        self._distributed = core.distributed
        self._on_stored = on_stored
        self._saver = CheckpointSaver(core.distributed.rank, core.distributed.local_size)
        self._committed: list[CheckpointStored] = []
        # With references both ways, a finished training would keep its models' memory.
        commit = weakref.WeakMethod(self._take)
        self._parts = core.checkpoint.parts(lambda stored: _call(commit(), stored))
        self._series = ""
        self._num_saves = self._num_announced = 0

    @property
    def _is_newest_lost(self) -> bool:
        return self._saver.is_newest_lost or self._parts.is_newest_lost

    def begin_series(self) -> None:
        """Agree on the names of the checkpoints that follow; all ranks call it."""
        is_chief = self._distributed.rank == 0
        series = self._parts.new_series() if is_chief else ""
        self._series = self._distributed.broadcast(series)

    def forget_uuids(self) -> None:
        """Forget those of an earlier call of `fit`."""
        self.uuids, self._num_announced = [], 0

    def kept_uuids(self) -> list[str]:
        """Return those of the present call of `fit` that exist; all ranks call it."""
        uuids = self.uuids if self.retention is None else self.retention.kept_of(self.uuids)
        return self._distributed.broadcast(uuids)

    def keep(self, best_validation: BestValidation, rules: RetentionRules) -> None:
        """Have the chief delete checkpoints that rules do not keep; a master has its own rules."""
        self.retention = None
        if rules.is_empty or self._distributed.rank:
            return
        if self._core.info is not None and self._core.info.cluster_id:
            logger.info("The checkpoints to keep are those of the master's rules.")
            return
        self.retention = CheckpointRetention(self._core, best_validation, rules)

    def pace(self, bytes_per_hour: int | None) -> None:
        """Have continuous checkpoints take no more bytes than allowed; None for no limit."""
        self.continuous = ContinuousSaves(bytes_per_hour)
        if bytes_per_hour is not None and self._distributed.rank == 0:
            for stored in read_checkpoints(RunDirectory(self._core.run_dir))[-1:]:
                self.continuous.carry_on(sum(stored.resources.values()), stored.time)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be stored, and note those that exist."""
        self._saver.check()
        self._note_committed()

    def settle(self) -> None:
        """Wait until the last part is stored."""
        self._saver.settle()
        self._note_committed()

    def announce(self) -> None:
        """Tell every rank of what was stored since the last time; all must call it."""
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

    def save(
        self,
        parts: dict[str, Any],
        metadata: Mapping[str, Any],
        write_more: Callable[[Path], None],
        begin: Callable[[Destination], Destination] = lambda destination: destination,
        *,
        reads_files: bool = False,
    ) -> None:
        """Store this rank's part in the background; see `CheckpointSaver.save`.

        Args:
            parts: The state.
            metadata: The checkpoint's metadata.
            write_more: Called in the thread with the directory before the commit.
            begin: Stores what must be stored while training stands still, and returns where the
                rest goes.
            reads_files: Whether `write_more` may want all files in the directory.
        """
        self._num_saves += 1
        self.continuous.note_begun()
        uuid = uuid_of_series(self._series, self._num_saves)
        destination = begin(self._parts.store(uuid, metadata))
        storage = self._core.checkpoint.storage
        sender_for = _no_sender if reads_files else storage.file_sender
        self._saver.save(parts, destination, write_more, sender_for)

    def store(self, loop: TrainingLoop) -> None:
        """Store a checkpoint unless this step has one, and wait until it exists.

        Raises:
            CheckpointWriteError: Parts of some ranks are missing.
        """
        must = "All ranks must store their parts of a checkpoint"
        with failing_together(self._distributed, must):
            self._saver.settle()
        if any(self._distributed.allgather(self._is_newest_lost)):
            # What some rank could not store is stored once more, by all.
            loop.last_checkpoint = None
        loop.save()
        try:
            with failing_together(self._distributed, must):
                self._saver.finish()
            self._await_parts(is_failing=False)
        except BaseException:
            loop.last_checkpoint = None
            raise
        self.announce()

    def wants_next(self) -> bool:
        """Tell whether the next one of continuous checkpoints begins, as this rank sees it.

        The chief sees when the last one is whole. Another rank wants one if its part was lost.
        """
        is_chief, is_lost = self._distributed.rank == 0, self._is_newest_lost
        if self._saver.is_storing or (self._parts.num_pending if is_chief else not is_lost):
            return False
        return self.continuous.is_due(is_newest_lost=is_lost)

    def finish(self, error: BaseException | None) -> None:
        """Wait for the checkpoint that is being stored.

        Args:
            error: What has ended the training, if it has failed.
        """
        try:
            # A second Ctrl-C means now: what is being stored stays without a manifest.
            if self._num_saves and not isinstance(error, KeyboardInterrupt):
                self._saver.finish()
                # After an error, other ranks may never store their parts.
                self._await_parts(is_failing=error is not None)
        finally:
            self._parts.close()

    # ---- small parts ---------------------------------------------------------------------

    def _take(self, stored: CheckpointStored) -> None:
        """Take in a committed checkpoint, in the thread that has committed it."""
        self._committed.append(stored)
        if self.retention is not None:
            self.retention.note_checkpoint(stored)

    def _await_parts(self, *, is_failing: bool) -> None:
        """Wait, on the chief, until the checkpoints are committed that all ranks have stored."""
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
        while self._committed:
            stored = self._committed.pop(0)
            self.continuous.note_stored(sum(stored.resources.values()))
            self.uuids.append(stored.uuid)
            self.latest = stored.uuid
            if self._distributed.size == 1:
                self._on_stored(stored.uuid)


def _call(function: Callable[[CheckpointStored], None] | None, stored: CheckpointStored) -> None:
    if function is not None:
        function(stored)


def _no_sender(directory: Path) -> None:
    """Have all files written to the directory."""
