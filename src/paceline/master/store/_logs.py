"""Log text of trials: one file per attempt beside the database, with an index of offsets."""

import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from paceline._private_files import open_private
from paceline.messages.attempts import LogEntry

_BLOCK_LINES = 256
_FIRST_BLOCK_LINES = 16
_MAX_FILES = 256
_OFFSET = struct.Struct("<Q")
_ATTEMPT_SHIFT = 40
_Fields: TypeAlias = tuple[int, float, int | None, str, str | None, str]
_line_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MASTER_STREAM = "master"


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line of a trial's log; `id` orders the lines of the trial."""

    id: int
    attempt: int
    time: float
    rank: int | None
    stream: str
    level: str | None
    text: str


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines to return; None means all.

    `level` is the lowest one; `since` and `until` are seconds since 1970, both included.
    """

    rank: int | None = None
    level: str | None = None
    stream: str | None = None
    search: str | None = None
    since: float | None = None
    until: float | None = None

    def matches(self, line: StoredLine) -> bool:
        """Tell whether a line passes."""
        if self.rank is not None and line.rank != self.rank:
            return False
        if self.stream is not None and line.stream != self.stream:
            return False
        if self.level is not None and _level_number(line.level) < _level_number(self.level):
            return False
        if self.since is not None and line.time < self.since:
            return False
        if self.until is not None and line.time > self.until:
            return False
        return self.search is None or self.search.lower() in line.text.lower()


def log_levels() -> tuple[str, ...]:
    """Return the names of the levels, lowest first."""
    return _LEVELS


class LogStore:
    """Append-only log files: ``<root>/trial-<id>/attempt-<n>.jsonl`` and ``.index``.

    A line is ``[sequence, time, rank, stream, level, text]``; the runner's sequence numbers make
    shipping twice harmless, and the master's own lines have -1. A damaged line is left out wherever
    it is met, and counted; it keeps its id. Safe to call from several threads.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # May be taken again by its holder: a forgotten iterator of `blocks` ends at any time.
        self._lock = threading.RLock()
        self._files: dict[tuple[int, int], _LogFile] = {}
        # The ids of each trial's damaged lines, as far as its files were read.
        self._damaged: dict[int, set[int]] = {}

    def append(self, trial_id: int, attempt: int, entries: list[LogEntry]) -> int:
        """Store the entries that are new and return the id of the attempt's newest line."""
        with self._using(trial_id, attempt) as file, file.lock:
            fresh = [entry for entry in entries if entry.sequence > file.last_sequence]
            file.append(fresh)
            return _line_id(attempt, file.num_lines - 1)

    def append_note(self, trial_id: int, attempt: int, level: str, text: str) -> None:
        """Add lines of the master itself."""
        entries = [
            LogEntry(-1, time.time(), None, MASTER_STREAM, level, line)
            for line in text.splitlines()
        ]
        with self._using(trial_id, attempt) as file, file.lock:
            file.append(entries)

    def last_sequence(self, trial_id: int, attempt: int) -> int:
        """Return the highest sequence number of the runner's that is stored, or -1."""
        with self._using(trial_id, attempt) as file:
            return file.last_sequence

    def num_damaged(self, trial_id: int) -> int:
        """Return how many damaged lines of a trial were met so far."""
        return len(self._damaged.get(trial_id, ()))

    def read(
        self, trial_id: int, *, after: int = -1, limit: int = 1000, only: LogFilter | None = None
    ) -> list[StoredLine]:
        """Return up to `limit` matching lines beyond the line id `after`, oldest first."""
        lines: list[StoredLine] = []
        for attempt in self._attempts(trial_id):
            if _line_id(attempt + 1, 0) <= after:
                continue
            start = max(0, after + 1 - _line_id(attempt, 0))
            with self._using(trial_id, attempt) as file:
                for line in file.lines(start):
                    if only is None or only.matches(line):
                        lines.append(line)
                        if len(lines) >= limit:
                            return lines
        return lines

    def tail(
        self, trial_id: int, num_lines: int, *, only: LogFilter | None = None
    ) -> list[StoredLine]:
        """Return the last `num_lines` matching lines, oldest first."""
        found: list[StoredLine] = []
        for attempt in reversed(self._attempts(trial_id)):
            with self._using(trial_id, attempt) as file:
                end = file.num_lines
                while end > 0 and len(found) < num_lines:
                    start = max(0, end - _BLOCK_LINES)
                    block = [
                        line
                        for line in file.lines(start, end)
                        if only is None or only.matches(line)
                    ]
                    found = block + found
                    end = start
        return found[-num_lines:] if num_lines > 0 else []

    def blocks(self, trial_id: int, *, newest_first: bool = False) -> Iterator[list[StoredLine]]:
        """Yield all lines of a trial in small blocks, in order or from the end.

        No file stays open between two blocks, so any number of trials can be read side by side.
        """
        attempts = self._attempts(trial_id)
        for attempt in reversed(attempts) if newest_first else attempts:
            with self._using(trial_id, attempt) as file:
                done, size, num_lines = 0, _FIRST_BLOCK_LINES, file.num_lines
                while done < num_lines:
                    end = min(num_lines, done + size)
                    bounds = (num_lines - end, num_lines - done) if newest_first else (done, end)
                    block = list(file.lines(*bounds))
                    yield block[::-1] if newest_first else block
                    done, size = end, min(2 * size, _BLOCK_LINES)

    def delete(self, trial_id: int) -> None:
        """Delete a trial's lines.

        Raises:
            OSError: The files cannot be removed.
        """
        with self._lock:
            for key in [key for key in self._files if key[0] == trial_id]:
                del self._files[key]
            self._damaged.pop(trial_id, None)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root / f"trial-{trial_id}")

    def _note_damaged(self, trial_id: int, line_id: int) -> None:
        self._damaged.setdefault(trial_id, set()).add(line_id)

    def _attempts(self, trial_id: int) -> list[int]:
        # A merge asks this of each trial: most of the time must not go to objects for paths.
        try:
            names = os.listdir(f"{self._root}/trial-{trial_id}")
        except FileNotFoundError:
            return []
        return sorted(int(name[8:-6]) for name in names if name.endswith(".jsonl"))

    @contextmanager
    def _using(self, trial_id: int, attempt: int) -> "Iterator[_LogFile]":
        """Give an attempt's file, which nobody else holds a second object of meanwhile.

        The store's lock is held for a moment only: a long file is read under its own.
        """
        key = (trial_id, attempt)
        with self._lock:
            file = self._files.pop(key, None)
            if file is None:
                path = self._root / f"trial-{trial_id}" / f"attempt-{attempt}.jsonl"
                file = _LogFile(path, attempt, partial(self._note_damaged, trial_id))
            self._files[key] = file
            file.num_users += 1
        try:
            with file.lock:
                file.load()
            yield file
        finally:
            with self._lock:
                file.num_users -= 1
                self._forget()

    def _forget(self) -> None:
        """Forget the least recently used files beyond a number, but none in use."""
        surplus = len(self._files) - _MAX_FILES
        if surplus > 0:
            unused = (key for key, file in self._files.items() if file.num_users == 0)
            for key in list(islice(unused, surplus)):
                del self._files[key]


class _LogFile:
    """One attempt's log file; holds counters, no open file.

    `lock` guards what changes it; lines that are there can be read without. The id of each
    damaged line that is met goes to `on_damaged`.
    """

    def __init__(self, path: Path, attempt: int, on_damaged: Callable[[int], None]) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self._path = path
        self._attempt = attempt
        self._on_damaged = on_damaged
        self._index_path = path.with_suffix(".index")
        self.num_lines = 0
        self.last_sequence = -1
        self._size = 0
        self._is_loaded = False

    def load(self) -> None:
        """Count what is there, unless that was done."""
        if not self._is_loaded:
            if self._path.exists():
                self._scan()
            self._is_loaded = True

    def append(self, entries: list[LogEntry]) -> None:
        if not entries:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data, offsets = bytearray(), bytearray()
        num_lines, last_sequence = self.num_lines, self.last_sequence
        for entry in entries:
            if num_lines % _BLOCK_LINES == 0:
                offsets += _OFFSET.pack(self._size + len(data))
            fields = (
                entry.sequence, entry.time, entry.rank, entry.stream, entry.level, entry.text,
            )  # fmt: skip
            data += json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            num_lines += 1
            last_sequence = max(last_sequence, entry.sequence)
        # The counters follow the file: an append that failed halfway is cut off and comes again.
        with open_private(self._path, "ab") as file:
            file.truncate(self._size)
            file.write(data)
        if offsets:
            with open_private(self._index_path, "ab") as file:
                file.write(offsets)
        self._size += len(data)
        self.num_lines, self.last_sequence = num_lines, last_sequence

    def lines(self, start: int, end: int | None = None) -> Iterator[StoredLine]:
        end = self.num_lines if end is None else min(end, self.num_lines)
        if start >= end:
            return
        with self._path.open("rb") as file:
            for number in range(self._seek_block(file, start // _BLOCK_LINES), end):
                line = file.readline()
                if number >= start and (entry := self._decode(number, line)) is not None:
                    yield StoredLine(_line_id(self._attempt, number), self._attempt, *entry[1:])

    def _seek_block(self, file: BinaryIO, block: int) -> int:
        """Go to a block of lines, or to the first line if the index is damaged.

        Returns:
            The number of the line that comes next.
        """
        try:
            with self._index_path.open("rb") as index:
                index.seek(block * _OFFSET.size)
                offset = _OFFSET.unpack(index.read(_OFFSET.size))[0]
        except (OSError, struct.error):
            offset = -1
        if 0 < offset < self._size:
            file.seek(offset - 1)
            if file.read(1) == b"\n":
                return block * _BLOCK_LINES
        file.seek(0)
        return 0

    def _decode(self, number: int, line: bytes) -> _Fields | None:
        """Return what a line holds; one that is damaged is counted."""
        try:
            return _line_decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._on_damaged(_line_id(self._attempt, number))
            return None

    def _scan(self) -> None:
        """Count what is there, forget a line torn by a crash, and write the index anew."""
        offsets = bytearray()
        num_lines, last_sequence, size = 0, -1, 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if num_lines % _BLOCK_LINES == 0:
                    offsets += _OFFSET.pack(size)
                entry = self._decode(num_lines, line)
                # Numbers grow line by line, so the last one counts. A larger one before it is
                # damaged, and would have all that is shipped from now on look known.
                if entry is not None and entry[0] >= 0:
                    last_sequence = entry[0]
                num_lines += 1
                size += len(line)
        self._index_path.write_bytes(bytes(offsets))
        self.num_lines, self.last_sequence, self._size = num_lines, last_sequence, size


def _line_id(attempt: int, number: int) -> int:
    return (attempt << _ATTEMPT_SHIFT) + number


def _level_number(level: str | None) -> int:
    return _LEVELS.index(level) if level in _LEVELS else _LEVELS.index("INFO")
