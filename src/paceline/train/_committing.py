"""Making a checkpoint exist once all ranks have stored their part of it."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import core
from paceline._waiting import join, wait_until
from paceline.engine import Kept, to_delete
from paceline.journal import CheckpointDeleted, CheckpointStored, JournalWriter, RunDirectory
from paceline.storage import CheckpointStorage
from paceline.train._spec import RunSpec

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.005
_LONGEST_INTERVAL_S = 0.1
_WARN_AFTER_S = 10.0


class Committer:
    """Commit the chief's checkpoints in their order, each when all ranks have stored their part.

    A thread looks for the parts while there is something to wait for; its error is raised by the
    next `check` or `finish`.

    Args:
        storage: Where the checkpoints are.
        journal: The chief's.
        spec: The run.
        world_size: The number of ranks.
    """

    def __init__(
        self, storage: CheckpointStorage, journal: JournalWriter, spec: RunSpec, world_size: int
    ) -> None:
        self._storage = storage
        self._journal = journal
        self._spec = spec
        self._world_size = world_size
        self._kept = [Kept(*kept) for kept in spec.kept]
        self._pending: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        """How many checkpoints wait for parts."""
        return len(self._pending)

    def add(self, metadata: dict[str, Any]) -> None:
        """Commit a checkpoint when all ranks have stored their part; from any thread."""
        with self._changed:
            self._pending.append(metadata)
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

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be committed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self, num_unfinished: int, timeout_s: float) -> int:
        """Wait until no more than so many checkpoints lack parts; return how many do."""

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
                metadata = self._pending[0]
            missing = self._storage.missing_shards(metadata["uuid"], self._world_size)
            if not missing:
                return True
            if not has_warned and time.monotonic() - began > _WARN_AFTER_S:
                has_warned = True
                _warn(metadata["number"], missing)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, interval)
            interval = min(2 * interval, _LONGEST_INTERVAL_S)

    def _commit_next(self) -> None:
        metadata = self._pending[0]
        uuid = metadata["uuid"]
        manifest = self._storage.commit(uuid, metadata, num_shards=self._world_size)
        self._journal.append(
            CheckpointStored(
                time=time.time(),
                uuid=uuid,
                steps_completed=metadata["steps_completed"],
                metadata=metadata,
                resources=manifest.resources,
                storage=self._storage.url,
            )
        )
        core.tell_checkpoint_stored(self._journal)
        RunDirectory(Path(self._spec.run_dir)).forget_checkpoint(uuid)
        self._pending.pop(0)
        self._changed.notify_all()
        self._keep(metadata)

    def _keep(self, metadata: dict[str, Any]) -> None:
        score = metadata["score"]
        if score is not None and self._spec.is_score_minimized:
            score = -score
        self._kept.append(Kept(metadata["uuid"], metadata["steps_completed"], score))
        num_to_keep = self._spec.num_to_keep
        if num_to_keep is None:
            return
        is_scored = self._spec.score_attribute is not None
        for kept in to_delete(
            self._kept,
            keep_latest=1 if is_scored else num_to_keep,
            keep_best=num_to_keep if is_scored else None,
        ):
            self._storage.delete(kept.uuid)
            self._journal.append(CheckpointDeleted(time=time.time(), uuid=kept.uuid))
            self._kept.remove(kept)


def _warn(number: int, missing: Sequence[int]) -> None:
    logger.warning(
        "Checkpoint %d of this run waits for rank(s) %s: all ranks must call `save_checkpoint`,"
        " though only the chief's state is stored.",
        number,
        ", ".join(map(str, missing)),
    )
