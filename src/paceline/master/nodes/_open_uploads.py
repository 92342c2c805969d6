"""Uploads of checkpoints by runners on nodes, until they are whole or given up."""

import threading
from pathlib import Path

from sqlalchemy import Connection, select

from paceline.master.experiments import (
    RefusedError,
    StateChanges,
    StorageCalls,
    place_of_experiment,
)
from paceline.master.store import Database, tables
from paceline.messages.attempts import CheckpointFiles, ShardOffer
from paceline.messages.states import LIVE_ATTEMPTS
from paceline.storage import DirectoryStorage, IncomingCheckpoint, forget_incoming

# Of one attempt at a time; a runner sends one after the other.
_MAX_OPEN = 4


class OpenUploads:
    """Hold what attempts have begun to send, and remove what they did not send to the end.

    For any thread.

    Args:
        database: The master's database.
        cluster_id: The identity of the master's home, by which its uploads are told from others.
        default_storage: Where checkpoints go unless the configuration says otherwise.
        calls: Calls storages that may hang.
    """

    def __init__(
        self, database: Database, cluster_id: str, default_storage: str, calls: StorageCalls
    ) -> None:
        self._database = database
        self._cluster_id = cluster_id
        self._default_storage = default_storage
        self._calls = calls
        self._lock = threading.Lock()
        # By attempt, checkpoint and member, in the order in which they were begun.
        self._open: dict[tuple[int, str, int], IncomingCheckpoint] = {}
        # Where attempts have sent files to.
        self._roots: dict[int, Path] = {}
        self._knows_earlier = False

    def incoming(
        self,
        storage: DirectoryStorage,
        attempt_id: int,
        uuid: str,
        files: CheckpointFiles | ShardOffer,
    ) -> IncomingCheckpoint:
        """Return a checkpoint of an attempt, of which some files may have been sent."""
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
        """Return a checkpoint that was begun.

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
        """Forget the upload of a stored checkpoint, and those that will never be whole.

        Ranks commit checkpoints in their order. One that a node has begun to send before this one,
        and that is not stored, was given up.
        """
        with self._lock:
            for member in {key[2] for key in self._open if key[:2] == (attempt_id, uuid)}:
                keys = [key for key in self._open if (key[0], key[2]) == (attempt_id, member)]
                for key in keys[: keys.index((attempt_id, uuid, member)) + 1]:
                    given_up = self._open.pop(key)
                    if key[1] != uuid:
                        given_up.forget()

    def forget(self, attempt_id: int) -> None:
        """Remove what an attempt that has ended did not send to the end.

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
        """Return the attempts that may have sent files, also to an earlier master."""
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
                one: place_of_experiment(
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
            self._roots = roots | self._roots
        self._knows_earlier = True
        root = DirectoryStorage(self._default_storage).root
        self._calls.ask(str(root), lambda: self._sweep(root), default=False)

    def _sweep(self, root: Path) -> bool:
        """Remove what attempts that have ended did not send to the end, from a storage; True."""
        prefix = f"{self._cluster_id}-"
        with self._database.read() as connection:
            live = ids_of_live_attempts(connection)

        def is_wanted(sender: str) -> bool:
            number = sender.removeprefix(prefix)
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


def ids_of_live_attempts(connection: Connection) -> set[int]:
    """Return the attempts that have not ended."""
    attempts = tables.attempts.c
    query = select(attempts.id).where(attempts.state.in_(LIVE_ATTEMPTS))
    return set(connection.execute(query).scalars())
