"""Checkpoints between nodes and the storage directories of this machine; open uploads."""

import asyncio
import errno
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline import faults
from paceline._base.journal_records import CheckpointStored
from paceline._cluster.master.experiments.attempts import check_not_over, read_attempt
from paceline._cluster.master.experiments.checkpoint_places import (
    CheckpointPlace,
    checkpoint_place,
    experiment_place,
)
from paceline._cluster.master.experiments.checkpoints import (
    check_owner,
    delete_files,
    note_deleted_files,
    store_checkpoint,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import read_members
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.messages.record_checks import check_record
from paceline._cluster.messages.runner_messages import (
    MAX_PIECE_BYTES,
    CheckpointFiles,
    CheckpointNeeds,
    CheckpointOffer,
    ShardOffer,
)
from paceline._cluster.messages.states import LIVE_ATTEMPTS, CheckpointState
from paceline.storage import _checkpoint_files
from paceline.storage._checkpoint_storage import CheckpointStorage
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
            query = sa.select(attempts.id, attempts.experiment_id).where(
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


def live_attempt_ids(connection: sa.Connection) -> set[int]:
    """Return the ids of attempts not yet ended."""
    attempts = tables.attempts.c
    query = sa.select(attempts.id).where(attempts.state.in_(LIVE_ATTEMPTS))
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


faults.register("master.checkpoint.moved_in")

PIECES_AT_ONCE = 8
OFFERS_AT_ONCE = 4
# So much each one counts at least, as many small ones take memory as well.
_SMALLEST_DONE = 64


class Transfers:
    """Take checkpoints from runners on nodes, and give them out; for any thread.

    An attempt sends only checkpoints of its own trial, and until one is whole it lies apart from
    those of all others. It reads the checkpoints that its trial may start from.

    Args:
        database: The master's database.
        cluster_id: The identity of the master's home.
        changes: Sets the states of experiments and trials.
    """

    def __init__(self, database: Database, cluster_id: str, changes: StateChanges) -> None:
        self._database = database
        self._changes = changes
        # Limits on pieces and file lists in memory, shared by the requests of all runners.
        self.pieces = asyncio.Semaphore(PIECES_AT_ONCE)
        self.offers = asyncio.Semaphore(OFFERS_AT_ONCE)
        self.waiting = WaitingCheckpoints(database, changes)
        self._uploads = OpenUploads(database, cluster_id, changes)

    def offer(self, attempt_id: int, uuid: str, offer: CheckpointOffer) -> CheckpointNeeds:
        """Return the missing files of a checkpoint; stores the checkpoint if complete.

        Raises:
            NotFoundError: There is no such attempt.
            RefusedError: The attempt has ended, or the checkpoint belongs to another trial.
            CheckpointError: The files are damaged, or cannot be written.
            ValueError: A name is not valid for a file.
        """
        with self._database.read() as connection:
            attempt = read_attempt(connection, attempt_id)
            check_not_over(attempt)
            check_owner(connection, attempt, uuid)
            storage = self._directory_of(connection, attempt)
            row = _row_of(connection, uuid)
            if row is not None:
                _check_own(row, attempt)
            is_alone = all(member.exit is not None for member in read_members(attempt)[1:])
        if offer.has_failed and not (is_alone or attempt.should_kill):
            # A node that is lost is noticed by that, and nobody waits for its files.
            self._database.write(
                lambda transaction: self._changes.change_attempt(
                    transaction, attempt_id, should_kill=True
                )
            ).result()
        if row is not None:
            if offer.record is None and row.state != CheckpointState.DELETED.value:
                self._shrink(row, offer.files)
            return CheckpointNeeds(is_stored=True)
        if offer.record is None or offer.record.uuid != uuid:
            raise RefusedError("unknown_checkpoint", f"Nobody has stored checkpoint {uuid}.")
        incoming = self._uploads.incoming(storage, attempt_id, uuid, offer.files)
        with self._changes.storage_calls.noted(storage.url):
            is_there = _is_there(storage, uuid, offer.files)
            missing = {} if is_there else incoming.missing()
        if not is_there:
            # A damaged file is missing again.
            with self._changes.storage_calls.watched(storage.url):
                missing = missing or dict.fromkeys(incoming.seal(), 0)
            if missing:
                self._uploads.begin((attempt_id, uuid, 0), storage, incoming)
                return CheckpointNeeds(is_stored=False, missing=missing, is_alone=is_alone)
        self._store(attempt_id, storage, incoming, offer.record)
        return CheckpointNeeds(is_stored=True)

    def offer_shards(
        self, attempt_id: int, member: int, uuid: str, offer: ShardOffer
    ) -> CheckpointNeeds:
        """Return the missing files of a node other than rank 0's; raises like `offer`.

        They lie beside the files of the other nodes. The offer of rank 0's node stores them all.
        """
        with self._database.read() as connection:
            attempt = read_attempt(connection, attempt_id)
            check_not_over(attempt)
            check_owner(connection, attempt, uuid)
            storage = self._directory_of(connection, attempt)
            row = _row_of(connection, uuid)
            if row is not None:
                _check_own(row, attempt)
                return CheckpointNeeds(is_stored=True)
            members = read_members(attempt)
            if not 0 < member < len(members):
                raise RefusedError("unknown_member", f"Attempt {attempt_id} has no such node.")
        incoming = self._uploads.incoming(storage, attempt_id, uuid, offer)
        with self._changes.storage_calls.noted(storage.url):
            missing = incoming.missing()
        self._uploads.begin((attempt_id, uuid, member), storage, incoming)
        is_alone = members[0].exit is not None
        return CheckpointNeeds(is_stored=False, missing=missing, is_alone=is_alone)

    def receive(
        self, attempt_id: int, uuid: str, name: str, offset: int, data: bytes, member: int = 0
    ) -> int:
        """Store a piece of a file, and return the file's number of bytes.

        Raises:
            RefusedError: The attempt has not offered the checkpoint to this master.
            BlockingIOError: Another request writes to the file now.
            CheckpointWriteError: The disk is full or broken.
            ValueError: The checkpoint has no such file, or the file has fewer bytes.
        """
        incoming = self._uploads.get(attempt_id, uuid, member)
        with self._changes.storage_calls.noted(incoming.storage_url):
            return incoming.write(name, offset, data)

    def delete(self, attempt_id: int, uuid: str) -> None:
        """Delete an existing checkpoint of the attempt's trial; raises like `offer`."""
        with self._database.read() as connection:
            attempt = read_attempt(connection, attempt_id)
            check_not_over(attempt)
            row = _row_of(connection, uuid)
        if row is None or row.state == CheckpointState.DELETED.value:
            return
        _check_own(row, attempt)
        if not delete_files(self._changes.storage_calls, self._place(row), uuid):
            raise OSError(f"The files of checkpoint {uuid} cannot be deleted.")

        def note(transaction: Transaction) -> None:
            note_deleted_files(transaction.connection, uuid, {})

        self._database.write(note).result()

    def readable(
        self, attempt_id: int, uuid: str
    ) -> tuple[CheckpointStorage, _checkpoint_files.Manifest]:
        """Return the storage and manifest of a checkpoint readable by an attempt.

        Raises:
            CheckpointError: It is gone or damaged.
            NotFoundError: There is no such attempt.
            RefusedError: The attempt has ended, or its trial may not start from the checkpoint, or
                that lies elsewhere than those of its experiment.
        """
        with self._database.read() as connection:
            attempt = read_attempt(connection, attempt_id)
            check_not_over(attempt)
            row = _row_of(connection, uuid)
            trial = StateChanges.trial(connection, attempt.trial_id)
        is_start = uuid in (attempt.resumed_from, trial.source_checkpoint)
        if row is None or not (is_start or row.trial_id == attempt.trial_id):
            raise RefusedError(
                "other_trial", f"Attempt {attempt_id} does not start from checkpoint {uuid}."
            )
        if row.state == CheckpointState.DELETED.value:
            raise RefusedError("deleted", f"Checkpoint {uuid} was deleted.")
        place = self._place(row)
        with self._changes.storage_calls.noted(place.storage):
            storage = place.opened(uuid)
            manifest = storage.manifest(uuid)
        place.check(manifest)
        return storage, manifest

    def read_files(self, attempt_id: int, uuid: str) -> CheckpointFiles:
        """Return the manifest and the done files of a checkpoint; raises like `readable`."""
        storage, _ = self.readable(attempt_id, uuid)
        shards: dict[int, str] = {}
        left = _checkpoint_files.MAX_TEXT_BYTES
        while (
            text := _checkpoint_file_text(
                storage, uuid, _checkpoint_files.done_name(len(shards)), left
            )
        ) is not None:
            shards[len(shards)] = text
            left -= len(text) + _SMALLEST_DONE
        manifest = _checkpoint_file_text(storage, uuid, _checkpoint_files.MANIFEST_NAME)
        assert manifest is not None
        return CheckpointFiles(manifest=manifest, shards=shards)

    def read_piece(self, attempt_id: int, uuid: str, name: str, offset: int) -> bytes:
        """Return a piece of a file of a checkpoint; raises like `readable`.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
        """
        storage, manifest = self.readable(attempt_id, uuid)
        if name not in manifest.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        with self._changes.storage_calls.noted(storage.url):
            return storage.read_file(uuid, name, offset, MAX_PIECE_BYTES)

    def forget(self, attempt_id: int) -> None:
        """Remove an attempt's incomplete uploads, if the attempt has ended on all nodes."""
        # An attempt may be gone with its experiment.
        with self._database.read() as connection:
            if attempt_id in live_attempt_ids(connection):
                return
        self.waiting.forget(attempt_id)
        self._uploads.forget(attempt_id)

    def forget_ended(self) -> None:
        """Remove incomplete uploads of attempts ended without a report from their runners."""
        known = self._uploads.attempts() | {one.attempt_id for one in self.waiting.all()}
        if not known:
            return
        with self._database.read() as connection:
            live = live_attempt_ids(connection)
        for attempt_id in known - live:
            self.forget(attempt_id)

    # ---- details -------------------------------------------------------------------------

    def _directory_of(self, connection: sa.Connection, attempt: sa.Row[Any]) -> DirectoryStorage:
        experiment = StateChanges.experiment(connection, attempt.experiment_id)
        place = experiment_place(experiment, self._changes.default_storage)
        if "://" in place:
            raise RefusedError("other_storage", f"Nodes themselves store checkpoints in {place}.")
        return DirectoryStorage(place, has_one_owner=True)

    def _place(self, row: sa.Row[Any]) -> CheckpointPlace:
        with self._database.read() as connection:
            return checkpoint_place(connection, row, self._changes.default_storage)

    def _store(
        self,
        attempt_id: int,
        storage: DirectoryStorage,
        incoming: IncomingCheckpoint,
        record: CheckpointStored,
    ) -> None:
        manifest = incoming.manifest
        stored = msgspec.structs.replace(
            record,
            metadata=manifest.metadata,
            resources=manifest.resources,
            storage=storage.url,
        )
        check_record(stored)

        def job(transaction: Transaction) -> None:
            attempt = read_attempt(transaction.connection, attempt_id)
            check_not_over(attempt)
            store_checkpoint(self._changes, transaction, attempt, stored)

        with self._database.read() as connection:
            check_not_over(read_attempt(connection, attempt_id))
        # Before the transaction: all that is stored would wait for a storage that hangs.
        with self._changes.storage_calls.noted(storage.url):
            incoming.commit()
        faults.reach("master.checkpoint.moved_in")
        try:
            self._database.write(job).result()
        except (NotFoundError, RefusedError):
            # Whoever has lost the attempt meanwhile must leave nothing there.
            with self._database.read() as connection:
                is_stored = _row_of(connection, manifest.uuid) is not None
            if not is_stored:
                calls = self._changes.storage_calls
                delete_files(calls, CheckpointPlace(storage.url), manifest.uuid)
            raise
        self._uploads.close(attempt_id, manifest.uuid)

    def _shrink(self, row: sa.Row[Any], files: CheckpointFiles) -> None:
        """Delete a checkpoint's files missing from its new manifest."""
        place = self._place(row)
        kept = _checkpoint_files.decode_manifest(files.manifest.encode(), row.uuid).files
        with self._changes.storage_calls.noted(place.storage):
            storage = place.opened(row.uuid)
            manifest = storage.manifest(row.uuid)
        place.check(manifest)
        present = manifest.files
        if any(present.get(name) != entry for name, entry in kept.items()) or not kept:
            raise RefusedError("other_checkpoint", f"There is another checkpoint {row.uuid}.")
        with self._changes.storage_calls.noted(place.storage):
            left = storage.delete_files(row.uuid, lambda name: name not in kept).resources

        def note(transaction: Transaction) -> None:
            note_deleted_files(transaction.connection, row.uuid, left)

        self._database.write(note).result()


def _check_own(row: sa.Row[Any], attempt: sa.Row[Any]) -> None:
    if row.trial_id != attempt.trial_id:
        raise RefusedError(
            "other_trial",
            f"Checkpoint {row.uuid} belongs to another trial than {attempt.trial_id}.",
        )


def _is_there(storage: DirectoryStorage, uuid: str, files: CheckpointFiles) -> bool:
    """Return whether a checkpoint is already in place, moved there by a previous master."""
    if not storage.exists(uuid):
        return False
    if _checkpoint_file_text(storage, uuid, _checkpoint_files.MANIFEST_NAME) != files.manifest:
        raise RefusedError("other_checkpoint", f"There is another checkpoint {uuid}.")
    return True


def _checkpoint_file_text(
    storage: CheckpointStorage,
    uuid: str,
    name: str,
    max_bytes: int = _checkpoint_files.MAX_TEXT_BYTES,
) -> str | None:
    """Return a file of the commit protocol, None if there is none.

    Raises:
        RefusedError: It is larger than `max_bytes`.
    """
    try:
        data = storage.read_file(uuid, name, 0, max(max_bytes, 0) + 1)
    except FileNotFoundError:
        return None
    if len(data) > max_bytes:
        raise RefusedError(
            "checkpoint_unusable",
            f"The manifest of checkpoint {uuid} must have at most"
            f" {_checkpoint_files.MAX_TEXT_BYTES} bytes, and so must all of its done"
            f" files, but {name} is beyond.",
        )
    return data.decode()


def _row_of(connection: sa.Connection, uuid: str) -> sa.Row[Any] | None:
    query = sa.select(tables.checkpoints).where(tables.checkpoints.c.uuid == uuid)
    return connection.execute(query).first()
