"""Shipping of journal records to the master, in order and exactly once."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO
from urllib.parse import quote, urlencode

import msgspec
from msgspec.structs import replace

from paceline._base.files import open_private
from paceline._base.journal_reading_and_writing import Entry, JournalReader, JournalVersionError
from paceline._base.journal_records import MediaFile, RecordLost, encode_record
from paceline._base.run_directory import MAX_SMALL_BYTES, REFUSED_FILE_STATUSES, JournalKey
from paceline._base.run_tail_and_files import FileShipping, LostFileError
from paceline._cluster.messages.runner_messages import (
    AttemptControl,
    AttemptEnd,
    RawRecordBatch,
    RawRecordRequest,
    RecordReply,
)
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.checkpoint_shipping import (
    CheckpointShipper,
    ShardShipper,
    without_checkpoint,
)
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterFailedError,
    MasterLink,
    RefusedByMasterError,
    ShippingLoop,
    UnreachableError,
    encode,
)
from paceline._cluster.runner.output_spool import OutputShipper

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 300

Position = tuple[int, int, int]
"""Generation, rank and number of a record."""


class RefusedRecords:
    """File of refused records beside the attempt, and the substitutes sent instead.

    Args:
        path: The file that gets one line of JSON for each of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._replaced: dict[Position, msgspec.Raw] = {}
        self._first: str | None = None

    @property
    def summary(self) -> str | None:
        """Message about the refused records, None if there are none."""
        if self._first is None:
            return None
        num_others = len(self._replaced) - 1
        return self._first + (f" ({num_others} more were set aside.)" if num_others else "")

    def replace(self, position: Position, payload: bytes) -> msgspec.Raw:
        """Return the payload to send: the record, or its substitute if set aside."""
        return self._replaced.get(position) or msgspec.Raw(payload)

    def add(self, batch: RawRecordBatch, why: str) -> None:
        """Set a batch's only record aside; `why` describes the master's reaction."""
        [(sequence, payload)] = batch.records
        record = bytes(payload)
        line = {
            "generation": batch.generation,
            "rank": batch.rank,
            "sequence": sequence,
            "why": why,
            "record": msgspec.Raw(record),
        }
        place = f"it is set aside in {str(self._path)!r}"
        try:
            with open_private(self._path, "ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            place = f"it cannot be set aside ({error})"
        shown = record.decode(errors="replace")[:_SHOWN_CHARACTERS]
        reason = f"{why}, so {place}: {shown}"
        # A record in its place leaves no gap in the numbers.
        self._replaced[batch.generation, batch.rank, sequence] = msgspec.Raw(
            encode_record(RecordLost(time=time.time(), reason=reason))
        )
        text = f"Record {sequence} of rank {batch.rank} (generation {batch.generation}) is lost:"
        logger.error("%s %s", text, reason)
        self._first = self._first or f"{text} {reason}"


_MAX_RECORDS = 1000
# How often a record that the master fails with is sent again, in about five seconds.
_MAX_TRIES = 8
_CHIEF = 0

OnJudged = Callable[[AttemptControl | None, tuple[int, int]], None]


class RecordShipper(ShippingLoop):
    """Sender of an attempt's records; unacknowledged records are sent again.

    The master drops known records, so no crash loses or doubles any. A single record that it
    refuses, or that it fails with again and again, is set aside, so that the others pass; the
    master gets a `RecordLost` in its place.

    Args:
        directory: The attempt's directory.
        path: Where to send them in the API.
        link: A connection of its own.
        on_judged: Called with the master's orders, None if unchanged, and with the chief's
            newest record that the search has judged: its generation and sequence number.
        is_first: Whether nothing was ever sent, so that the master need not be asked for its state.

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
        self._files = FileShipping(directory.run, self._send_file, (UnreachableError,))

    @property
    def set_aside(self) -> str | None:
        """Message about the records set aside, None if there are none."""
        return self._set_aside.summary

    @property
    def unreadable(self) -> str | None:
        """Why journals could not be read, None if all could."""
        return " ".join(self._unreadable.values()) or None

    def forget_positions(self) -> None:
        """Forget the master's marks: after a failure the amount received is unknown."""
        self._marks = None
        self._readers.clear()

    def check_master(self) -> None:
        """Query the master's marks as a test; raises like `ship_once`."""
        self._post([])

    def ship_once(self) -> bool:
        """Send at most a single request; return False if there is nothing to send."""
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
        """Report damage at the ends of journals; raises like `ship_once`.

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
        payload = self._files.ship(entry.payload)
        return payload if self.has_checkpoints else without_checkpoint(payload)

    def _send_file(self, file: MediaFile, content: IO[bytes]) -> None:
        """Send a file of a record, unless the master has its content.

        Raises:
            LostFileError: The master refuses it.
        """
        path, _, member = self._path.rpartition("/records")
        query = {"digest": file.digest, "media_type": file.media_type}
        url = f"{path}/files/{quote(file.path)}?{urlencode(query)}{member.replace('?', '&')}"
        try:
            if file.size > MAX_SMALL_BYTES:
                try:
                    self._link.put(f"{url}&is_known=true", b"", {})
                    return
                except RefusedByMasterError as error:
                    if error.code != "content_wanted":
                        raise
            self._link.put(url, content, {"Content-Length": str(file.size)})
        except RefusedByMasterError as error:
            if error.status in REFUSED_FILE_STATUSES:
                raise LostFileError(f"is refused: {error}") from error
            raise

    def _read_journal(self, key: JournalKey) -> tuple[int, list[Entry]]:
        """Return the next entries of a journal, and the sequence number before the first."""
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
        """Send records; records unacceptable to the master are set aside, the rest is sent."""
        try:
            self._post(batches)
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            # Halving finds the refused record in few requests.
            self._send_halves(batches, error)
        except MasterFailedError as error:
            self._send_halves(batches, error)

    def _send_halves(
        self, batches: list[RawRecordBatch], error: RefusedByMasterError | MasterFailedError
    ) -> None:
        # Halves in order, never in parallel: the master drops records arriving after later records.
        for half in _batch_halves(batches):
            self._send(half)
        if len(batches) == 1 and len(batches[0].records) == 1:
            self._take_alone(batches[0], error)

    def _take_alone(
        self, batch: RawRecordBatch, error: RefusedByMasterError | MasterFailedError
    ) -> None:
        """Set a record aside, unless the master accepts the record after all."""
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
        """Retry a single record a few times; return True once the master accepts the record.

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
            # The master lost its records, for example its database. The journals have them.
            logger.warning("The master lacks records that it had stored; they are sent again.")
            self.forget_positions()
        marks = [(mark.generation, mark.sequence) for mark in reply.marks if mark.rank == _CHIEF]
        if reply.control is not None and marks:
            self._on_judged(reply.control, max(marks))
        return reply


def _last(batch: RawRecordBatch) -> int:
    return batch.records[-1][0] if batch.records else -1


def _batch_halves(batches: list[RawRecordBatch]) -> list[list[RawRecordBatch]]:
    """Return two smaller requests, or none for a single record."""
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


class Shipper:
    """Shipper of records and output in parallel, so records never wait for output.

    Args:
        directory: The attempt's directory.
        attempt_id: The attempt's number with the master.
        link: The connection to the master.
        member: Which of the attempt's nodes this is.
        on_judged: Called with the master's orders once a search has judged records; see
            `RecordShipper`.
        is_first: Whether nothing was ever sent for the attempt.
    """

    def __init__(
        self,
        directory: AttemptDirectory,
        attempt_id: int,
        link: MasterLink,
        *,
        member: int = 0,
        on_judged: OnJudged = lambda _control, _judged: None,
        is_first: bool = False,
    ) -> None:
        self._directory = directory
        path, query = f"/attempts/{attempt_id}", f"?member={member}" if member else ""
        self._path, self._member = path, member
        self._end_path = f"{path}/end{query}"
        self._link = link
        self._has_started = False
        # Checkpoint loops, empty if the master shares the checkpoint directory.
        self._checkpoints: list[CheckpointShipper | ShardShipper] = []
        self.records = RecordShipper(
            directory,
            f"{path}/records{query}",
            link,
            on_judged=on_judged,
            is_first=is_first,
        )
        self.output = OutputShipper(
            directory, f"{path}/logs{query}", link.another(), is_first=is_first
        )

    def send_checkpoints(self) -> None:
        """Send checkpoints from now on, as the master does not share their directory."""
        self.records.has_checkpoints = False
        link, member = self._link.another(), self._member
        checkpoints = CheckpointShipper(self._directory, self._path, link, member)
        self._checkpoints = [checkpoints]
        if member:
            link = self._link.another()
            self._checkpoints.append(ShardShipper(self._directory, self._path, link, member))
        if self._has_started:
            for loop in self._checkpoints:
                loop.start()

    def note_end(self, end: AttemptEnd) -> None:
        """Take in how the attempt ended here, before the rest is sent."""
        for loop in self._checkpoints:
            if isinstance(loop, CheckpointShipper):
                loop.has_failed = end.has_failed

    def start(self) -> None:
        """Begin to send, in threads; trouble only delays."""
        self._has_started = True
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """Stop the threads; the output thread may continue until `ship_output` is called."""
        for loop in self._loops:
            loop.stop()
        self.records.join()
        for loop in self._checkpoints:
            loop.join()

    def forget_positions(self) -> None:
        """Forget the master's positions: after a failure the amount received is unknown."""
        for loop in self._loops:
            loop.forget_positions()

    def doubt_positions(self) -> None:
        """Make the threads query positions again: the master may have been replaced."""
        for loop in self._loops:
            loop.doubt_positions()

    def ship_records(self) -> None:
        """Send all records and checkpoints, and report damage at the ends of journals.

        For an attempt whose processes are dead.

        Raises:
            UnreachableError: The master did not answer.
            RefusedByMasterError: The master refused the request.
        """
        self.records.ship_rest()
        for loop in self._checkpoints:
            loop.ship_rest()
        self.records.ship_lost()

    def ship_output(self) -> str | None:
        """Send all pending output; return an error if the master accepts only other data.

        Raises:
            UnreachableError: The master takes nothing else either.
        """
        self.output.join()
        return self.output.ship_rest_or_tell(self.records.check_master)

    def ship_end(self, end: AttemptEnd) -> None:
        """Report the end of the attempt to the master; raises like `ship_records`."""
        self._link.post(self._end_path, encode(replace(end, sent_at=time.time())))

    def keep_output(self) -> None:
        """Let the output outlive the attempt's directory."""
        try:
            self._directory.keep_output()
        except OSError as error:
            logger.error("The output cannot be kept: %s", error)

    @property
    def set_aside(self) -> str | None:
        """Message about the records set aside, None if there are none."""
        return self.records.set_aside

    @property
    def unreadable(self) -> str | None:
        """Why journals could not be read, None if all could."""
        return self.records.unreadable

    @property
    def unsent(self) -> str | None:
        """Message naming the checkpoints not sent and the reasons; None if all were sent."""
        found = (one.unsent for one in self._checkpoints if isinstance(one, CheckpointShipper))
        return next(found, None)

    def close(self) -> None:
        """Close the connections."""
        self.records.close()
        self.output.close()
        for loop in self._checkpoints:
            loop.close()

    @property
    def _loops(self) -> list[ShippingLoop]:
        return [self.records, self.output, *self._checkpoints]
