"""Checkpoints of which each rank stores a part in the background, and the chief commits the whole.

No rank waits for another one to store its part: that the parts are there shows in the storage.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline._waiting import join, wait_until
from paceline.core._parent import tell_checkpoint_stored
from paceline.journal import CheckpointStored, JournalWriter, RunDirectory
from paceline.storage import CheckpointStorage

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.005
_LONGEST_INTERVAL_S = 0.1
_WARN_AFTER_S = 10.0


def commit_checkpoint(
    storage: CheckpointStorage,
    journal: JournalWriter,
    uuid: str,
    metadata: dict[str, Any],
    *,
    num_shards: int,
) -> None:
    """Make a checkpoint exist whose files are all there, record it, and tell the parent process.

    Raises:
        CheckpointCorruptError: A shard is missing, or two shards disagree about a file.
        CheckpointWriteError: The manifest cannot be written.
    """
    manifest = storage.commit(uuid, metadata, num_shards=num_shards)
    journal.append(
        CheckpointStored(
            time=time.time(),
            uuid=uuid,
            steps_completed=metadata["steps_completed"],
            metadata=metadata,
            resources=manifest.resources,
            storage=storage.url,
        )
    )
    tell_checkpoint_stored(journal)


class CheckpointParts:
    """Store this rank's part of each checkpoint; the chief's also commits those that are whole.

    They are committed in their order, each when all ranks have stored their part. A thread of the
    chief looks for the parts while there is something to wait for; its error is raised by the next
    `check` or `finish`.

    Args:
        run: The run directory, which tells what is being written.
        storage: Where the checkpoints are; all ranks must see the same.
        rank: The rank of this process.
        world_size: The number of ranks.
        commit: Called on the chief, in any thread, with the UUID and the metadata of a checkpoint
            whose parts are all there.
    """

    def __init__(
        self,
        run: RunDirectory,
        storage: CheckpointStorage,
        *,
        rank: int,
        world_size: int,
        commit: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._run = run
        self._storage = storage
        self._rank = rank
        self._world_size = world_size
        self._commit = commit
        self._pending: list[tuple[str, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        """How many checkpoints wait for parts, as the chief knows."""
        return len(self._pending)

    @contextmanager
    def store(self, uuid: str, metadata: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
        """Yield an empty directory for this rank's files of a checkpoint, and its UUID.

        Leaving the block stores the part; leaving it by an exception removes it.

        Args:
            uuid: The checkpoint's UUID, the same on all ranks.
            metadata: The checkpoint's metadata; the chief's counts.

        Raises:
            FileExistsError: Another rank has stored another file of the same name.
            CheckpointWriteError: The files cannot be written, for example on a full disk.
        """
        # The commit takes it back; what a killed group leaves is for others to remove.
        self._run.note_checkpoint(uuid, self._storage.url)
        with self._storage.store_shard(uuid, self._rank) as path:
            yield path, uuid
        if self._rank == 0:
            self._add(uuid, dict(metadata))

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be committed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self, num_unfinished: int = 0, timeout_s: float | None = None) -> int:
        """Wait until no more than so many checkpoints lack parts; return how many do.

        Args:
            num_unfinished: How many may lack parts.
            timeout_s: For how long to wait, in seconds; None for ever.
        """

        def is_over() -> bool:
            return len(self._pending) <= num_unfinished or self._error is not None

        with self._changed:
            wait_until(lambda slice_s: self._changed.wait_for(is_over, slice_s), timeout_s)
        self.check()
        return len(self._pending)

    def close(self) -> None:
        """Give up what still waits."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            join(thread)

    def _add(self, uuid: str, metadata: dict[str, Any]) -> None:
        with self._changed:
            self._is_closed = False
            self._pending.append((uuid, metadata))
            if self._world_size == 1:
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
            while self._await_parts():
                with self._changed:
                    self._commit_next()
        except BaseException as error:  # raised in the training thread
            with self._changed:
                self._error = error
                self._pending.clear()
                self._thread = None
                self._changed.notify_all()

    def _await_parts(self) -> bool:
        """Wait for the parts of the next checkpoint; False if there is none or nobody waits."""
        began, interval, has_warned = time.monotonic(), _LOOK_INTERVAL_S, False
        while True:
            with self._changed:
                if self._is_closed or not self._pending:
                    self._thread = None
                    return False
                uuid, metadata = self._pending[0]
            missing = self._storage.missing_shards(uuid, self._world_size)
            if not missing:
                return True
            if not has_warned and time.monotonic() - began > _WARN_AFTER_S:
                has_warned = True
                _warn(metadata["steps_completed"], missing)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, interval)
            interval = min(2 * interval, _LONGEST_INTERVAL_S)

    def _commit_next(self) -> None:
        uuid, metadata = self._pending[0]
        self._commit(uuid, metadata)
        self._run.forget_checkpoint(uuid)
        self._pending.pop(0)
        self._changed.notify_all()


def _warn(steps_completed: int, missing: Sequence[int]) -> None:
    logger.warning(
        "The checkpoint of step %d waits for rank(s) %s: all ranks must store their part of it, in"
        " a storage that all of them see.",
        steps_completed,
        ", ".join(map(str, missing)),
    )
