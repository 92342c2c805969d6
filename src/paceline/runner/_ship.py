"""Shipping: what journals and the output spool hold goes to the master, in order and once."""

import logging
import threading
from collections.abc import Callable

import msgspec

from paceline.journal import Entry, JournalKey, JournalReader, JournalVersionError
from paceline.messages.attempts import (
    AttemptEnd,
    LogEntry,
    LogReply,
    LogRequest,
    RawRecordBatch,
    RawRecordRequest,
    RecordReply,
)
from paceline.runner._directory import AttemptDirectory
from paceline.runner._link import (
    Backoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
    encode,
)
from paceline.runner._output import SpoolReader

logger = logging.getLogger(__name__)

_MAX_RECORDS = 1000
_MAX_LINES = 1000
_POLL_S = 0.05
# How many refused records an attempt's output names, and how much of each.
_MAX_TOLD = 20
_SHOWN_CHARACTERS = 300


class Shipper:
    """Send an attempt's records and output; what was not acknowledged is sent again.

    The master drops what it has already, so nothing is lost or doubled whoever dies when. A single
    record or line that it refuses is left out and named, so that it does not hold up the rest.

    Args:
        directory: The attempt's directory.
        attempt_id: The attempt's number with the master.
        link: The connection to the master.
        on_refusal: Gets a sentence for each of the first records that are refused.
    """

    def __init__(
        self,
        directory: AttemptDirectory,
        attempt_id: int,
        link: MasterLink,
        *,
        on_refusal: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._path = f"/attempts/{attempt_id}"
        self._link = link
        self._marks: dict[tuple[int, int], int] | None = None
        self._readers: dict[tuple[int, int], JournalReader] = {}
        self._output: SpoolReader | None = None
        self._on_refusal = on_refusal
        self._refused: set[tuple[int, int, int]] = set()
        self._first_refusal: str | None = None
        self._unreadable: dict[tuple[int, int], str] = {}
        self._stopping = threading.Event()

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

    def run(self) -> None:
        """Ship until `stop` is called; an unreachable master and other trouble only delay."""
        backoff = Backoff()
        trouble = ""
        while not self._stopping.is_set():
            try:
                has_shipped = self.ship_once()
                backoff.reset()
            except UnreachableError as error:
                logger.debug("The master is away: %s", error)
                self.forget_positions()
                self._stopping.wait(backoff.next_s())
                continue
            except Exception as error:
                if str(error) != trouble:
                    logger.exception("Shipping has failed and will be tried again.")
                    trouble = str(error)
                self.forget_positions()
                self._stopping.wait(backoff.next_s())
                continue
            if not has_shipped:
                self._stopping.wait(_POLL_S)

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping.set()

    def forget_positions(self) -> None:
        """Ask the master anew what it has; after a failure nobody knows what arrived."""
        self._marks = None
        self._readers.clear()
        self._output = None

    def ship_once(self) -> bool:
        """Send what is there, up to one request of each kind; False when there was nothing.

        Raises:
            UnreachableError: The master did not answer.
            RefusedByMasterError: The master refused the request.
        """
        if self._marks is None:
            self._read_positions()
        has_records = self._ship_records()
        return self._ship_output() or has_records

    def ship_rest(self) -> None:
        """Send everything that is there; raises like `ship_once`."""
        while self.ship_once():
            pass

    def ship_end(self, end: AttemptEnd) -> None:
        """Tell the master how the attempt ended; raises like `ship_once`."""
        self._link.post(f"{self._path}/end", encode(end))

    def _read_positions(self) -> None:
        reply = self._post_records([])
        self._marks = {(mark.generation, mark.rank): mark.sequence for mark in reply.marks}
        body = encode(LogRequest(entries=[]))
        logs = msgspec.json.decode(self._link.post(f"{self._path}/logs", body), type=LogReply)
        self._output = SpoolReader(self._directory.output_path, after=logs.last_sequence)

    def _ship_records(self) -> bool:
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
            self._send_records(batches)
        return has_read

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

    def _send_records(self, batches: list[RawRecordBatch]) -> None:
        """Send records; one that the master refuses is left out, and the rest goes on."""
        try:
            self._post_records(batches)
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            halves = _halves_of_batches(batches)
            if halves is None:
                self._leave_out(batches[0], error)
                return
            for half in halves:
                self._send_records(half)

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

    def _post_records(self, batches: list[RawRecordBatch]) -> RecordReply:
        body = encode(RawRecordRequest(batches=batches))
        return msgspec.json.decode(self._link.post(f"{self._path}/records", body), type=RecordReply)

    def _ship_output(self) -> bool:
        assert self._output is not None
        entries = self._output.read(_MAX_LINES)
        if entries:
            self._send_lines(entries)
        return bool(entries)

    def _send_lines(self, entries: list[LogEntry]) -> None:
        try:
            self._link.post(f"{self._path}/logs", encode(LogRequest(entries=entries)))
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            if len(entries) == 1:
                # Not told in the output: that line might be refused as well.
                logger.error("Line %d of the output is left out: %s", entries[0].sequence, error)
                return
            middle = len(entries) // 2
            self._send_lines(entries[:middle])
            self._send_lines(entries[middle:])


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
