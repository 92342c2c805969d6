"""Shipping what journals hold to the master, in order and once."""

import logging
from collections.abc import Callable

import msgspec

from paceline.journal import Entry, JournalKey, JournalReader, JournalVersionError
from paceline.messages.attempts import (
    AttemptControl,
    RawRecordBatch,
    RawRecordRequest,
    RecordReply,
)
from paceline.runner._directory import AttemptDirectory
from paceline.runner._link import MasterLink, RefusedByMasterError, encode
from paceline.runner._loop import ShippingLoop

logger = logging.getLogger(__name__)

_MAX_RECORDS = 1000
# How many refused records an attempt's output names, and how much of each.
_MAX_TOLD = 20
_SHOWN_CHARACTERS = 300
_CHIEF = 0

OnJudged = Callable[[AttemptControl | None, tuple[int, int]], None]


class RecordShipper(ShippingLoop):
    """Send an attempt's records; what was not acknowledged is sent again.

    The master drops what it has already, so nothing is lost or doubled whoever dies when. A single
    record that it refuses is left out and named, so that it does not hold up the rest.

    Args:
        directory: The attempt's directory.
        path: The attempt's place in the API.
        link: A connection of its own.
        on_refusal: Gets a sentence for each of the first records that are refused.
        on_judged: Gets what the master wants, None if that has not changed, and which record of
            the chief's the search has judged by then: its generation and sequence number.
    """

    def __init__(
        self,
        directory: AttemptDirectory,
        path: str,
        link: MasterLink,
        *,
        on_refusal: Callable[[str], None],
        on_judged: OnJudged,
    ) -> None:
        super().__init__("records")
        self._directory = directory
        self._path = f"{path}/records"
        self._link = link
        self._marks: dict[tuple[int, int], int] | None = None
        self._readers: dict[tuple[int, int], JournalReader] = {}
        self._on_refusal = on_refusal
        self._on_judged = on_judged
        self._refused: set[tuple[int, int, int]] = set()
        self._first_refusal: str | None = None
        self._unreadable: dict[tuple[int, int], str] = {}

    @property
    def refusals(self) -> str | None:
        """What is known of the records that were left out, None if there are none."""
        if self._first_refusal is None:
            return None
        others = len(self._refused) - 1
        return self._first_refusal + (f" ({others} more were refused.)" if others else "")

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
        has_read = False
        for key in self._directory.run.journal_keys():
            entries = self._read_journal(key)
            has_read = has_read or bool(entries)
            records = [
                (entry.sequence, msgspec.Raw(entry.payload))
                for entry in entries
                if (key.generation, key.rank, entry.sequence) not in self._refused
            ]
            if records:
                batches.append(
                    RawRecordBatch(generation=key.generation, rank=key.rank, records=records)
                )
        if batches:
            self._send(batches)
        return has_read

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _read_journal(self, key: JournalKey) -> list[Entry]:
        assert self._marks is not None
        position = (key.generation, key.rank)
        if position in self._unreadable:
            return []
        if position not in self._readers:
            after = self._marks.get(position, -1)
            self._readers[position] = self._directory.run.reader(key, after=after)
        try:
            return self._readers[position].read(_MAX_RECORDS)
        except JournalVersionError as error:
            # The other journals and the output are worth having all the same.
            logger.error("A journal is left out: %s", error)
            self._unreadable[position] = str(error)
            return []

    def _send(self, batches: list[RawRecordBatch]) -> None:
        """Send records; one that the master refuses is left out, and the rest goes on."""
        try:
            self._post(batches)
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            halves = _halves_of_batches(batches)
            if halves is None:
                self._leave_out(batches[0], error)
                return
            for half in halves:
                self._send(half)

    def _leave_out(self, batch: RawRecordBatch, error: RefusedByMasterError) -> None:
        [(sequence, payload)] = batch.records
        self._refused.add((batch.generation, batch.rank, sequence))
        record = bytes(payload).decode(errors="replace")[:_SHOWN_CHARACTERS]
        text = (
            f"Record {sequence} of rank {batch.rank} (generation {batch.generation}) is left out,"
            f" as the master refuses it ({error}): {record}"
        )
        logger.error("%s", text)
        self._first_refusal = self._first_refusal or text
        if len(self._refused) <= _MAX_TOLD:
            self._on_refusal(text)
        if batch.rank == _CHIEF:
            # Nobody will ever judge it.
            self._on_judged(None, (batch.generation, sequence))

    def _post(self, batches: list[RawRecordBatch]) -> RecordReply:
        body = encode(RawRecordRequest(batches=batches))
        reply = msgspec.json.decode(self._link.post(self._path, body), type=RecordReply)
        marks = [(mark.generation, mark.sequence) for mark in reply.marks if mark.rank == _CHIEF]
        if reply.control is not None and marks:
            self._on_judged(reply.control, max(marks))
        return reply


def _halves_of_batches(
    batches: list[RawRecordBatch],
) -> tuple[list[RawRecordBatch], list[RawRecordBatch]] | None:
    """Return two requests in place of one, None if it holds a single record."""
    if len(batches) > 1:
        middle = len(batches) // 2
        return batches[:middle], batches[middle:]
    [batch] = batches
    middle = len(batch.records) // 2
    if middle == 0:
        return None
    first, second = (
        msgspec.structs.replace(batch, records=records)
        for records in (batch.records[:middle], batch.records[middle:])
    )
    return [first], [second]
