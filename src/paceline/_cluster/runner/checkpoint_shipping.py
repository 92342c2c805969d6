"""Shipping of checkpoints to a master without access to their directory."""

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import msgspec
import xxhash

from paceline import faults
from paceline._base import journal_records as records
from paceline._base.journal_reading_and_writing import JournalReader, JournalVersionError
from paceline._base.run_directory import JournalKey
from paceline._cluster.messages import runner_messages as messages
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    ShippingLoop,
    encode,
)
from paceline.storage._checkpoint_errors import CheckpointNotFoundError
from paceline.storage._checkpoint_files import MANIFEST_NAME, Selector, copy_file, done_name
from paceline.storage._directory_storage import DirectoryStorage

logger = logging.getLogger(__name__)

faults.register("runner.checkpoint.piece_sent")

_MAX_TRIES = 5


class PieceSender:
    """Sender of a checkpoint's missing files, piece by piece.

    Args:
        link: The connection.
        path: Where the checkpoints of the attempt are in the API.
        storage: Where the files are.
        member: Which of the attempt's nodes this is.
    """

    def __init__(self, link: MasterLink, path: str, storage: DirectoryStorage, member: int) -> None:
        self._link = link
        self._path = path
        self._storage = storage
        self._member = member

    def send(self, uuid: str, missing: dict[str, int]) -> bool:
        """Send a piece of the first missing file; update `missing` to the master's progress.

        Returns:
            False if the master does not know of the checkpoint.
        """
        name = next(iter(missing))
        data = self._storage.read_file(uuid, name, missing[name], messages.MAX_PIECE_BYTES)
        num_bytes = self._put(uuid, name, missing[name], data)
        if num_bytes is None:
            return False
        missing[name] = num_bytes
        if num_bytes >= (self._storage.root / uuid / name).stat().st_size:
            del missing[name]
        return True

    def _put(self, uuid: str, name: str, offset: int, data: bytes) -> int | None:
        query = f"name={quote(name, safe='')}&offset={offset}&member={self._member}"
        digest = {"X-Paceline-Digest": xxhash.xxh3_128_hexdigest(data)}
        for number in range(_MAX_TRIES):
            try:
                reply = self._link.put(f"{self._path}/{uuid}/pieces?{query}", data, digest)
            except RefusedByMasterError as error:
                if error.code == "unknown_upload":
                    # The master has dropped the upload: the checkpoint is offered anew.
                    return None
                if error.code != "damaged_piece" or number == _MAX_TRIES - 1:
                    raise
                logger.warning("A piece of %s is sent again: %s", uuid, error)
                continue
            faults.reach("runner.checkpoint.piece_sent")
            return msgspec.json.decode(reply, type=messages.PieceReply).num_bytes
        raise AssertionError


faults.register("runner.checkpoint.sent")

# The master forces all files to disk and reads them before it answers.
_COMMIT_S = 3600.0
# A quick look that spares decoding all other records.
_CHECKPOINT = b'"type":"checkpoint'
_CHIEF = 0

CheckpointRecord = (
    records.CheckpointStored | records.CheckpointDeleted | records.CheckpointFilesDeleted
)


def without_checkpoint(payload: bytes) -> bytes:
    """Return a record for the journal stream; checkpoint records become a placeholder."""
    if _CHECKPOINT not in payload:
        return payload
    record = records.decode_record(payload)
    if not isinstance(record, CheckpointRecord):
        return payload
    return records.encode_record(records.CheckpointSentApart(time=record.time, uuid=record.uuid))


class CheckpointShipper(ShippingLoop):
    """Sender of the journals' checkpoint records in order, each with its files.

    So the master gets the record of a checkpoint only after all its files. It is asked for them
    anew after each failure, so nothing is sent twice after any crash. The files of the checkpoint
    that is being sent are held by links, so that training can delete it meanwhile. A
    checkpoint deleted before its turn is left out.

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
        # Missing files of the first waiting checkpoint; None before the master was asked.
        self._missing: dict[str, int] | None = None
        self._num_offers = 0
        self._unsent: list[str] = []
        self.has_failed = False

    @property
    def unsent(self) -> str | None:
        """Message naming the checkpoints not sent and the reasons; None if all were sent."""
        return " ".join(self._unsent) or None

    def forget_positions(self) -> None:
        """Forget the master's state of the checkpoint, so the next step asks again."""
        self._missing = None

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def ship_once(self) -> bool:
        """Send a piece or a request; return False if there is nothing to send."""
        self._read_journals()
        if not self._waiting:
            return False
        if self._ship(self._waiting[0]):
            self._waiting.popleft()
            self._missing, self._num_offers = None, 0
        return True

    # ---- checkpoints to send --------------------------------------------------------------------

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
        """Send the next part of a checkpoint record; return True after the last part."""
        if isinstance(record, records.CheckpointStored):
            return self._ship_stored(record)
        if isinstance(record, records.CheckpointDeleted):
            self._link.delete(f"{self._path}/{record.uuid}")
            return True
        with suppress(FileNotFoundError):  # deleted meanwhile, which comes later
            files = _files_of(self._local, record.uuid)
            self._offer(record.uuid, messages.CheckpointOffer(files=files))
        return True

    def _ship_stored(self, record: records.CheckpointStored) -> bool:
        uuid = record.uuid
        if not self._hold(uuid):
            logger.info("The checkpoint %s was deleted before it could be sent.", uuid)
            return True
        if self._missing is None:
            files = _files_of(self._outgoing, uuid)
            offer = messages.CheckpointOffer(files=files, record=record, has_failed=self.has_failed)
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

    def _await_others(self, uuid: str, needs: messages.CheckpointNeeds) -> bool:
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

    def _offer(self, uuid: str, offer: messages.CheckpointOffer) -> messages.CheckpointNeeds:
        reply = self._link.post(f"{self._path}/{uuid}", encode(offer), _COMMIT_S)
        return msgspec.json.decode(reply, type=messages.CheckpointNeeds)

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
            # Manifest last: its presence in the target means a complete set of links.
            for name in (*_done_names(source), MANIFEST_NAME):
                if not _link_file_to_ship(source / name, target / name):
                    missing.append(name)
            # Missing files may belong to other nodes. A deletion removes the manifest first, so a
            # missing or changed manifest means a deleted checkpoint.
            if missing and self._local.manifest(uuid) != manifest:
                raise FileNotFoundError(missing[0])
        except (CheckpointNotFoundError, FileNotFoundError):
            shutil.rmtree(target, ignore_errors=True)
            return False
        return True

    def _is_held(self, uuid: str) -> Selector:
        return lambda name: (self._outgoing.root / uuid / name).exists()

    def _release(self, uuid: str) -> None:
        # The manifest first: without one, the rest of a directory is no checkpoint.
        (self._outgoing.root / uuid / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(self._outgoing.root / uuid, ignore_errors=True)


def _is_elsewhere(record: CheckpointRecord, local: DirectoryStorage) -> bool:
    return isinstance(record, records.CheckpointStored) and record.storage != local.url


def _files_of(storage: DirectoryStorage, uuid: str) -> messages.CheckpointFiles:
    path = storage.root / uuid
    shards = [(path / name).read_text() for name in _done_names(path)]
    manifest = (path / MANIFEST_NAME).read_text()
    return messages.CheckpointFiles(manifest=manifest, shards=dict(enumerate(shards)))


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


# Limit of checkpoints sent at a time, equal to the master's limit.
_MAX_OPEN = 4
_PAUSE_S = 0.02

faults.register("runner.shard.arrived")


class ShardShipper(ShippingLoop):
    """Sender of finished shards' files, oldest checkpoint first; deletes the stored ones.

    The master stores a checkpoint once the runner of rank 0's node has offered it and the files of
    all nodes are there. Until then they stay here, as the master may find one damaged. Nothing but
    the files themselves says how far it got.

    Args:
        directory: The attempt's directory.
        path: The attempt's place in the API.
        link: A connection of its own.
        member: Which of the attempt's nodes this is.
    """

    def __init__(
        self, directory: AttemptDirectory, path: str, link: MasterLink, member: int
    ) -> None:
        super().__init__("shards")
        self._storage = DirectoryStorage(directory.run.checkpoints_path)
        self._path = f"{path}/checkpoints"
        self._member = member
        self._link = link
        self._sender = PieceSender(link, self._path, self._storage, member)
        # Checkpoint being sent, with the files missing at the master.
        self._sending: tuple[str, dict[str, int]] | None = None
        # The ranks whose files have arrived, by checkpoint, and when to ask for its state.
        self._arrived: dict[str, set[int]] = {}
        self._ask_at = 0.0
        self._pauses = MasterBackoff(0.2, 2.0)

    def forget_positions(self) -> None:
        """Forget the master's state, so the next step asks again."""
        self._sending = None
        self._arrived.clear()

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def ship_once(self) -> bool:
        """Send a piece or a request; return False if there is nothing to send."""
        if self._sending is not None:
            uuid, missing = self._sending
            if not missing or not self._sender.send(uuid, missing):
                self._sending = None  # the next offer says whether that was all
            return True
        shards = dict(islice(self._shards().items(), _MAX_OPEN))
        for uuid, texts in shards.items():
            if self._arrived.get(uuid) != texts.keys():
                self._offer(uuid, texts, [*shards])
                return True
        if shards and time.monotonic() > self._ask_at:
            self._ask_at = time.monotonic() + self._pauses.next_s()
            for uuid, texts in shards.items():
                if self._offer(uuid, texts, [*shards]):
                    return True
        return False

    def ship_rest(self) -> None:
        """Send everything present; raises like `ship_once`."""
        while self.ship_once() or self._arrived.keys() != self._shards().keys():
            # The oldest ones must be stored before the master takes more.
            time.sleep(_PAUSE_S)

    def _offer(self, uuid: str, texts: dict[int, str], known: list[str]) -> bool:
        """Offer the shards of a checkpoint to the master; return True if files are missing."""
        offer = encode(messages.ShardOffer(shards=texts))
        reply = self._link.post(f"{self._path}/{uuid}/shards?member={self._member}", offer)
        needs = msgspec.json.decode(reply, type=messages.CheckpointNeeds)
        if needs.is_alone:
            logger.error("Checkpoint %s is given up: rank 0's node has ended without it.", uuid)
            self._storage.discard(uuid)
            self._arrived.pop(uuid, None)
            return False
        if needs.is_stored:
            # Checkpoints are committed in their order: the ones before it never will be.
            for each in known[: known.index(uuid) + 1]:
                self._storage.discard(each)
                self._arrived.pop(each, None)
            self._pauses.reset()
        elif needs.missing:
            self._arrived.pop(uuid, None)
            self._sending = (uuid, dict(needs.missing))
        elif self._arrived.get(uuid) != texts.keys():
            self._arrived[uuid] = set(texts)
            faults.reach("runner.shard.arrived")
        return bool(needs.missing)

    def _shards(self) -> dict[str, dict[int, str]]:
        """Return the done files of uncommitted checkpoints, oldest first."""
        root = self._storage.root
        found = []
        for path in root.iterdir() if root.is_dir() else ():
            done = [one for one in path.glob("rank-*.done") if one.name != "rank-0.done"]
            if done and not (path / MANIFEST_NAME).exists():
                texts = {int(one.stem.removeprefix("rank-")): one.read_text() for one in done}
                found.append((min(one.stat().st_mtime_ns for one in done), path.name, texts))
        return {uuid: dict(sorted(texts.items())) for _, uuid, texts in sorted(found)}


faults.register("runner.checkpoint.piece_fetched")
