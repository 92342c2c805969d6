"""Journal files of a rank: the writer, and the reader for journals still being written."""

import logging
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from paceline._base import journal_records as records
from paceline._base.files import (
    open_regular_below,
    opened_below,
    opened_directory,
    sync_directory,
    sync_file,
)

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1024 * 1024
# Longer lines count as damaged. A writer begins a new segment after such a line.
_MAX_LINE_BYTES = 64 * 1024 * 1024
# Names and numbers of other forms were written by no writer.
_SEGMENT_NAME = re.compile(r"[0-9]{12,18}\.journal")
_SEQUENCE = re.compile(rb"[0-9]{1,18}")
# Damaged lines at the end for which entries are made; others are counted in the log only.
_MAX_TOLD = 1000


class JournalVersionError(ValueError):
    """Raised when a journal was written in another format version."""


class Entry(msgspec.Struct, frozen=True):
    """Record as stored in the journal: sequence number and JSON."""

    sequence: int
    payload: bytes

    def decode(self) -> records.AnyRecord:
        """Return the record."""
        return records.decode_record(self.payload)


class JournalReader:
    """Follows a rank's journal from a sequence number on.

    A line counts once its line end is there. A damaged line is skipped: if a full disk tore it, its
    record follows whole, and if it was damaged later, the next number shows the gap. Only `finish`
    reports damaged lines that nothing follows.

    Segments are regular files of the user who owns the journal's directory; reading never waits.

    Args:
        directory: The journal's directory; it may be made later.
        after: The sequence number to continue after.
        root: A directory above, below which no link is followed; by default the journal's own.

    Attributes:
        last_sequence: Sequence number of the last record read, or -1.
        has_more: Whether the last `read` ended at one of its limits.
        num_read: Number of bytes that the last `read` went through.
    """

    def __init__(self, directory: Path, *, after: int = -1, root: Path | None = None) -> None:
        self._directory = directory
        self._root = root or directory
        self.last_sequence = after
        self._segment: str | None = None
        self._offset = 0
        # Bytes after the offset known to hold no line end, and whether they are too many.
        self._num_scanned = 0
        self._is_overlong = False
        # The newest record that is whole, known to the caller or not, and the damage after it.
        self._newest = -1
        self._num_damaged = 0
        self.num_read = 0
        self.has_more = False

    def read(self, max_entries: int = 1000, *, max_bytes: int | None = None) -> list[Entry]:
        """Return the next whole entries, at most `max_entries`; empty when there are none yet.

        Args:
            max_entries: The limit of entries.
            max_bytes: The number of bytes after which no further chunk or line is read; `has_more`
                says that entries may be left.

        Raises:
            JournalVersionError: A segment was written in another format version.
            NotRegularFileError: A link, a special file or a foreign file is in the journal's place.
        """
        entries: list[Entry] = []
        self.num_read, self.has_more = 0, False
        with ExitStack() as stack:
            try:
                journal = stack.enter_context(self._opened())
            # The writer makes the journal with its first record.
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                return entries
            self._read(journal, entries, max_entries, max_bytes)
        return entries

    def _read(
        self, journal: int, entries: list[Entry], max_entries: int, max_bytes: int | None
    ) -> None:
        while True:
            if len(entries) >= max_entries or (
                max_bytes is not None and self.num_read >= max_bytes
            ):
                self.has_more = True
                return
            if self._segment is None:
                self._segment = _locate_segment(journal, self.last_sequence)
                if self._segment is None:
                    return
                self._newest = _first_number(self._segment) - 1
            # Looked up before the read: once a later segment exists, this one has all its lines.
            following = next((name for name in _segments(journal) if name > self._segment), None)
            with self._open_segment(journal) as file:
                has_lines = self._read_segment(file, entries, max_entries)
            if not has_lines:
                if following is None:
                    return
                self._segment, self._offset = following, 0
                self._num_scanned, self._is_overlong = 0, False

    def finish(self, *, is_complete: bool = False) -> list[Entry]:
        """Return entries in the place of damaged lines at the end; each is reported once.

        Call this for a journal that was read to its end and whose writer has ended.

        Args:
            is_complete: Whether the writer is known to be dead, so that a last line without its
                end is damaged as well.
        """
        num_lost = min(self._num_damaged + (is_complete and self._has_rest()), _MAX_TOLD)
        first = self._newest + 1
        numbers = range(max(first, self.last_sequence + 1), first + num_lost)
        if not numbers or self._segment is None:
            return []
        self.last_sequence = numbers[-1]
        reason = "its line, with which the journal ends, is damaged"
        record = records.RecordLost(time=self._facts().st_mtime, reason=reason)
        return [Entry(number, records.encode_record(record)) for number in numbers]

    def __iter__(self) -> Iterator[Entry]:
        """Yield every whole entry present now."""
        while entries := self.read():
            yield from entries

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a descriptor of the journal's directory."""
        below = self._directory.relative_to(self._root).as_posix()
        with opened_directory(self._root) as root, opened_below(root, below) as journal:
            yield journal

    def _open_segment(self, journal: int) -> IO[bytes]:
        assert self._segment is not None
        # Owner of the directory: a hard link to a file of another user is refused, too.
        return open_regular_below(journal, self._segment, owners={os.fstat(journal).st_uid})

    def _read_segment(self, file: IO[bytes], entries: list[Entry], max_entries: int) -> bool:
        """Read a chunk; return False without a further whole line in this segment."""
        end = -1
        while end < 0 and not self._is_overlong:
            chunk = os.pread(file.fileno(), _CHUNK_BYTES, self._offset + self._num_scanned)
            if not chunk:
                return False
            self.num_read += len(chunk)
            end = chunk.rfind(b"\n")
            if end < 0:
                self._num_scanned += len(chunk)
                self._is_overlong = self._num_scanned > _MAX_LINE_BYTES
                if self._is_overlong:
                    self._note_damage(self._num_scanned)
        if self._is_overlong:
            return False
        # The line began in an earlier chunk: it is read again from its start.
        if self._num_scanned:
            chunk = os.pread(file.fileno(), self._num_scanned + end + 1, self._offset)
            end = chunk.rfind(b"\n")
            if end < 0:  # cut off meanwhile
                return False
            self._num_scanned = 0
        for line in chunk[:end].split(b"\n"):
            entry = self._parse(line)
            self._offset += len(line) + 1
            if entry is None:
                continue
            self._newest, self._num_damaged = entry.sequence, 0
            if entry.sequence > self.last_sequence:
                self.last_sequence = entry.sequence
                entries.append(entry)
                if len(entries) >= max_entries:
                    break
        return True

    def _has_rest(self) -> bool:
        """Return whether the last segment continues after its last line end."""
        if self._segment is None or self._is_overlong:
            return False
        return self._facts().st_size > self._offset

    def _facts(self) -> os.stat_result:
        """Return the facts of the present segment."""
        with self._opened() as journal, self._open_segment(journal) as file:
            return os.fstat(file.fileno())

    @property
    def _path(self) -> Path:
        return self._directory / (self._segment or "")

    def _note_damage(self, num_bytes: int) -> None:
        # First damaged line of several alone: a stranger's file must not fill the log. No content:
        # a log has other readers than the file.
        if not self._num_damaged:
            logger.warning(
                "Skipped a damaged line in %s at byte %d, %d bytes long.",
                self._path,
                self._offset,
                num_bytes,
            )
        # The first line of a segment is its header, which holds no record.
        self._num_damaged += self._offset > 0 or self._is_overlong

    def _parse(self, line: bytes) -> Entry | None:
        if not line:
            return None
        checksum, _, body = line.partition(b" ")
        number, _, payload = body.partition(b" ")
        try:
            is_whole = int(checksum, 16) == zlib.crc32(body)
        except ValueError:
            is_whole = False
        # The header of each segment has this number.
        if is_whole and number == b"-1":
            self._check_version(payload)
            return None
        if is_whole and _SEQUENCE.fullmatch(number):
            sequence = int(number)
            # A forged number far ahead would hide all later records.
            if sequence <= self.last_sequence + 1 + records.MAX_GAP:
                return Entry(sequence, payload)
        self._note_damage(len(line))
        return None

    def _check_version(self, header: bytes) -> None:
        try:
            version = msgspec.json.decode(header, type=dict[str, Any]).get("journal_version")
        except msgspec.DecodeError:
            version = None
        if version != records.FORMAT_VERSION:
            raise JournalVersionError(
                f"The journal {str(self._path)!r} must have format version"
                f" {records.FORMAT_VERSION}, but has {version!r}. Hint: read it"
                " with the Paceline version that wrote it."
            )


def _segments(journal: int) -> list[str]:
    """Return the names of the segments in a directory, in order."""
    return sorted(name for name in os.listdir(journal) if _SEGMENT_NAME.fullmatch(name))


def _first_number(segment: str) -> int:
    return int(segment.partition(".")[0])


def _locate_segment(journal: int, last_sequence: int) -> str | None:
    """Return the segment of the next record to read; None without segments."""
    segments = _segments(journal)
    candidates = [name for name in segments if _first_number(name) <= last_sequence + 1]
    return candidates[-1] if candidates else next(iter(segments), None)


SEGMENT_BYTES = 16 * 1024 * 1024
# Metrics must not fill the memory while the disk is full.
PENDING_BYTES = 8 * 1024 * 1024
# How long the end of a process waits for disk space for its last records.
CLOSE_PATIENCE_S = 10.0

# A training step must not pay for a full disk: how long it is left alone between two tries.
_RETRY_S = 0.5
# A journal, all journals, the run directory, the directory of the attempt, and its parent.
_DIRECTORIES_OF_RUN = 5
# Frequent records, dropped first on a full disk; later decisions rely on all the others.
_DROPPABLE = (
    records.MetricsReported,
    records.ProgressReported,
    records.StatusReported,
    records.TimeSpent,
)


def frame_line(sequence: int, payload: bytes) -> bytes:
    """Return a journal line: checksum, sequence number and JSON, separated by blanks."""
    body = b"%d %b" % (sequence, payload)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def segment_name(first_sequence: int) -> str:
    """Return the file name of a segment by its first sequence number."""
    return f"{first_sequence:012d}.journal"


class JournalWriter:
    """Appends records to a journal directory; each rank, attempt and generation has its own.

    Lines go to the page cache at once, so they survive the death of the process, not that of the
    node. When the disk is full, records wait in memory and training continues: metrics, progress
    and status beyond `pending_bytes` are dropped, oldest first, and counted in a record of their
    own. Safe to call from several threads.

    `first_sequence` continues the journal of an ended process: the number after its last record.

    Attributes:
        directory: Where the journal is.
        refusal: The last error of writing; None if there was none yet.
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_sequence: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        pending_bytes: int = PENDING_BYTES,
        close_patience_s: float = CLOSE_PATIENCE_S,
    ) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._pending_limit = pending_bytes
        self._close_patience_s = close_patience_s
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._file_descriptor = -1
        self._path = directory
        self._segment_size = 0
        self._next_sequence = first_sequence
        self._are_names_synced = False
        # Segments that are full, and may not be on disk yet.
        self._unsynced: set[Path] = set()
        self._is_line_torn = False
        self._is_disk_full = False
        self.refusal: OSError | None = None
        self._retry_at = 0.0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._droppable: deque[tuple[int, bytes]] = deque()
        self._droppable_bytes = 0
        self._num_dropped = 0
        # The directory is made with the first segment, as a full disk may keep it from being made.
        if not first_sequence and any(directory.glob("*.journal")):
            raise FileExistsError(
                f"A journal is written by one process only, but {str(directory)!r} has one already."
                " Hint: start a new attempt."
            )

    @property
    def last_sequence(self) -> int:
        """The sequence number of the newest record, -1 before the first."""
        return self._next_sequence - 1

    def append(self, record: records.AnyRecord) -> int:
        """Write a record and return its sequence number; never raise on a full disk."""
        # Encoding before the lock: a record without a JSON form raises without taking a number.
        payload = records.encode_record(record)
        with self._lock:
            sequence = self._next_sequence
            self._next_sequence += 1
            line = frame_line(sequence, payload)
            if self._is_disk_full:
                self._hold(sequence, line, record)
                if time.monotonic() >= self._retry_at:
                    self._write_pending()
            elif not self._try_write(sequence, line):
                self._hold(sequence, line, record)
            return sequence

    def flush(self, patience_s: float) -> bool:
        """Wait some seconds for disk space for pending records; return whether none is left.

        Written records survive the death of the process; records waiting in memory do not.
        """
        deadline = time.monotonic() + patience_s
        while True:
            with self._lock:
                if self._is_disk_full:
                    self._write_pending()
                if not self._is_disk_full:
                    return True
            if time.monotonic() >= deadline:
                return False
            # Sleep without the lock: other threads append meanwhile.
            time.sleep(_RETRY_S / 5)

    def sync(self) -> None:
        """Wait until the appended records are on disk, so they survive a power cut.

        A failure of the disk is logged, and is no error for the caller.
        """
        # A thread that finds nothing left to force still waits for the thread that forces it.
        with self._syncing:
            self._force()

    def _force(self) -> None:
        with self._lock:
            if self._file_descriptor < 0:
                return
            # Duplicate descriptor for a sync without the lock: other threads append meanwhile.
            descriptor = os.dup(self._file_descriptor)
            full, self._unsynced = self._unsynced, set()
            are_names_new, self._are_names_synced = not self._are_names_synced, True
        try:
            for path in full:
                sync_file(path)
            os.fsync(descriptor)
            if are_names_new:
                self._sync_names()
        except OSError as error:
            with self._lock:
                self._are_names_synced = False
                self._unsynced |= full
            logger.warning(
                "The journal in %s cannot be forced to disk: %s", self.directory, error.strerror
            )
        finally:
            os.close(descriptor)

    def _sync_names(self) -> None:
        """Force the entries of the journal's directory and its run's or attempt's to disk."""
        directory = self.directory
        for _ in range(_DIRECTORIES_OF_RUN):
            # Directories of other users: they may be closed to this user.
            with suppress(PermissionError):
                sync_directory(directory)
            directory = directory.parent

    def close(self) -> None:
        """Write pending records, if the disk takes them in some seconds, and close the file."""
        # Without the lock, which `flush` takes by itself.
        self.flush(self._close_patience_s)
        with self._lock:
            num_lost = len(self._kept) + len(self._droppable) + self._num_dropped
            if num_lost:
                reason = self.refusal and self.refusal.strerror
                logger.error(
                    "The journal in %s could not be written to the end (%s): %d records are lost.",
                    *(self.directory, reason, num_lost),
                )
            if self._file_descriptor >= 0:
                os.close(self._file_descriptor)
                self._file_descriptor = -1

    def _try_write(self, sequence: int, line: bytes) -> bool:
        try:
            if self._file_descriptor < 0 or self._segment_size >= self._segment_bytes:
                self._open_segment(sequence)
            # The torn line ends with a line end of its own, so that readers skip only that one.
            data = b"\n" + line if self._is_line_torn else line
            written = os.write(self._file_descriptor, data)
            self._segment_size += written
            if written < len(data):
                self._write_rest(data, written)
        except OSError as error:
            if not self._is_disk_full:
                logger.warning(
                    "The journal in %s cannot be written (%s). Training goes on; reports wait in"
                    " memory until it can.",
                    self.directory,
                    error.strerror,
                )
            self._is_disk_full, self.refusal = True, error
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        self._is_line_torn = False
        return True

    def _write_rest(self, data: bytes, written: int) -> None:
        while written < len(data):
            # A nearly full disk takes part of a line; the rest either follows or the line is
            # closed later and read as damaged.
            self._is_line_torn = True
            more = os.write(self._file_descriptor, data[written:])
            written += more
            self._segment_size += more

    def _open_segment(self, first_sequence: int) -> None:
        # Parents that `mkdir` makes by the way would be open to others.
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        path = self.directory / segment_name(first_sequence)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            header = msgspec.json.encode(
                {"journal_version": records.FORMAT_VERSION, "time": time.time()}
            )
            line = frame_line(-1, header)
            # A header that did not fit on a full disk before is closed as a damaged line.
            rest = b"\n" + line if os.fstat(descriptor).st_size > 0 else line
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            # The segment counts only with its header: the next try opens it again.
            os.close(descriptor)
            raise
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
            # Full segment: its descriptor is closed, so `sync` opens it again by its path.
            self._unsynced.add(self._path)
        self._file_descriptor, self._path = descriptor, path
        self._are_names_synced = False
        self._segment_size = os.fstat(descriptor).st_size
        self._is_line_torn = False

    def _hold(self, sequence: int, line: bytes, record: records.AnyRecord) -> None:
        if not isinstance(record, _DROPPABLE):
            self._kept.append((sequence, line))
            return
        self._droppable.append((sequence, line))
        self._droppable_bytes += len(line)
        while self._droppable_bytes > self._pending_limit:
            _, dropped = self._droppable.popleft()
            self._droppable_bytes -= len(dropped)
            self._num_dropped += 1

    def _write_pending(self) -> None:
        while self._kept or self._droppable:
            is_kept_next = not self._droppable or (
                # Order of sequence numbers: the two queues merge into one sequence again.
                bool(self._kept) and self._kept[0] < self._droppable[0]
            )
            held = self._kept if is_kept_next else self._droppable
            sequence, line = held[0]
            if not self._try_write(sequence, line):
                return
            held.popleft()
            if not is_kept_next:
                self._droppable_bytes -= len(line)
        if self._num_dropped:
            record = records.RecordsDropped(time=time.time(), count=self._num_dropped)
            if not self._try_write(
                self._next_sequence, frame_line(self._next_sequence, records.encode_record(record))
            ):
                return
            self._next_sequence += 1
            self._num_dropped = 0
        self._is_disk_full = False
        logger.warning("The journal in %s can be written again.", self.directory)
