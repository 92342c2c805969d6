"""New records of a run as they come, and its files shipped elsewhere."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from paceline._base.files import open_regular_below, opened_directory
from paceline._base.journal_reading_and_writing import Entry, JournalReader
from paceline._base.journal_records import (
    MediaFile,
    MediaReported,
    RecordLost,
    decode_record,
    encode_record,
)
from paceline._base.run_directory import JournalKey, RunDirectory, check_file_path

MEDIA_MARK = b'"type":"media"'


# Failures of a file that is passed over then: the records behind it must arrive.
_MAX_FAILURES = 5


class RunTail:
    """Reads new entries of a run's ranks since the last call, in the order of attempts.

    Args:
        run: The run directory; it may still be written to.
        marks: The sequence number to continue after, for journals that were read before.

    Attributes:
        has_more: Whether the last `read` ended at one of its limits.
        num_read: Number of bytes that the last `read` went through.
    """

    def __init__(self, run: RunDirectory, marks: Mapping[JournalKey, int]) -> None:
        self._run = run
        self._marks = marks
        self._readers: dict[JournalKey, JournalReader] = {}
        self._finished: set[JournalKey] = set()
        self.num_read = 0
        self.has_more = False

    def read(
        self, max_entries: int = 1000, *, max_bytes: int | None = None
    ) -> list[tuple[JournalKey, list[Entry]]]:
        """Return the next entries, at most `max_entries` in all; fewer mean there are no more.

        An attempt's entries come only after all of the earlier attempts'.

        Args:
            max_entries: The limit of entries.
            max_bytes: The number of bytes after which no further chunk or line is read: then
                `has_more` says whether there may be more.

        Raises:
            JournalVersionError: A journal was written in another format version.
            NotRegularFileError: A link, a special file or a foreign file is in a journal's place.
        """
        found: list[tuple[JournalKey, list[Entry]]] = []
        self.num_read, self.has_more = 0, False
        keys = [key for key in self._run.journal_keys() if key not in self._finished]
        for key in keys:
            left = None if max_bytes is None else max_bytes - self.num_read
            if max_entries <= 0 or (left is not None and left <= 0):
                self.has_more = True
                break
            reader = self._reader(key)
            entries = reader.read(max_entries, max_bytes=left)
            self.has_more |= reader.has_more
            self.num_read += reader.num_read
            if not entries and not reader.has_more and _is_before(key, keys[-1]):
                # Attempts follow each other, so this one will write no more.
                entries = reader.finish()
                self._finished.add(key)
                self._readers.pop(key, None)
            if entries:
                found.append((key, entries))
                max_entries -= len(entries)
        return found

    def finish(self) -> list[tuple[JournalKey, list[Entry]]]:
        """Return entries in the place of damaged lines at the ends of journals, each once.

        Call this for a run that has ended and was read completely.
        """
        found = [(key, reader.finish()) for key, reader in sorted(self._readers.items())]
        return [(key, entries) for key, entries in found if entries]

    def _reader(self, key: JournalKey) -> JournalReader:
        if key not in self._readers:
            self._readers[key] = self._run.reader(key, after=self._marks.get(key, -1))
        return self._readers[key]


def _is_before(key: JournalKey, newest: JournalKey) -> bool:
    return (key.attempt, key.generation) < (newest.attempt, newest.generation)


class LostFileError(Exception):
    """Raised when a file of a record can never reach the master; the text says why."""


@dataclass(eq=False, repr=False)
class FileShipping:
    """Sends the files of media records.

    Args:
        run: The run directory; whoever writes there is a stranger to the master.
        send: Sends a file; raises `LostFileError` if another try would be in vain.
        passing: Errors of `send` after which another try may succeed. The master must have
            answered other requests before each try, so a few failures are the file's own.
    """

    run: RunDirectory
    send: Callable[[MediaFile, IO[bytes]], None]
    passing: tuple[type[Exception], ...]

    def __post_init__(self) -> None:
        self._failures = Counter[str]()

    def ship(self, payload: bytes) -> bytes:
        """Send the files of a record, and return what to send of the record itself.

        A record without its files is replaced by one that says so: the master counts it as lost.
        """
        if MEDIA_MARK not in payload:
            return payload
        record = decode_record(payload)
        if not isinstance(record, MediaReported):
            return payload
        for file in record.files:
            try:
                self._ship_file(file)
            except LostFileError as error:
                what = f"{record.kind} {record.name!r:.300} at step {record.steps_completed}"
                reason = f"{what}: its file {file.path!r:.1200} {error!s:.1000}"
                return encode_record(RecordLost(time=record.time, reason=reason))
        return payload

    def _ship_file(self, file: MediaFile) -> None:
        try:
            content = open_run_file(self.run, file)
        except (OSError, ValueError) as error:
            raise LostFileError(f"cannot be read ({error})") from error
        with content:
            try:
                self.send(file, content)
            except self.passing as error:
                self._failures[file.path] += 1
                if self._failures[file.path] < _MAX_FAILURES:
                    raise
                raise LostFileError(f"cannot be sent ({error})") from error


def open_run_file(run: RunDirectory, file: MediaFile) -> IO[bytes]:
    """Open a file of a run, without following links.

    Raises:
        OSError: It is missing, no regular file, or cannot be read.
        ValueError: Its path leads elsewhere, or it has another size than recorded.
    """
    with opened_directory(run.path) as directory:
        name = f"{run.files_path.name}/{check_file_path(file.path)}"
        content = open_regular_below(directory, name)
    size = content.seek(0, 2)
    content.seek(0)
    if size != file.size:
        content.close()
        raise ValueError(f"it must have {file.size} bytes, but has {size}")
    return content
