"""Shipping: what journals and the output spool hold goes to the master, in order and once."""

import logging
import threading

import msgspec

from paceline.journal import JournalKey, JournalReader
from paceline.messages.attempts import (
    AttemptEnd,
    LogReply,
    LogRequest,
    RawRecordBatch,
    RawRecordRequest,
    RecordReply,
)
from paceline.runner._directory import AttemptDirectory
from paceline.runner._link import Backoff, MasterLink, UnreachableError, encode
from paceline.runner._output import SpoolReader

logger = logging.getLogger(__name__)

_MAX_RECORDS = 1000
_MAX_LINES = 1000
_POLL_S = 0.05


class Shipper:
    """Send an attempt's records and output; what was not acknowledged is sent again.

    The master drops what it has already, so nothing is lost or doubled whoever dies when.
    """

    def __init__(self, directory: AttemptDirectory, attempt_id: int, link: MasterLink) -> None:
        self._directory = directory
        self._path = f"/attempts/{attempt_id}"
        self._link = link
        self._marks: dict[tuple[int, int], int] | None = None
        self._readers: dict[tuple[int, int], JournalReader] = {}
        self._output: SpoolReader | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        """Ship until `stop` is called; an unreachable master only delays."""
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                has_shipped = self.ship_once()
                backoff.reset()
            except UnreachableError as error:
                logger.debug("The master is away: %s", error)
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
        assert self._marks is not None
        batches = []
        for key in self._directory.run.journal_keys():
            entries = self._reader(key).read(_MAX_RECORDS)
            if entries:
                records = [(entry.sequence, msgspec.Raw(entry.payload)) for entry in entries]
                batches.append(
                    RawRecordBatch(generation=key.generation, rank=key.rank, records=records)
                )
        if batches:
            self._post_records(batches)
        return bool(batches)

    def _reader(self, key: JournalKey) -> JournalReader:
        assert self._marks is not None
        position = (key.generation, key.rank)
        if position not in self._readers:
            after = self._marks.get(position, -1)
            self._readers[position] = self._directory.run.reader(key, after=after)
        return self._readers[position]

    def _post_records(self, batches: list[RawRecordBatch]) -> RecordReply:
        body = encode(RawRecordRequest(batches=batches))
        return msgspec.json.decode(self._link.post(f"{self._path}/records", body), type=RecordReply)

    def _ship_output(self) -> bool:
        assert self._output is not None
        entries = self._output.read(_MAX_LINES)
        if entries:
            self._link.post(f"{self._path}/logs", encode(LogRequest(entries=entries)))
        return bool(entries)
