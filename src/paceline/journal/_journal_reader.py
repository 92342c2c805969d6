"""Reading a journal while it is being written, and after."""

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline._regular_files import regular_opener
from paceline.journal._journal_records import (
    FORMAT_VERSION,
    AnyRecord,
    RecordLost,
    decode_record,
    encode_record,
)

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1024 * 1024


class JournalVersionError(ValueError):
    """Raised when a journal was written in another format version."""


class Entry(msgspec.Struct, frozen=True):
    """A record as it stands in the journal: its sequence number and its JSON."""

    sequence: int
    payload: bytes

    def decode(self) -> AnyRecord:
        """Return the record."""
        return decode_record(self.payload)


class JournalReader:
    """Follow one rank's journal from a sequence number on.

    A line counts once its line end is there. A damaged line is skipped: if a full disk tore it, its
    record follows whole, and if it was damaged later, the next number shows the gap. Only `finish`
    tells of those that nothing follows.
    """

    def __init__(self, directory: Path, *, after: int = -1) -> None:
        self._directory = directory
        self._last_sequence = after
        self._segment: Path | None = None
        self._offset = 0
        # The newest record that is whole, known to the caller or not, and the damage after it.
        self._newest = -1
        self._num_damaged = 0

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last record that was read, or -1."""
        return self._last_sequence

    def read(self, max_entries: int = 1000) -> list[Entry]:
        """Return the next whole entries, at most `max_entries`; empty when there are none yet.

        Raises:
            JournalVersionError: A segment was written in another format version.
        """
        entries: list[Entry] = []
        while len(entries) < max_entries:
            if self._segment is None:
                self._segment = self._locate_segment()
                self._offset = 0
                if self._segment is None:
                    break
                self._newest = int(self._segment.stem) - 1
            # Looked up before the read: once a later segment exists, this one has all its lines.
            following = self._following_segment()
            if not self._read_segment(entries, max_entries):
                if following is None:
                    break
                self._segment, self._offset = following, 0
        return entries

    def finish(self, *, is_complete: bool = False) -> list[Entry]:
        """Return entries in the place of damaged lines at the end; each is told once.

        For a journal that was read to its end and whose writer writes no more.

        Args:
            is_complete: Whether the writer is known to be dead, so that a last line without its
                end is damaged as well.
        """
        num_lost = self._num_damaged + (is_complete and self._has_rest())
        first = self._newest + 1
        numbers = range(max(first, self._last_sequence + 1), first + num_lost)
        if not numbers or self._segment is None:
            return []
        self._last_sequence = numbers[-1]
        reason = "its line, with which the journal ends, is damaged"
        record = RecordLost(time=self._segment.stat().st_mtime, reason=reason)
        return [Entry(number, encode_record(record)) for number in numbers]

    def __iter__(self) -> Iterator[Entry]:
        """Yield every whole entry that is there now."""
        while entries := self.read():
            yield from entries

    def _read_segment(self, entries: list[Entry], max_entries: int) -> bool:
        """Read one chunk; False when no further whole line is in this segment."""
        assert self._segment is not None
        with open(self._segment, "rb", opener=regular_opener) as file:
            file.seek(self._offset)
            chunk = file.read(_CHUNK_BYTES)
            end = chunk.rfind(b"\n")
            while end < 0 and (more := file.read(_CHUNK_BYTES)):
                chunk += more
                end = chunk.rfind(b"\n")
        if end < 0:
            return False
        for line in chunk[:end].split(b"\n"):
            entry = self._parse(line)
            self._offset += len(line) + 1
            if entry is None:
                continue
            self._newest, self._num_damaged = entry.sequence, 0
            if entry.sequence > self._last_sequence:
                self._last_sequence = entry.sequence
                entries.append(entry)
                if len(entries) >= max_entries:
                    break
        return True

    def _has_rest(self) -> bool:
        """Tell whether the last segment goes on after its last line end."""
        return self._segment is not None and self._segment.stat().st_size > self._offset

    def _parse(self, line: bytes) -> Entry | None:
        if not line:
            return None
        checksum, _, body = line.partition(b" ")
        try:
            is_whole = int(checksum, 16) == zlib.crc32(body)
        except ValueError:
            is_whole = False
        if not is_whole:
            logger.warning("Skipped a damaged line in %s: %.60r", self._segment, line)
            # The first line of a segment is its header, which holds no record.
            self._num_damaged += self._offset > 0
            return None
        number, _, payload = body.partition(b" ")
        if number == b"-1":
            self._check_version(payload)
            return None
        return Entry(int(number), payload)

    def _check_version(self, header: bytes) -> None:
        version = msgspec.json.decode(header).get("journal_version")
        if version != FORMAT_VERSION:
            raise JournalVersionError(
                f"The journal {str(self._segment)!r} must have format version {FORMAT_VERSION},"
                f" but has {version!r}. Hint: read it with the Paceline version that wrote it."
            )

    def _segments(self) -> list[Path]:
        try:
            names = os.listdir(self._directory)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []
        return [self._directory / name for name in sorted(names) if name.endswith(".journal")]

    def _locate_segment(self) -> Path | None:
        """Return the segment that holds the first record after the last one read."""
        segments = self._segments()
        candidates = [s for s in segments if int(s.stem) <= self._last_sequence + 1]
        return candidates[-1] if candidates else next(iter(segments), None)

    def _following_segment(self) -> Path | None:
        assert self._segment is not None
        return next((s for s in self._segments() if s.name > self._segment.name), None)
