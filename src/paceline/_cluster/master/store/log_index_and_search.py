"""Filters of log lines, and the blocks and lines of a log file able to match."""

import json
import math
import struct
from dataclasses import dataclass

import xxhash

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
        return self.search is None or self.search.lower() in line.text.lower()


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
