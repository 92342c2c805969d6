"""Files of lines in blocks of whole lines."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from paceline.data._file_format import DataFile

BLOCK_BYTES = 4 * 1024 * 1024
_NEWLINE, _QUOTE = ord("\n"), ord('"')


class Block(NamedTuple):
    """Whole lines of a file: where they begin, and their bytes."""

    start: int
    data: bytes


def blocks_of(file: DataFile, hasher: "xxhash.xxh3_64", *, has_quotes: bool) -> Iterator[Block]:
    """Yield a file in blocks of whole lines.

    Args:
        file: The file.
        hasher: Takes all that is read.
        has_quotes: Whether a line goes on within double quotes.
    """
    start, rest, at = 0, b"", 0
    while at < file.size:
        read = file.read(at, min(BLOCK_BYTES, file.size - at))
        hasher.update(read)
        at += len(read)
        rest += read
        end = len(rest) if at >= file.size else _end_of_lines(rest, has_quotes=has_quotes)
        if end:
            yield Block(start, rest[:end])
            start, rest = start + end, rest[end:]


def _end_of_lines(data: bytes, *, has_quotes: bool) -> int:
    """Return where the last whole line ends."""
    ends = line_ends(data, has_quotes=has_quotes)
    return int(ends[-1]) + 1 if len(ends) else 0


def line_ends(data: bytes, *, has_quotes: bool) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the places of the newlines that end lines; data begin with a line."""
    characters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(characters == _NEWLINE)
    if has_quotes and b'"' in data:
        quotes = np.flatnonzero(characters == _QUOTE)
        # A quote within quotes is doubled, so that an odd number of them stands before what is
        # quoted.
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return ends
