"""Checkpoints stored in the background: each rank's part, the chief's commit, and failures."""

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import CheckpointDeleted, CheckpointStored
from paceline._base.process_and_network import join, wait_until
from paceline._base.run_directory import RunDirectory
from paceline.core._attempt_journal import send_run_event
from paceline.core._run_storage import new_run_uuid, run_origin
from paceline.storage._checkpoint_errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._uploads import UploadLimits

logger = logging.getLogger(__name__)

# Limits for ending training: with three failures in a row over this time, a killed run would lose
# more and more work. An outage of some minutes ends nothing. Unit: the time limit of one upload.
_MAX_IN_A_ROW = 3
_LEAST_TIME = 10


class StoreFailures:
    """Count of failed checkpoints, for the decision to continue training after a failure.

    It does unless it is the third or a later one in a row, and the first of them was at least ten
    times `PACELINE_STORE_PART_TIMEOUT_S` before: ten minutes by default. The newest checkpoint of a
    training must be there: `check_newest` raises its error.
    """

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._first_s = 0.0
        self._newest: BaseException | None = None

    @property
    def is_newest_lost(self) -> bool:
        """Whether the newest checkpoint could not be stored."""
        return self._newest is not None

    def note_stored(self) -> None:
        """Record a stored checkpoint: the failures in a row start again at 0."""
        self._num_in_a_row, self._newest = 0, None

    def note_lost(self, error: BaseException) -> None:
        """Record a failure to store a checkpoint; training continues unless there are too many.

        Raises:
            BaseException: `error`, if training must not continue.
        """
        now, least_s = time.monotonic(), _LEAST_TIME * UploadLimits.from_environment().part_s
        if self._num_in_a_row == 0:
            self._first_s = now
        self._num_in_a_row, self._newest = self._num_in_a_row + 1, None
        is_last = self._num_in_a_row >= _MAX_IN_A_ROW and now - self._first_s >= least_s
        # Other errors are no outage of the store: they end training at once.
        if is_last or not isinstance(error, CheckpointWriteError):
            raise error
        self._newest = error
        logger.error(
            "A checkpoint could not be stored. Training goes on; the checkpoint before it stays the"
            " newest one. Training ends if %d or more in a row cannot be stored for %g s (this is"
            " number %d). %s",
            _MAX_IN_A_ROW,
            least_s,
            self._num_in_a_row,
            error,
        )

    def check_newest(self) -> None:
        """Raise the error of the newest checkpoint if its storing failed."""
        if self._newest is not None:
            error, self._newest = self._newest, None
            raise error


_LOOK_INTERVAL_S = 0.005
_LONGEST_INTERVAL_S = 0.1
# How much longer than necessary it may take to see that a checkpoint is whole.
_LATE_SHARE = 0.1
_WARN_AFTER_S = 10.0
# A checkpoint that is not whole by then is given up.
_LIMIT_S = 3600.0
# Delay before looking at later checkpoints: a whole later one shows that this one is lost.
_LOOK_LATER_S = 1.0
# How long a checkpoint waits for space for its record.
_RECORD_PATIENCE_S = 10.0
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NEWEST_REPORT = "newest_report"
"""In the metadata of a state in memory: the chief's journal, and its last record before it."""


def commit_checkpoint(
    run: RunDirectory,
    storage: CheckpointStorage,
    journal: JournalWriter,
    uuid: str,
    metadata: dict[str, Any],
    *,
    num_shards: int,
) -> CheckpointStored:
    """Commit a checkpoint with all its files stored, record the commit, and notify the parent.

    Earlier reports are forced to disk first, the record of the checkpoint at the end.
    After a power cut, a run resumed from the checkpoint lacks no report before it.

    A whole checkpoint would be lost with this process if its record still waited in memory.

    Raises:
        CheckpointCorruptError: A shard is missing, or two shards disagree about a file.
        CheckpointWriteError: The manifest cannot be written, or the journal cannot.
    """
    if not journal.flush(_RECORD_PATIENCE_S):
        storage.discard(uuid)
        raise CheckpointWriteError(_cannot_be_recorded(journal, uuid))
    journal.sync()
    manifest = storage.commit(uuid, metadata, num_shards=num_shards, origin=run_origin(run))
    record = CheckpointStored(
        time=time.time(),
        uuid=uuid,
        steps_completed=metadata["steps_completed"],
        metadata=metadata,
        resources=manifest.resources,
        storage=storage.url,
    )
    journal.append(record)
    if not journal.flush(_RECORD_PATIENCE_S):
        # A checkpoint without a record would never be found again, nor deleted.
        delete_checkpoint(run, storage, journal, uuid)
        raise CheckpointWriteError(_cannot_be_recorded(journal, uuid))
    journal.sync()
    send_run_event("checkpoint", journal)
    return record


def commit_in_memory(
    storage: CheckpointStorage,
    journal: JournalWriter,
    uuid: str,
    metadata: dict[str, Any],
    *,
    num_shards: int,
) -> None:
    """Commit a state in memory, remove those before it, and notify the parent.

    Earlier reports are written first, but not forced to disk: a power cut takes the memory too. The
    metadata name the newest one.

    Raises:
        CheckpointCorruptError: A shard is missing, or two shards disagree about a file.
        CheckpointWriteError: The manifest cannot be written, or the journal cannot.
    """
    if not journal.flush(_RECORD_PATIENCE_S):
        raise CheckpointWriteError(_cannot_be_recorded(journal, uuid))
    reports = {NEWEST_REPORT: [journal.directory.name, journal.last_sequence]}
    storage.commit(uuid, metadata | reports, num_shards=num_shards)
    delete_others(storage, uuid)
    send_run_event("checkpoint", journal)


def delete_others(storage: CheckpointStorage, uuid: str) -> None:
    """Delete all states in memory but one."""
    for earlier in storage.list():
        if earlier != uuid:
            storage.delete(earlier)


def _cannot_be_recorded(journal: JournalWriter, uuid: str) -> str:
    error = journal.refusal
    is_full = error is None or error.errno in _FULL_ERRORS
    happened = "its disk was full" if is_full else "it could not be written to"
    reason = "" if error is None else f" ({error.strerror})"
    hint = "free some space there" if is_full else "see that it is there and may be written to"
    return (
        f"Checkpoint {uuid} is not kept: its record must be in the journal in"
        f" {str(journal.directory)!r}, but {happened} for {_RECORD_PATIENCE_S:.3g} s{reason}, so"
        f" that a run could not find the checkpoint again. Hint: {hint}."
    )


def delete_checkpoint(
    run: RunDirectory, storage: CheckpointStorage, journal: JournalWriter, uuid: str
) -> None:
    """Delete a checkpoint of a run and record the deletion.

    If the process is killed meanwhile, whoever resumes the run removes the rest. If the
    storage fails meanwhile, another call removes it. It is no error if the checkpoint is gone
    already.
    """
    run.note_checkpoint(uuid, storage.url)
    try:
        storage.delete(uuid)
    except CheckpointNotFoundError:
        # A chief that was killed before the record has deleted it already, or has begun to.
        storage.sweep(older_than_s=-math.inf, among=[uuid])
    journal.append(CheckpointDeleted(time=time.time(), uuid=uuid))
    run.forget_checkpoint(uuid)


class CheckpointParts:
    """Store for this rank's part of each checkpoint; the chief's also commits whole checkpoints.

    They are committed in their order, each when all ranks have stored their part. A thread of the
    chief looks for the parts while there is something to wait for; its error is raised by the next
    `check` or `finish`. A checkpoint that a rank could not store is given up when a later one is
    whole, or after an hour; then `StoreFailures` decides whether training continues.

    Args:
        run: The run directory, which names the checkpoints being written; None for those in
            memory, which nobody looks for once it is gone.
        storage: Where the checkpoints are; all ranks must see the same.
        rank: The rank of this process.
        world_size: The number of ranks.
        commit: Called on the chief, in any thread, with the UUID and the metadata of a checkpoint
            whose parts are all there.
        failures: What decides whether training continues; `StoreFailures` by default.
        commits_for: The ranks whose parts this one waits for before it calls `commit`; by default
            all on the chief, and none on others.

    Attributes:
        copy_s: The processor time of the last copies to other nodes, in seconds.
    """

    copy_s = 0.0

    def __init__(
        self,
        run: RunDirectory | None,
        storage: CheckpointStorage,
        *,
        rank: int,
        world_size: int,
        commit: Callable[[str, dict[str, Any]], None],
        failures: StoreFailures | None = None,
        commits_for: Sequence[int] | None = None,
    ) -> None:
        self._run = run
        self._storage = storage
        self._rank = rank
        self._world_size = world_size
        self._commit = commit
        if commits_for is None:
            commits_for = range(world_size) if rank == 0 else ()
        self._commits_for = frozenset(commits_for)
        self._pending: list[tuple[str, dict[str, Any], int]] = []
        # Checkpoints in order: those before a committed one are lost, as no rank stores them now.
        self._begun: list[str] = []
        self._failures = failures or StoreFailures()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def directory(self) -> Path | None:
        """The directory of the storage on this machine, or None."""
        return self._storage.local_root

    @property
    def num_pending(self) -> int:
        """How many checkpoints wait for parts, as the chief knows."""
        return len(self._pending)

    @property
    def is_newest_lost(self) -> bool:
        """Whether the newest checkpoint was given up, as the chief knows."""
        return self._failures.is_newest_lost

    def new_series(self) -> str:
        """Return a UUID from which the UUIDs of checkpoints follow, see `series_uuid`."""
        return str(uuid4()) if self._run is None else new_run_uuid(self._run)

    @contextmanager
    def store(
        self, uuid: str, metadata: Mapping[str, Any], *, num_parts: int | None = None
    ) -> Iterator[tuple[Path, str]]:
        """Yield an empty directory for this rank's files of a checkpoint, and its UUID.

        Leaving the block stores the part; leaving it by an exception removes it.

        Args:
            uuid: The checkpoint's UUID, the same on all ranks.
            metadata: The checkpoint's metadata; the chief's counts.
            num_parts: The first ranks, which store a part; all by default.

        Raises:
            FileExistsError: Another rank has stored another file of the same name.
            CheckpointWriteError: The files cannot be written, for example on a full disk.
        """
        # The commit takes it back; leftovers of a killed group are for others to remove.
        if self._run is not None:
            self._run.note_checkpoint(uuid, self._storage.url, is_part=self._rank != 0)
        if self._commits_for:
            with self._changed:
                self._begun.append(uuid)
        with self._storage.store_shard(uuid, self._rank) as path:
            yield path, uuid
        if self._commits_for:
            self._add(uuid, dict(metadata), num_parts or self._world_size)

    def store_whole(self, metadata: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        """Store all parts of a checkpoint from this rank alone, and commit it.

        Args:
            metadata: The checkpoint's metadata.
            write: Writes all files to a directory.

        Raises:
            CheckpointWriteError: The files cannot be written.
        """
        uuid = self.new_series()
        with self._storage.store_path(uuid) as path:
            write(path)
        self._storage.commit(uuid, dict(metadata))

    def check(self) -> None:
        """Raise the error of a failed commit."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self, num_unfinished: int = 0, timeout_s: float | None = None) -> int:
        """Wait until no more than so many checkpoints lack parts; return how many do.

        Args:
            num_unfinished: How many may lack parts.
            timeout_s: For how long to wait, in seconds; None for ever.

        Raises:
            CheckpointWriteError: The newest checkpoint was given up or cannot be committed.
        """

        def is_over() -> bool:
            return len(self._pending) <= num_unfinished or self._error is not None

        with self._changed:
            wait_until(lambda slice_s: self._changed.wait_for(is_over, slice_s), timeout_s)
        self.check()
        self._failures.check_newest()
        return len(self._pending)

    def close(self) -> None:
        """Stop waiting for the missing parts of pending checkpoints."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            join(thread)

    def _add(self, uuid: str, metadata: dict[str, Any], num_parts: int) -> None:
        with self._changed:
            self._is_closed = False
            self._pending.append((uuid, metadata, num_parts))
            if self._world_size == 1:
                # No other rank can be late, so no thread is needed.
                try:
                    self._commit_next()
                except BaseException:
                    self._pending.clear()
                    raise
            elif self._thread is None:
                self._thread = threading.Thread(
                    target=self._commit_pending, name="paceline-commit", daemon=True
                )
                self._thread.start()

    # ---- the thread ----------------------------------------------------------------------

    def _commit_pending(self) -> None:
        try:
            while self._handle_next():
                pass
        except BaseException as error:  # raised in the training thread
            with self._changed:
                self._error = error
                self._pending.clear()
                self._thread = None
                self._changed.notify_all()

    def _handle_next(self) -> bool:
        """Commit or give up the next checkpoint; False if there is none or nobody waits."""
        try:
            if not self._await_parts():
                return False
            self._commit_next()
        except CheckpointWriteError as error:
            with self._changed:
                self._pending.pop(0)
                self._failures.note_lost(error)
                self._changed.notify_all()
        return True

    def _await_parts(self) -> bool:
        """Wait for the parts of the next checkpoint; False if there is none or nobody waits.

        Raises:
            CheckpointWriteError: It will never be whole.
        """
        began, has_warned = time.monotonic(), False
        while True:
            with self._changed:
                if self._is_closed or not self._pending:
                    self._thread = None
                    return False
                (uuid, metadata, num_parts), *later = self._pending
            missing = self._missing(uuid, num_parts)
            if not missing:
                return True
            waited_s = time.monotonic() - began
            # Ranks store in order: a later checkpoint with all parts shows that this one is lost.
            is_lost = waited_s > _LOOK_LATER_S and not all(
                self._missing(each, num_expected) for each, _, num_expected in later
            )
            if is_lost or waited_s > _LIMIT_S:
                raise CheckpointWriteError(_lacking(metadata["steps_completed"], missing))
            if not has_warned and waited_s > _WARN_AFTER_S:
                has_warned = True
                logger.warning(
                    "The checkpoint of step %d waits for rank(s) %s: all ranks must store their"
                    " part of it, in a storage that all of them see.",
                    metadata["steps_completed"],
                    ", ".join(map(str, missing)),
                )
            with self._changed:
                interval_s = max(_LOOK_INTERVAL_S, _LATE_SHARE * waited_s)
                self._changed.wait_for(
                    lambda: self._is_closed, min(interval_s, _LONGEST_INTERVAL_S)
                )

    def _commit_next(self) -> None:
        uuid, metadata, _ = self._pending[0]
        # Without the lock, as it may take long: this thread alone removes pending checkpoints.
        self._commit(uuid, metadata)
        with self._changed:
            self._forget(uuid)
            self._pending.pop(0)
            self._failures.note_stored()
            while (lost := self._begun.pop(0)) != uuid:
                # Files that cannot be removed now: a later sweep deletes them.
                with suppress(CheckpointError):
                    self._storage.discard(lost)
                    self._forget(lost)
            self._changed.notify_all()

    def _missing(self, uuid: str, num_parts: int) -> list[int]:
        missing = self._storage.missing_shards(uuid, num_parts)
        return [rank for rank in missing if rank in self._commits_for]

    def _forget(self, uuid: str) -> None:
        if self._run is not None:
            self._run.forget_checkpoint(uuid)


def _lacking(steps_completed: int, missing: Sequence[int]) -> str:
    ranks = ", ".join(map(str, missing))
    return f"The checkpoint of step {steps_completed} is not whole: rank(s) {ranks} did not store."
