"""Files of logs with their indexes: lines appended, read back, found by rank, level and text."""

import json
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from re import Pattern
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from paceline._base.files import open_private, regular_opener
from paceline._base.journal_records import check_line, seal_line
from paceline._base.terminal_text import Colors
from paceline._cluster.messages.runner_messages import LogEntry

logger = logging.getLogger(__name__)

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_USUAL_LEVEL = "INFO"
_MAX_PATTERN_BYTES = 1024 * 1024
ATTEMPT_SHIFT = 40


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
    colors: Colors = ()


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Conditions on log lines; None means no condition.

    `level` is the lowest one; `since` and `until` are seconds since 1970, both included.
    """

    # Not `re`: some patterns make it run for years. RE2 takes time in proportion to the text.

    rank: int | None = None
    level: str | None = None
    stream: str | None = None
    search: str | None = None
    since: float | None = None
    until: float | None = None
    pattern: "Pattern[str] | None" = None

    def matches(self, line: StoredLine) -> bool:
        """Return whether a line passes."""
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
        if self.search is not None and self.search.lower() not in line.text.lower():
            return False
        return self.pattern is None or self.place_in(line.text) is not None

    def place_in(self, text: str) -> tuple[int, int] | None:
        """Return where the pattern first is in a text, in characters."""
        found = None if self.pattern is None else self.pattern.search(text)
        return None if found is None else (found.start(), found.end())


def linear_pattern(text: str) -> "Pattern[str]":
    """Return a regular expression that is searched in linear time, regardless of case.

    Raises:
        ValueError: It is none, or is larger than the engine allows.
    """
    import re2

    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    options.max_mem = _MAX_PATTERN_BYTES
    try:
        pattern: Pattern[str] = re2.compile(text, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode(errors="replace")) from error
    return pattern


def levels_from(level: str) -> tuple[str, ...]:
    """Return a level and the higher ones; () if lines without a level would pass as well."""
    number = _level_number(level)
    return _LEVELS[number:] if number > _level_number(_USUAL_LEVEL) else ()


def line_id(attempt: int, number: int) -> int:
    """Return the id of a line of an attempt."""
    return (attempt << ATTEMPT_SHIFT) + number


def _level_number(level: str | None) -> int:
    return _LEVELS.index(level if level in _LEVELS else _USUAL_LEVEL)


# The letters outside ASCII whose small ones lie within: the sign of kelvin, and the dotted I.
_ODD_LETTERS = ("\u212a".encode(), "\u0130".encode())


# The digest, which is of all that follows; the least and the greatest time; damaged lines.
_RECORD = struct.Struct("<QddI")


_DIGEST_BYTES = 8
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Index entry of a block: the time span of its lines, and how many are damaged."""

    low: float
    high: float
    num_damaged: int


def make_index_record(content: bytes, times: list[float], num_damaged: int) -> bytes:
    """Return the index record of a block; `times` are the times of its readable lines."""
    low, high = min(times, default=math.inf), max(times, default=-math.inf)
    body = _RECORD.pack(0, low, high, num_damaged)[_DIGEST_BYTES:]
    digest = xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(content))
    return digest.to_bytes(_DIGEST_BYTES, "little") + body


def read_index_record(content: bytes, record: bytes) -> LogBlock | None:
    """Return the decoded index record; None if damaged or made for another block."""
    if len(record) != RECORD_BYTES:
        return None
    digest, low, high, num_damaged = _RECORD.unpack(record)
    seed = xxhash.xxh3_64_intdigest(content)
    if digest != xxhash.xxh3_64_intdigest(record[_DIGEST_BYTES:], seed=seed):
        return None
    return LogBlock(low, high, num_damaged)


def has_odd_letters(content: bytes) -> bool:
    """Return whether bytes hold the Kelvin sign or dotted I, lowercased to ASCII letters."""
    # Most logs are ASCII, which shows at once; the searches take longer than all the rest.
    return not content.isascii() and any(letter in content for letter in _ODD_LETTERS)


class LogNeedles:
    """Texts of a filter in their stored form; a line without these texts cannot match.

    What bytes lack says that nothing there passes; what they have says little.
    """

    def __init__(self, only: LogFilter) -> None:
        groups = []
        if only.search:
            groups.append([_Needle(json.dumps(only.search.lower(), ensure_ascii=False)[1:-1])])
        if only.stream is not None:
            groups.append([_Needle(json.dumps(only.stream, ensure_ascii=False))])
        if only.level is not None and (levels := levels_from(only.level)):
            groups.append([_Needle(f'"{level}"') for level in levels])
        self._groups = groups
        self._only = only

    def is_in_time(self, block: LogBlock) -> bool:
        """Return whether a line of a block can have a matching time."""
        since, until = self._only.since, self._only.until
        return (since is None or block.high >= since) and (until is None or block.low <= until)

    def may_pass(self, content: bytes) -> bool:
        """Return whether a line of these bytes could pass."""
        if not self._groups:
            return True
        small = content.lower()
        has_odd = has_odd_letters(content)
        return all(
            any(needle.may_be_in(content, small, has_odd) for needle in group)
            for group in self._groups
        )


class _Needle:
    """Text to search for regardless of case."""

    def __init__(self, text: str) -> None:
        self._text = _fold(text)
        self._bytes = self._text.encode(errors="surrogatepass")
        self._is_ascii = self._text.isascii()
        self._has_odd = "k" in self._text or "i" in self._text

    def may_be_in(self, content: bytes, small: bytes, has_odd: bool) -> bool:
        """Return whether bytes could hold the text; `small` are the same in small ASCII letters."""
        if self._is_ascii:
            return self._bytes in small or (has_odd and self._has_odd)
        return self._text in _fold(content.decode(errors="replace"))


def _fold(text: str) -> str:
    # Sigma has two lowercase forms, chosen by the next letter, which may be an escape here.
    return text.lower().replace("\u03c2", "\u03c3")


BLOCK_LINES = 256
_READ_BYTES = 2**20
_NEWLINE = 10
# The last one includes errors of UTF-8.
_DAMAGE = (msgspec.DecodeError, ValueError)


# Each node of an attempt numbers its lines from such a multiple on.
_LINES_OF_MEMBER = 2**40


class _Fields(msgspec.Struct, frozen=True, array_like=True, gc=False):
    sequence: int
    time: float
    rank: int | None
    stream: str
    level: str | None
    text: str
    colors: Colors = ()


_line_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)


class LogFile:
    """Log file of an attempt with its index; holds counters, but no open file.

    `lock` guards changes; existing lines can be read without it. The id of each
    damaged line that is met goes to `on_damaged`.
    """

    def __init__(self, path: Path, attempt: int, on_damaged: Callable[[int], None]) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self.num_lines = 0
        # The newest of each member that was asked for.
        self._last_sequences: dict[int, int] = {}
        self._path = path
        self._index_path = path.with_suffix(".index")
        self._attempt = attempt
        self._on_damaged = on_damaged
        # Byte offsets at which the blocks begin, and the index entries of the full blocks.
        self._starts: list[int] = []
        self._blocks: list[LogBlock] = []
        self._size = 0
        self._is_loaded = False
        self.is_full = False

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self._size

    def load(self) -> None:
        """Count the lines and complete the index, unless this was done before."""
        if not self._is_loaded:
            if self._path.exists():
                with _open_to_read(self._path) as file:
                    self._count(file)
                    if self.num_lines:
                        self._check_index(file)
            self._is_loaded = True

    def last_sequence_of(self, member: int) -> int:
        """Return the highest sequence number of a member, or -1."""
        if member not in self._last_sequences:
            found = -1
            if self.num_lines:
                with _open_to_read(self._path) as file:
                    found = self._newest_sequence(file, member)
            self._last_sequences[member] = found
        return self._last_sequences[member]

    def append(self, entries: list[LogEntry]) -> None:
        """Append lines."""
        if not entries:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data, starts = bytearray(), []
        num_lines = self.num_lines
        newest: dict[int, int] = {}
        for entry in entries:
            if num_lines % BLOCK_LINES == 0:
                starts.append(self._size + len(data))
            fields: tuple[object, ...] = (
                entry.sequence, entry.time, entry.rank, entry.stream, entry.level, entry.text,
            )  # fmt: skip
            fields += (entry.colors,) if entry.colors else ()
            data += seal_line(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))
            num_lines += 1
            if entry.sequence >= 0:
                newest[entry.sequence // _LINES_OF_MEMBER] = entry.sequence
        # The counters follow the file: an append that failed halfway is cut off and comes again.
        with open_private(self._path, "ab") as file:
            file.truncate(self._size)
            file.write(data)
        self._starts += starts
        self._size += len(data)
        self.num_lines = num_lines
        self._note_sequences(newest)
        if len(self._blocks) < num_lines // BLOCK_LINES:
            try:
                self._extend_index()
            except OSError as error:
                # The lines are stored, and are found without it; the next append tries again.
                logger.warning("An index of a log cannot be written: %s", error)

    def drop(self, entries: list[LogEntry]) -> None:
        """Take lines as known without storing them, as the log is full."""
        self.is_full = True
        self._note_sequences({e.sequence // _LINES_OF_MEMBER: e.sequence for e in entries})

    def _note_sequences(self, newest: dict[int, int]) -> None:
        for member, sequence in newest.items():
            self._last_sequences[member] = max(self._last_sequences.get(member, -1), sequence)

    def lines(self, start: int, end: int | None = None) -> Iterator[StoredLine]:
        """Yield lines by their numbers."""
        end = self.num_lines if end is None else min(end, self.num_lines)
        if start >= end:
            return
        # Offsets are known per block only, so reading starts at the beginning of the block.
        block = start // BLOCK_LINES
        with _open_to_read(self._path) as file:
            file.seek(self._starts[block])
            for number in range(block * BLOCK_LINES, end):
                line = file.readline()
                if number >= start and (entry := self._decode(number, line)) is not None:
                    yield self._stored(number, entry)

    def matching(
        self, only: LogFilter, start: int = 0, *, newest_first: bool = False
    ) -> Iterator[StoredLine]:
        """Yield the matching lines from number `start` on; blocks without matches are skipped."""
        for content, first, needles, _ in self._blocks_for(only, start, newest_first):
            for number, text in _numbered(content, first, newest_first):
                if number >= start and needles.may_pass(text):
                    entry = self._decode(number, text)
                    if entry is not None and only.matches(line := self._stored(number, entry)):
                        yield line

    def matching_in_time(
        self, only: LogFilter, *, newest_first: bool = False
    ) -> Iterator[tuple[StoredLine | None, float]]:
        """Yield matching lines with their times, and (None, time) for all other lines.

        A skipped block has one time for all lines: the greatest, or the least if the newest come
        first.
        """
        for content, first, _, known in self._blocks_for(only, 0, newest_first):
            if known is not None:
                yield None, known.low if newest_first else known.high
            for number, text in _numbered(content, first, newest_first):
                if (entry := self._decode(number, text)) is not None:
                    line = self._stored(number, entry)
                    yield line if only.matches(line) else None, line.time

    def _blocks_for(
        self, only: LogFilter, start: int, newest_first: bool
    ) -> Iterator[tuple[bytes, int, LogNeedles, LogBlock | None]]:
        """Yield the bytes of each block and the number of its first line.

        Where no line can pass, the bytes are left out, and the index entry stands for them.
        """
        with self.lock:
            # The file only grows, so these bounds stay valid without the lock.
            num_lines, starts = self.num_lines, [*self._starts, self._size]
            blocks = list(self._blocks)
        needles = LogNeedles(only)
        if not num_lines:
            return
        order = range(start // BLOCK_LINES, len(starts) - 1)
        with _open_to_read(self._path) as file:
            for number in reversed(order) if newest_first else order:
                known = blocks[number] if number < len(blocks) else None
                content = b""
                if known is None or needles.is_in_time(known):
                    file.seek(starts[number])
                    content = file.read(starts[number + 1] - starts[number])
                if known is not None and not (content and needles.may_pass(content)):
                    yield b"", number * BLOCK_LINES, needles, known
                else:
                    yield content, number * BLOCK_LINES, needles, None

    def _stored(self, number: int, entry: _Fields) -> StoredLine:
        _, *fields = msgspec.structs.astuple(entry)
        return StoredLine(line_id(self._attempt, number), self._attempt, *fields)

    def _decode(self, number: int, line: bytes) -> _Fields | None:
        """Return the fields of a line; None if the line is damaged, after counting the damage."""
        try:
            return _parse_log_line(line)
        except _DAMAGE:
            self._on_damaged(line_id(self._attempt, number))
            return None

    def _count(self, file: BinaryIO) -> None:
        """Count the lines and find the blocks; a line torn by a crash is forgotten."""
        num_lines, size, offset = 0, 0, 0
        starts = [0]
        while content := file.read(_READ_BYTES):
            ends = np.flatnonzero(np.frombuffer(content, np.uint8) == _NEWLINE)
            if len(ends):
                last_of_blocks = ends[-(num_lines + 1) % BLOCK_LINES :: BLOCK_LINES]
                starts += (last_of_blocks + offset + 1).tolist()
                size = offset + int(ends[-1]) + 1
                num_lines += len(ends)
            offset += len(content)
        self.num_lines, self._size = num_lines, size
        self._starts = starts[: -(-num_lines // BLOCK_LINES)]

    def _check_index(self, file: BinaryIO) -> None:
        """Read the index and rebuild missing or mismatched records; damaged lines are counted."""
        found = b""
        if self._index_path.exists():
            with _open_to_read(self._index_path) as index:
                found = index.read()
        bounds = [*self._starts, self._size]
        records = []
        for number, (begin, end) in enumerate(pairwise(bounds)):
            file.seek(begin)
            content = file.read(end - begin)
            record = found[number * RECORD_BYTES : (number + 1) * RECORD_BYTES]
            block = read_index_record(content, record)
            is_full = number < self.num_lines // BLOCK_LINES
            if block is None or not is_full or block.num_damaged:
                record, block = self._record_of(number, content)
            if is_full:
                records.append(record)
                self._blocks.append(block)
        made = b"".join(records)
        if made != found:
            with open_private(self._index_path, "wb") as index:
                index.write(made)

    def _record_of(self, number: int, content: bytes) -> tuple[bytes, LogBlock]:
        """Return the index record of a block in its stored and decoded forms."""
        entries = [self._decode(*line) for line in _numbered(content, number * BLOCK_LINES)]
        times = [entry.time for entry in entries if entry is not None]
        record = make_index_record(content, times, num_damaged=len(entries) - len(times))
        block = read_index_record(content, record)
        assert block is not None
        return record, block

    def _extend_index(self) -> None:
        bounds = [*self._starts, self._size]
        made = []
        with _open_to_read(self._path) as file:
            for number in range(len(self._blocks), self.num_lines // BLOCK_LINES):
                file.seek(bounds[number])
                made.append(self._record_of(number, file.read(bounds[number + 1] - bounds[number])))
        with open_private(self._index_path, "ab") as index:
            index.truncate(len(self._blocks) * RECORD_BYTES)
            index.write(b"".join(record for record, _ in made))
        self._blocks += [block for _, block in made]

    def _newest_sequence(self, file: BinaryIO, member: int) -> int:
        """Return the newest sequence number of a member's runner, or -1.

        Numbers grow line by line, so the last one counts. A larger number before it is damaged:
        with it, all lines shipped later would look known.
        """
        bounds = [*self._starts, self._size]
        for begin, end in reversed(list(pairwise(bounds))):
            file.seek(begin)
            for _, line in _numbered(file.read(end - begin), 0, newest_first=True):
                try:
                    sequence = _parse_log_line(line).sequence
                except _DAMAGE:
                    continue
                if sequence >= 0 and sequence // _LINES_OF_MEMBER == member:
                    return sequence
        return -1


def _open_to_read(path: Path) -> BinaryIO:
    return open(path, "rb", opener=regular_opener)


def numbered_of_member(entry: LogEntry, member: int) -> LogEntry:
    """Return a line with its number among the lines of all members."""
    return msgspec.structs.replace(entry, sequence=entry.sequence + member * _LINES_OF_MEMBER)


def own_sequence(sequence: int) -> int:
    """Return a line's number among the lines of its member; -1 stays."""
    return sequence if sequence < 0 else sequence % _LINES_OF_MEMBER


def _numbered(content: bytes, first: int, newest_first: bool = False) -> list[tuple[int, bytes]]:
    """Return the lines of a block with their numbers."""
    if not content:
        return []
    numbered = list(enumerate(content.removesuffix(b"\n").split(b"\n"), first))
    return numbered[::-1] if newest_first else numbered


def _parse_log_line(line: bytes) -> _Fields:
    """Return the fields of a line; without its checksum.

    Raises:
        msgspec.DecodeError: It is damaged.
        ValueError: It is damaged.
    """
    return _line_decoder.decode(check_line(line))


def num_damaged_lines(path: Path) -> int:
    """Return how many whole lines of an attempt's log are damaged; nothing is changed."""
    num_damaged = 0
    with _open_to_read(path) as file:
        for line in file:
            try:
                # A line without an end is still being written.
                if line.endswith(b"\n"):
                    _parse_log_line(line)
            except _DAMAGE:
                num_damaged += 1
    return num_damaged
