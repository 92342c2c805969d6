"""Checkpoints of nodes that the master cannot store now, such as for want of space on its disk."""

import logging
import threading
import time
from dataclasses import dataclass

from paceline.master.experiments import StateChanges, read_attempt
from paceline.master.store import Database, Transaction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitingCheckpoint:
    """A checkpoint that waits since a moment, in seconds since the epoch, and why."""

    attempt_id: int
    trial_id: int
    experiment_id: int
    uuid: str
    since: float
    why: str


class WaitingCheckpoints:
    """Which attempts wait until a checkpoint can be stored; told in the logs of their trials.

    For any thread.
    """

    def __init__(self, database: Database, changes: StateChanges) -> None:
        self._database = database
        self._changes = changes
        self._lock = threading.Lock()
        self._waiting: dict[int, WaitingCheckpoint] = {}

    def all(self) -> list[WaitingCheckpoint]:
        """Return those that wait, the longest first."""
        with self._lock:
            return sorted(self._waiting.values(), key=lambda one: one.since)

    def note(self, attempt_id: int, uuid: str, why: str) -> None:
        """Note that a checkpoint of an attempt could not be stored; a second time says nothing."""
        with self._lock:
            if attempt_id in self._waiting:
                return
        with self._database.read() as connection:
            attempt = read_attempt(connection, attempt_id)
        one = WaitingCheckpoint(
            attempt_id, attempt.trial_id, attempt.experiment_id, uuid, time.time(), why
        )
        with self._lock:
            self._waiting[attempt_id] = one
        self._tell(
            one,
            "WARNING",
            f"Checkpoint {uuid} cannot be stored by the master: {why}. The attempt does not end"
            " before it is. Hint: make space on the disk of the master.",
        )

    def settle(self, attempt_id: int) -> None:
        """Note that a checkpoint of an attempt was stored, or that the attempt has ended."""
        with self._lock:
            one = self._waiting.pop(attempt_id, None)
        if one is not None:
            waited_s = time.time() - one.since
            text = f"Checkpoint {one.uuid} waited {waited_s:.0f} s for the master: {one.why}."
            self._tell(one, "INFO", text)

    def forget(self, attempt_id: int) -> None:
        """Forget an attempt that has ended."""
        with self._lock:
            self._waiting.pop(attempt_id, None)

    def _tell(self, one: WaitingCheckpoint, level: str, text: str) -> None:
        def job(transaction: Transaction) -> None:
            number = read_attempt(transaction.connection, one.attempt_id).number
            self._changes.note(transaction, one.trial_id, number, level, text)

        try:
            self._database.write(job).result()
        except Exception as error:
            # The log may be on the same disk; then the end of the wait is told there.
            logger.warning("Trial %d: %s (not in its log: %s)", one.trial_id, text, error)
