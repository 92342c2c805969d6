"""Shipping what journals hold to the master, in order and once."""

import logging
import time
from collections.abc import Callable

import msgspec

from paceline.journal import Entry, JournalKey, JournalReader, JournalVersionError
from paceline.messages.attempts import (
    AttemptControl,
    RawRecordBatch,
    RawRecordRequest,
    RecordReply,
)
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._master_link import (
    MasterBackoff,
    MasterFailedError,
    MasterLink,
    RefusedByMasterError,
    encode,
)
from paceline.runner._refused_records import RefusedRecords
from paceline.runner._ship_checkpoints import without_checkpoint
from paceline.runner._shipping_loop import ShippingLoop

logger = logging.getLogger(__name__)

_MAX_RECORDS = 1000
# How often a record that the master fails with is sent again, in about five seconds.
_MAX_TRIES = 8
_CHIEF = 0

OnJudged = Callable[[AttemptControl | None, tuple[int, int]], None]


class RecordShipper(ShippingLoop):
    """Send an attempt's records; what was not acknowledged is sent again.

    The master drops what it has already, so nothing is lost or doubled whoever dies when. A single
    record that it refuses, or that it fails with again and again, is set aside, so that it does
    not hold up the rest; the master gets word of it in its place.

    Args:
        directory: The attempt's directory.
        path: Where to send them in the API.
        link: A connection of its own.
        on_judged: Gets what the master wants, None if that has not changed, and which record of
            the chief's the search has judged by then: its generation and sequence number.
        is_first: Whether nothing was ever sent, so that the master need not be asked what it has.

    Attributes:
        has_checkpoints: Whether records about checkpoints are sent here too, and not apart.
    """

    def __init__(
        self,
        directory: AttemptDirectory,
        path: str,
        link: MasterLink,
        *,
        on_judged: OnJudged,
        is_first: bool = False,
    ) -> None:
        super().__init__("records")
        self.has_checkpoints = True
        self._directory = directory
        self._path = path
        self._link = link
        self._marks: dict[tuple[int, int], int] | None = {} if is_first else None
        self._readers: dict[tuple[int, int], JournalReader] = {}
        self._on_judged = on_judged
        self._set_aside = RefusedRecords(directory.set_aside_path)
        self._unreadable: dict[tuple[int, int], str] = {}

    @property
    def set_aside(self) -> str | None:
        """What is known of the records that were set aside, None if there are none."""
        return self._set_aside.summary

    @property
    def unreadable(self) -> str | None:
        """Why journals could not be read, None if all could."""
        return " ".join(self._unreadable.values()) or None

    def forget_positions(self) -> None:
        """Ask the master anew what it has; after a failure nobody knows what arrived."""
        self._marks = None
        self._readers.clear()

    def check_master(self) -> None:
        """Ask the master what it has; raises like `ship_once`."""
        self._post([])

    def ship_once(self) -> bool:
        """Send up to one request; False when there was nothing."""
        if self._marks is None:
            reply = self._post([])
            self._marks = {(mark.generation, mark.rank): mark.sequence for mark in reply.marks}
        batches = []
        for key in self._directory.run.journal_keys():
            after, entries = self._read_journal(key)
            if entries:
                batches.append(self._batch((key.generation, key.rank), entries, after))
        if batches:
            self._send(batches)
        return bool(batches)

    def ship_lost(self) -> None:
        """Tell of damage at the ends of journals; raises like `ship_once`.

        For an attempt whose processes are dead, after all else was sent.
        """
        batches = []
        for position, reader in self._readers.items():
            after = reader.last_sequence
            if position not in self._unreadable and (entries := reader.finish(is_complete=True)):
                batches.append(self._batch(position, entries, after))
        if batches:
            self._send(batches)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _batch(self, key: tuple[int, int], entries: list[Entry], after: int) -> RawRecordBatch:
        records = [
            (entry.sequence, self._set_aside.replace((*key, entry.sequence), self._sent(entry)))
            for entry in entries
        ]
        return RawRecordBatch(*key, records, after)

    def _sent(self, entry: Entry) -> bytes:
        return entry.payload if self.has_checkpoints else without_checkpoint(entry.payload)

    def _read_journal(self, key: JournalKey) -> tuple[int, list[Entry]]:
        """Return the next entries of a journal, and the number of the one before them."""
        assert self._marks is not None
        position = (key.generation, key.rank)
        if position in self._unreadable:
            return -1, []
        if position not in self._readers:
            mark = self._marks.get(position, -1)
            self._readers[position] = self._directory.run.reader(key, after=mark)
        reader = self._readers[position]
        after = reader.last_sequence
        try:
            return after, reader.read(_MAX_RECORDS)
        except JournalVersionError as error:
            # The other journals and the output are worth having all the same.
            logger.error("A journal is left out: %s", error)
            self._unreadable[position] = str(error)
            return after, []

    def _send(self, batches: list[RawRecordBatch]) -> None:
        """Send records; one that the master cannot take is set aside, and the rest goes on."""
        try:
            self._post(batches)
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            self._send_halves(batches, error)
        except MasterFailedError as error:
            self._send_halves(batches, error)

    def _send_halves(
        self, batches: list[RawRecordBatch], error: RefusedByMasterError | MasterFailedError
    ) -> None:
        # One after the other: the master drops a record that comes after a later one.
        for half in _halves_of_batches(batches):
            self._send(half)
        if len(batches) == 1 and len(batches[0].records) == 1:
            self._take_alone(batches[0], error)

    def _take_alone(
        self, batch: RawRecordBatch, error: RefusedByMasterError | MasterFailedError
    ) -> None:
        """Set a record aside, unless the master takes it after all."""
        why = f"the master refuses it ({error})"
        if isinstance(error, MasterFailedError):
            if self._has_gone_through(batch):
                return
            why = f"the master fails with it ({error})"
        self._set_aside.add(batch, why)
        [(sequence, payload)] = batch.records
        if batch.rank == _CHIEF:
            # Nobody will ever judge it.
            self._on_judged(None, (batch.generation, sequence))
        position = (batch.generation, batch.rank, sequence)
        replaced = [(sequence, self._set_aside.replace(position, bytes(payload)))]
        self._post([msgspec.structs.replace(batch, records=replaced)])

    def _has_gone_through(self, batch: RawRecordBatch) -> bool:
        """Send one record some more times; True once the master has taken it.

        Raises:
            MasterFailedError: The master fails with an empty request too.
        """
        backoff = MasterBackoff()
        for _ in range(_MAX_TRIES):
            time.sleep(backoff.next_s())
            self.check_master()
            try:
                self._post([batch])
            except MasterFailedError:
                continue
            return True
        return False

    def _post(self, batches: list[RawRecordBatch]) -> RecordReply:
        body = encode(RawRecordRequest(batches=batches))
        reply = msgspec.json.decode(self._link.post(self._path, body), type=RecordReply)
        stored = {(mark.generation, mark.rank): mark.sequence for mark in reply.marks}
        if any(_last(batch) > stored.get((batch.generation, batch.rank), -1) for batch in batches):
            # The master has lost what it had, such as its database. The journals have it.
            logger.warning("The master lacks records that it had stored; they are sent again.")
            self.forget_positions()
        marks = [(mark.generation, mark.sequence) for mark in reply.marks if mark.rank == _CHIEF]
        if reply.control is not None and marks:
            self._on_judged(reply.control, max(marks))
        return reply


def _last(batch: RawRecordBatch) -> int:
    return batch.records[-1][0] if batch.records else -1


def _halves_of_batches(batches: list[RawRecordBatch]) -> list[list[RawRecordBatch]]:
    """Return two requests in place of one, none if it holds a single record."""
    if len(batches) > 1:
        middle = len(batches) // 2
        return [batches[:middle], batches[middle:]]
    [batch] = batches
    middle = len(batch.records) // 2
    if middle == 0:
        return []
    return [
        [msgspec.structs.replace(batch, records=records)]
        for records in (batch.records[:middle], batch.records[middle:])
    ]
