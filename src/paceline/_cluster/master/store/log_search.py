"""Index of a log file: the blocks and lines possibly matching a filter on text, level or time."""

import json
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from paceline._base.files import regular_opener

if TYPE_CHECKING:
    from numpy.typing import NDArray


_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_USUAL_LEVEL = "INFO"
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


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Conditions on log lines; None means no condition.

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


def levels_from(level: str) -> tuple[str, ...]:
    """Return a level and the higher ones; () if lines without a level would pass as well."""
    number = _level_number(level)
    return _LEVELS[number:] if number > _level_number(_USUAL_LEVEL) else ()


def line_id(attempt: int, number: int) -> int:
    """Return the id of a line of an attempt."""
    return (attempt << ATTEMPT_SHIFT) + number


def _level_number(level: str | None) -> int:
    return _LEVELS.index(level if level in _LEVELS else _USUAL_LEVEL)


_BITS = 15
_NUM_BYTES = (1 << _BITS) // 8
_FACTOR = np.uint32(2_654_435_761)
# The letters outside ASCII whose small ones lie within: the sign of kelvin, and the dotted I.
_ODD_LETTERS = ("\u212a".encode(), "\u0130".encode())
# The digest, which is of all that follows; the least and the greatest time; damaged lines.
HEAD = struct.Struct("<QddI")
DIGEST_BYTES = 8
RECORD_BYTES = HEAD.size + _NUM_BYTES
_CHECKSUM = re.compile(rb", \d+\]\n")


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Index entry of a block without its text bits: the time span of its lines.

    `digest` is that of the record's body, to know whether it is still what it was.
    """

    low: float
    high: float
    num_damaged: int
    digest: int


def make_index_record(content: bytes, times: list[float], num_damaged: int) -> bytes:
    """Return the index record of a block; `times` are the times of its readable lines."""
    low, high = min(times, default=np.inf), max(times, default=-np.inf)
    text = _CHECKSUM.sub(b"]\n", content)  # nobody looks for checksums
    body = HEAD.pack(0, low, high, num_damaged)[DIGEST_BYTES:] + _bits_of(text)
    digest = xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(content))
    return digest.to_bytes(DIGEST_BYTES, "little") + body


def read_index_record(content: bytes, record: bytes) -> LogBlock | None:
    """Return the decoded index record; None if damaged or made for another block."""
    if len(record) != RECORD_BYTES:
        return None
    digest, low, high, num_damaged = HEAD.unpack_from(record)
    body = record[DIGEST_BYTES:]
    if digest != xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(content)):
        return None
    return LogBlock(low, high, num_damaged, xxhash.xxh3_64_intdigest(body))


def _bits_of(content: bytes) -> bytes:
    if has_odd_letters(content):
        return b"\xff" * _NUM_BYTES
    bits = np.zeros(2**_BITS, bool)
    bits[grams_of(np.frombuffer(content.lower(), np.uint8))] = True
    return bytes(np.packbits(bits))


def has_odd_letters(content: bytes) -> bool:
    """Tell whether bytes hold the Kelvin sign or dotted I, lowercased to ASCII letters."""
    # Most logs are ASCII, which shows at once; the searches take longer than all the rest.
    return not content.isascii() and any(letter in content for letter in _ODD_LETTERS)


def grams_of(values: "NDArray[np.uint8]") -> "NDArray[np.uint32]":
    """Return a hash of `_BITS` bits for each three consecutive bytes."""
    wide = values.astype(np.uint32)
    grams = wide[:-2] | wide[1:-1] << np.uint32(8) | wide[2:] << np.uint32(16)
    hashed: NDArray[np.uint32] = (grams * _FACTOR) >> np.uint32(32 - _BITS)
    return hashed


_RECORDS_AT_ONCE = 256


class LogNeedles:
    """Texts of a filter in their stored form; a line without these texts cannot match.

    What a block or a line lacks says that nothing there passes; what it has says little.
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

    def blocks(self, index_path: Path, blocks: Sequence[LogBlock]) -> list[bool]:
        """Return for each indexed block whether any of its lines could match."""
        passing = [self._is_in_time(block) for block in blocks]
        if not self._groups or not any(passing):
            return passing
        # Read in pieces, not mapped: a file that somebody cuts off must not end the process.
        with suppress(OSError), open(index_path, "rb", opener=regular_opener) as file:
            for start in range(0, len(blocks), _RECORDS_AT_ONCE):
                records = file.read(_RECORDS_AT_ONCE * RECORD_BYTES)
                found = self._among(records, blocks[start : start + _RECORDS_AT_ONCE])
                for number, is_passing in enumerate(found, start):
                    passing[number] &= is_passing
        return passing

    def _is_in_time(self, block: LogBlock) -> bool:
        since, until = self._only.since, self._only.until
        return (since is None or block.high >= since) and (until is None or block.low <= until)

    def _among(self, records: bytes, blocks: Sequence[LogBlock]) -> list[bool]:
        whole = len(records) // RECORD_BYTES
        rows = np.frombuffer(records, np.uint8, whole * RECORD_BYTES).reshape(whole, RECORD_BYTES)
        bits = rows[:, HEAD.size :]
        passing = np.ones(whole, bool)
        for group in self._groups:
            passing &= np.logical_or.reduce([needle.among(bits) for needle in group])
        # Damaged records rule nothing out: such blocks count as possible matches.
        view = memoryview(records)
        return [
            bool(passing[number])
            or block.digest
            != xxhash.xxh3_64_intdigest(
                view[number * RECORD_BYTES + DIGEST_BYTES : (number + 1) * RECORD_BYTES]
            )
            for number, block in enumerate(blocks[:whole])
        ]

    def may_pass(self, content: bytes) -> bool:
        """Tell whether a line of these bytes could pass."""
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
        # ASCII parts only: the index holds trigrams of bytes lowercased as ASCII.
        grams = [
            grams_of(np.frombuffer(part, np.uint8))
            for part in re.findall(rb"[\x00-\x7f]{3,}", self._bytes)
        ]
        self._grams = np.unique(np.concatenate(grams)) if grams else np.empty(0, np.uint32)

    def among(self, bits: "NDArray[np.uint8]") -> "NDArray[np.bool_]":
        """Return for each block's bits whether the block could hold the text."""
        found = np.ones(len(bits), bool)
        for gram in self._grams.tolist():
            found &= (bits[:, gram >> 3] & (0x80 >> (gram & 7))) != 0
        return found

    def may_be_in(self, content: bytes, small: bytes, has_odd: bool) -> bool:
        """Tell whether bytes could hold the text; `small` are the same in small ASCII letters."""
        if self._is_ascii:
            return self._bytes in small or (has_odd and self._has_odd)
        return self._text in _fold(content.decode(errors="replace"))


def _fold(text: str) -> str:
    # Sigma has two lowercase forms, chosen by the next letter, which may be an escape here.
    return text.lower().replace("\u03c2", "\u03c3")
