"""Shipping checkpoints to a master that does not share their directory."""

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline import faults
from paceline.journal import (
    CheckpointDeleted,
    CheckpointFilesDeleted,
    CheckpointSentApart,
    CheckpointStored,
    JournalKey,
    JournalReader,
    JournalVersionError,
    decode_record,
    encode_record,
)
from paceline.messages.attempts import CheckpointFiles, CheckpointNeeds, CheckpointOffer
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._master_link import MasterBackoff, MasterLink, encode
from paceline.runner._send_pieces import PieceSender
from paceline.runner._shipping_loop import ShippingLoop
from paceline.storage import (
    MANIFEST_NAME,
    CheckpointNotFoundError,
    DirectoryStorage,
    Selector,
    copy_file,
    done_name,
)

logger = logging.getLogger(__name__)

faults.register("runner.checkpoint.sent")

# The master forces all files to disk and reads them before it answers.
_COMMIT_S = 3600.0
_MAX_TRIES = 5
# A quick look that spares decoding all other records.
_CHECKPOINT = b'"type":"checkpoint'
_CHIEF = 0

CheckpointRecord = CheckpointStored | CheckpointDeleted | CheckpointFilesDeleted


def without_checkpoint(payload: bytes) -> bytes:
    """Return a record as it is sent with the others: those about checkpoints are sent apart."""
    if _CHECKPOINT not in payload:
        return payload
    record = decode_record(payload)
    if not isinstance(record, CheckpointRecord):
        return payload
    return encode_record(CheckpointSentApart(time=record.time, uuid=record.uuid))


class CheckpointShipper(ShippingLoop):
    """Send what the journals say of checkpoints, in order, each with its files.

    So the master hears of a checkpoint only once it has all of it. What it has of one is asked
    anew after each failure, so nothing is sent twice whoever dies when. The files of the checkpoint
    that is being sent are held by links, so that training can delete it meanwhile. One that was
    deleted before it was begun is left out.

    Args:
        directory: The attempt's directory.
        path: The attempt's place in the API.
        link: A connection of its own.
        member: Which of the attempt's nodes this is.

    Attributes:
        has_failed: Whether the processes of the attempt have failed here.
    """

    def __init__(
        self, directory: AttemptDirectory, path: str, link: MasterLink, member: int = 0
    ) -> None:
        super().__init__("checkpoints")
        self._journals = directory.run
        self._path = f"{path}/checkpoints"
        self._link = link
        self._local = DirectoryStorage(directory.run.checkpoints_path)
        self._outgoing = DirectoryStorage(directory.outgoing_path)
        self._sender = PieceSender(link, self._path, self._outgoing, member)
        self._pauses = MasterBackoff(0.05, 1.0)
        self._waiting: deque[CheckpointRecord] = deque()
        self._readers: dict[JournalKey, JournalReader | None] = {}
        # What the master lacks of the first one that waits; None if it must be asked.
        self._missing: dict[str, int] | None = None
        self._num_offers = 0
        self._unsent: list[str] = []
        self.has_failed = False

    @property
    def unsent(self) -> str | None:
        """Which checkpoints could not be sent and why, None if all could."""
        return " ".join(self._unsent) or None

    def forget_positions(self) -> None:
        """Ask the master anew what it has."""
        self._missing = None

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def ship_once(self) -> bool:
        """Send one piece, or one request; False when there was nothing."""
        self._read_journals()
        if not self._waiting:
            return False
        if self._ship(self._waiting[0]):
            self._waiting.popleft()
            self._missing, self._num_offers = None, 0
        return True

    # ---- what to send --------------------------------------------------------------------

    def _read_journals(self) -> None:
        for key in self._journals.journal_keys():
            if key.rank != _CHIEF:
                continue
            if key not in self._readers:
                self._readers[key] = self._journals.reader(key)
            reader = self._readers[key]
            try:
                entries = [] if reader is None else reader.read(1000)
            except JournalVersionError:
                self._readers[key] = None  # as `RecordShipper` says
                continue
            for entry in entries:
                if _CHECKPOINT in entry.payload:
                    record = entry.decode()
                    # A script may store elsewhere, by a `checkpoint_storage` of its own.
                    if isinstance(record, CheckpointRecord) and not _is_elsewhere(
                        record, self._local
                    ):
                        self._waiting.append(record)

    def _ship(self, record: CheckpointRecord) -> bool:
        """Send something of a checkpoint; True if that was the last."""
        if isinstance(record, CheckpointStored):
            return self._ship_stored(record)
        if isinstance(record, CheckpointDeleted):
            self._link.delete(f"{self._path}/{record.uuid}")
            return True
        with suppress(FileNotFoundError):  # deleted meanwhile, which comes later
            files = _files_of(self._local, record.uuid)
            self._offer(record.uuid, CheckpointOffer(files=files))
        return True

    def _ship_stored(self, record: CheckpointStored) -> bool:
        uuid = record.uuid
        if not self._hold(uuid):
            logger.info("The checkpoint %s was deleted before it could be sent.", uuid)
            return True
        if self._missing is None:
            files = _files_of(self._outgoing, uuid)
            offer = CheckpointOffer(files=files, record=record, has_failed=self.has_failed)
            needs = self._offer(uuid, offer)
            if needs.is_stored:
                self._release(uuid)
                faults.reach("runner.checkpoint.sent")
                return True
            here = {
                name: size
                for name, size in needs.missing.items()
                if (self._outgoing.root / uuid / name).exists()
            }
            if needs.missing and not here:
                return self._await_others(uuid, needs)
            if self._is_unsendable(uuid):
                self._release(uuid)
                return True
            self._missing = here
        if not self._missing or not self._sender.send(uuid, self._missing):
            # The next offer says whether that was all; another master must get it first.
            self._missing = None
        return False

    def _await_others(self, uuid: str, needs: CheckpointNeeds) -> bool:
        """Wait a moment for files of other nodes; True if they never come."""
        if not needs.is_alone:
            time.sleep(self._pauses.next_s())
            return False
        names = ", ".join(map(repr, needs.missing))
        logger.error("Checkpoint %s stays without the files of a node that has ended.", uuid)
        self._unsent.append(
            f"Checkpoint {uuid} was not sent whole: a node ended before it had sent {names}."
        )
        self._release(uuid)
        return True

    # ---- sending -------------------------------------------------------------------------

    def _offer(self, uuid: str, offer: CheckpointOffer) -> CheckpointNeeds:
        reply = self._link.post(f"{self._path}/{uuid}", encode(offer), _COMMIT_S)
        return msgspec.json.decode(reply, type=CheckpointNeeds)

    def _is_unsendable(self, uuid: str) -> bool:
        """Tell whether the master finds the files damaged again and again, and they are so here."""
        self._num_offers += 1
        if self._num_offers <= _MAX_TRIES:
            return False
        self._num_offers = 0
        manifest = self._outgoing.manifest(uuid)
        problems = self._outgoing.problems(manifest.selected(self._is_held(uuid)))
        if not problems:
            return False
        details = ", ".join(f"{name!r} {why}" for name, why in problems.items())
        logger.error("Checkpoint %s cannot be sent: %s", uuid, details)
        self._unsent.append(f"Checkpoint {uuid} was damaged before it could be sent: {details}.")
        return True

    # ---- files that are being sent -------------------------------------------------------

    def _hold(self, uuid: str) -> bool:
        """Link the files of a checkpoint; False if they are gone."""
        target = self._outgoing.root / uuid
        if (target / MANIFEST_NAME).exists():
            return True
        source = self._local.root / uuid
        try:
            manifest = self._local.manifest(uuid)
            shutil.rmtree(target, ignore_errors=True)
            missing = [
                name
                for name in manifest.files
                if not _link_file_to_ship(source / name, target / name)
            ]
            for name in (*_done_names(source), MANIFEST_NAME):
                if not _link_file_to_ship(source / name, target / name):
                    missing.append(name)
            # What another node stores is not here. What is deleted loses its manifest first.
            if missing and self._local.manifest(uuid) != manifest:
                raise FileNotFoundError(missing[0])
        except (CheckpointNotFoundError, FileNotFoundError):
            shutil.rmtree(target, ignore_errors=True)
            return False
        return True

    def _is_held(self, uuid: str) -> Selector:
        return lambda name: (self._outgoing.root / uuid / name).exists()

    def _release(self, uuid: str) -> None:
        # The manifest first: what is left of a directory without one is no checkpoint.
        (self._outgoing.root / uuid / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(self._outgoing.root / uuid, ignore_errors=True)


def _is_elsewhere(record: CheckpointRecord, local: DirectoryStorage) -> bool:
    return isinstance(record, CheckpointStored) and record.storage != local.url


def _files_of(storage: DirectoryStorage, uuid: str) -> CheckpointFiles:
    path = storage.root / uuid
    shards = [(path / name).read_text() for name in _done_names(path)]
    manifest = (path / MANIFEST_NAME).read_text()
    return CheckpointFiles(manifest=manifest, shards=dict(enumerate(shards)))


def _done_names(path: Path) -> Iterator[str]:
    rank = 0
    while (path / done_name(rank)).exists():
        yield done_name(rank)
        rank += 1


def _link_file_to_ship(source: Path, target: Path) -> bool:
    """Link a file; False if there is none."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        return False
    except OSError:
        # A file system without links.
        copy_file(source, target)
    return True
