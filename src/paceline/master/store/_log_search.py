"""Search of a log file by its index: which blocks and lines can pass a filter at all."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from paceline._regular_files import regular_opener
from paceline.master.store._log_filter import LogFilter, levels_from
from paceline.master.store._log_index import (
    DIGEST_BYTES,
    HEAD,
    RECORD_BYTES,
    LogBlock,
    grams_of,
    has_odd_letters,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RECORDS_AT_ONCE = 256


class LogNeedles:
    """Texts that the lines which pass a filter must hold, as they stand in the file.

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
        """Tell of each indexed block whether a line of it could pass."""
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
        # What a damaged record says counts for nothing.
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
    """A text of which no case matters."""

    def __init__(self, text: str) -> None:
        self._text = _fold(text)
        self._bytes = self._text.encode(errors="surrogatepass")
        self._is_ascii = self._text.isascii()
        self._has_odd = "k" in self._text or "i" in self._text
        # Of a text outside ASCII only the parts within can be looked up.
        grams = [
            grams_of(np.frombuffer(part, np.uint8))
            for part in re.findall(rb"[\x00-\x7f]{3,}", self._bytes)
        ]
        self._grams = np.unique(np.concatenate(grams)) if grams else np.empty(0, np.uint32)

    def among(self, bits: "NDArray[np.uint8]") -> "NDArray[np.bool_]":
        """Tell in which blocks the text could be."""
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
    # Of a sigma the small letter depends on what follows, which may be an escape here.
    return text.lower().replace("\u03c2", "\u03c3")
