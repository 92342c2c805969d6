"""Open uploads, and checkpoints waiting for space."""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, select

from paceline._cluster.master.experiments.attempts import read_attempt
from paceline._cluster.master.experiments.checkpoints import experiment_place
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.messages.runner_messages import CheckpointFiles, ShardOffer
from paceline._cluster.messages.states import LIVE_ATTEMPTS
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._incoming_checkpoint import IncomingCheckpoint, forget_incoming

logger = logging.getLogger(__name__)

# Open uploads per attempt at most; a runner sends its checkpoints in order.
_MAX_OPEN = 4


class OpenUploads:
    """Uploads begun by attempts; removes the uploads left incomplete.

    For any thread.

    Args:
        database: The master's database.
        cluster_id: The identity of the master's home, by which its uploads are told from others.
        changes: Sets the states of experiments and trials.
    """

    def __init__(self, database: Database, cluster_id: str, changes: StateChanges) -> None:
        self._database = database
        self._cluster_id = cluster_id
        self._default_storage = changes.default_storage
        self._calls = changes.storage_calls
        self._lock = threading.Lock()
        # Key: attempt, checkpoint and member. Insertion order is the order of begin, for `close`.
        self._open: dict[tuple[int, str, int], IncomingCheckpoint] = {}
        # Storage directory of each attempt's uploads.
        self._roots: dict[int, Path] = {}
        self._knows_earlier = False

    def incoming(
        self,
        storage: DirectoryStorage,
        attempt_id: int,
        uuid: str,
        files: CheckpointFiles | ShardOffer,
    ) -> IncomingCheckpoint:
        """Return an attempt's incoming checkpoint, with the files already sent."""
        manifest = files.manifest.encode() if isinstance(files, CheckpointFiles) else None
        shards = {rank: text.encode() for rank, text in files.shards.items()}
        sender = f"{self._cluster_id}-{attempt_id}"
        return IncomingCheckpoint(storage, sender, uuid, manifest, shards)

    def begin(
        self, key: tuple[int, str, int], storage: DirectoryStorage, incoming: IncomingCheckpoint
    ) -> None:
        """Begin to take pieces of a checkpoint.

        Args:
            key: The attempt, the checkpoint, and the member that sends.
            storage: The storage that it will be in.
            incoming: The checkpoint.

        Raises:
            RefusedError: The member sends too many at a time.
        """
        attempt_id, _, member = key
        with self._lock:
            is_new = key not in self._open
            num_open = sum((one[0], one[2]) == (attempt_id, member) for one in self._open)
            if is_new and num_open >= _MAX_OPEN:
                raise RefusedError(
                    "too_many_uploads",
                    f"Attempt {attempt_id} must send at most {_MAX_OPEN} checkpoints at a time.",
                )
            self._open[key] = incoming
            self._roots[attempt_id] = storage.root
        if is_new:
            self._sweep(storage.root)

    def get(self, attempt_id: int, uuid: str, member: int) -> IncomingCheckpoint:
        """Return an open upload.

        Raises:
            RefusedError: The attempt has not offered it to this master.
        """
        with self._lock:
            incoming = self._open.get((attempt_id, uuid, member))
        if incoming is None:
            raise RefusedError(
                "unknown_upload", f"Attempt {attempt_id} must offer checkpoint {uuid} first."
            )
        return incoming

    def close(self, attempt_id: int, uuid: str) -> None:
        """Forget the upload of a stored checkpoint, and earlier uploads given up by the sender.

        Ranks commit checkpoints in order. An earlier upload of the same node that is still open
        was given up.
        """
        with self._lock:
            for member in {key[2] for key in self._open if key[:2] == (attempt_id, uuid)}:
                keys = [key for key in self._open if (key[0], key[2]) == (attempt_id, member)]
                for key in keys[: keys.index((attempt_id, uuid, member)) + 1]:
                    given_up = self._open.pop(key)
                    if key[1] != uuid:
                        given_up.forget()

    def forget(self, attempt_id: int) -> None:
        """Remove the incomplete uploads of an ended attempt.

        Where the storage does not answer now, that comes with a later call.
        """
        with self._lock:
            root = self._roots.get(attempt_id)
        if root is None:
            return
        is_done = True
        try:
            # A piece may also have been written when its checkpoint was stored already.
            is_done = self._calls.ask(str(root), lambda: self._sweep(root), default=False)
        finally:
            if is_done:
                with self._lock:
                    self._roots.pop(attempt_id, None)

    def attempts(self) -> set[int]:
        """Return the attempts with possible uploads, including uploads to earlier masters."""
        if not self._knows_earlier:
            self._take_up()
        with self._lock:
            return set(self._roots)

    def _take_up(self) -> None:
        """Find where attempts may have sent files to, before this master began."""
        attempts = tables.attempts.c
        with self._database.read() as connection:
            query = select(attempts.id, attempts.experiment_id).where(
                attempts.state.in_(LIVE_ATTEMPTS), attempts.run_attempt.is_(None)
            )
            experiments = {row.id: row.experiment_id for row in connection.execute(query)}
            places = {
                one: experiment_place(
                    StateChanges.experiment(connection, one), self._default_storage
                )
                for one in set(experiments.values())
            }
        roots = {
            attempt_id: DirectoryStorage(places[experiment_id]).root
            for attempt_id, experiment_id in experiments.items()
            if "://" not in places[experiment_id]
        }
        with self._lock:
            # Uploads that began meanwhile count.
            self._roots = roots | self._roots
        self._knows_earlier = True
        root = DirectoryStorage(self._default_storage).root
        self._calls.ask(str(root), lambda: self._sweep(root), default=False)

    def _sweep(self, root: Path) -> bool:
        """Remove incomplete uploads of ended attempts from a storage; return True when done."""
        prefix = f"{self._cluster_id}-"
        with self._database.read() as connection:
            live = live_attempt_ids(connection)

        def is_wanted(sender: str) -> bool:
            number = sender.removeprefix(prefix)
            # Names without the prefix belong to other masters.
            return number == sender or (number.isdecimal() and int(number) in live)

        with self._lock:
            self._open = {key: one for key, one in self._open.items() if key[0] in live}
            self._roots = {
                number: place
                for number, place in self._roots.items()
                if place != root or number in live
            }
        forget_incoming(root, is_wanted)
        return True


def live_attempt_ids(connection: Connection) -> set[int]:
    """Return the ids of attempts not yet ended."""
    attempts = tables.attempts.c
    query = select(attempts.id).where(attempts.state.in_(LIVE_ATTEMPTS))
    return set(connection.execute(query).scalars())


@dataclass(frozen=True, slots=True)
class WaitingCheckpoint:
    """Checkpoint waiting to be stored, since a time in seconds since the epoch, and why."""

    attempt_id: int
    trial_id: int
    experiment_id: int
    uuid: str
    since: float
    why: str


class WaitingCheckpoints:
    """Attempts waiting for a checkpoint to be stored; reported in the logs of their trials.

    For any thread.
    """

    def __init__(self, database: Database, changes: StateChanges) -> None:
        self._database = database
        self._changes = changes
        self._lock = threading.Lock()
        self._waiting: dict[int, WaitingCheckpoint] = {}

    def all(self) -> list[WaitingCheckpoint]:
        """Return the waiting checkpoints, the longest wait first."""
        with self._lock:
            return sorted(self._waiting.values(), key=lambda one: one.since)

    def note(self, attempt_id: int, uuid: str, why: str) -> None:
        """Record a checkpoint's failed storing in the trial's log, once per wait."""
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
        """Record the end of an attempt's wait in the trial's log."""
        with self._lock:
            one = self._waiting.pop(attempt_id, None)
        if one is not None:
            waited_s = time.time() - one.since
            text = f"Checkpoint {one.uuid} waited {waited_s:.0f} s for the master: {one.why}."
            self._tell(one, "INFO", text)

    def forget(self, attempt_id: int) -> None:
        """Forget the wait of an ended attempt."""
        with self._lock:
            self._waiting.pop(attempt_id, None)

    def _tell(self, one: WaitingCheckpoint, level: str, text: str) -> None:
        def job(transaction: Transaction) -> None:
            number = read_attempt(transaction.connection, one.attempt_id).number
            self._changes.note(transaction, one.trial_id, number, level, text)

        try:
            self._database.write(job).result()
        except Exception as error:
            # The log may be on the same disk; then the end of the wait is logged there.
            logger.warning("Trial %d: %s (not in its log: %s)", one.trial_id, text, error)
