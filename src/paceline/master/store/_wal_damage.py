"""Damage in the log of a database, after which SQLite takes nothing of it and says nothing.

The log is SQLite's write-ahead log: a header, and pages ("frames") whose checksums follow from all
before them. See https://www.sqlite.org/fileformat2.html#the_write_ahead_log.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline._regular_files import regular_opener

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
_BLOCK_FRAMES = 1024
_MASK = 2**32 - 1

Words = NDArray[np.uint32]


def find_log_damage(database: Path) -> str | None:
    """Say what of a database's log cannot be read though it was written; None if nothing is so.

    For a database that nobody has open. What a killed process has not finished is no damage.
    """
    path = database.with_name(f"{database.name}-wal")
    try:
        with open(path, "rb", opener=regular_opener) as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            magic, _, page_size, _, *salts, sum_1, sum_2 = _HEADER.unpack(header)
            frame_size = _FRAME.size + page_size
            is_known = magic & ~1 == _MAGIC and page_size in (2**n for n in range(9, 17))
            order = ">" if magic & 1 else "<"
            if not is_known or _add_wal_checksum((0, 0), _words(header[:24], order)) != (
                sum_1,
                sum_2,
            ):
                size = path.stat().st_size - _HEADER.size
                return (
                    f"its header is damaged, so that {size} bytes are not taken" if size else None
                )
            sums, num_whole, num_frames, num_lost = (sum_1, sum_2), 0, 0, 0
            is_whole = True
            while block := file.read(frame_size * _BLOCK_FRAMES):
                for frame in _frames(block, frame_size):
                    _, _, *frame_salts, sum_1, sum_2 = _FRAME.unpack(frame[: _FRAME.size])
                    num_frames += 1
                    if frame_salts != salts and is_whole:
                        # What was written before the log began anew, unless more follows.
                        is_whole, num_whole = False, num_frames - 1
                        continue
                    if is_whole:
                        covered = frame[:8] + frame[_FRAME.size :]
                        sums = _add_wal_checksum(sums, _words(covered, order))
                        if sums == (sum_1, sum_2):
                            continue
                        is_whole, num_whole = False, num_frames - 1
                    num_lost += frame_salts == salts
    except FileNotFoundError:
        return None
    if not num_lost:
        return None
    return f"page {num_whole + 1} of it is damaged, so that {num_frames - num_whole} are not taken"


def _frames(block: bytes, size: int) -> Iterator[bytes]:
    """Yield whole frames."""
    for start in range(0, len(block) - size + 1, size):
        yield block[start : start + size]


def _words(data: bytes, order: str) -> Words:
    return np.frombuffer(data, f"{order}u4").astype(np.uint32)


_Start = tuple[tuple[int, int], tuple[int, int]]
_weights: dict[int, tuple[_Start, Words, Words]] = {}


def _add_wal_checksum(sums: tuple[int, int], words: Words) -> tuple[int, int]:
    """Return the checksum of words after others, all modulo 2**32.

    For each pair of words, s0 += x0 + s1 and then s1 += x1 + s0. That is linear, so each result is
    a sum of all words with weights that follow from their number.
    """
    if len(words) not in _weights:
        _weights[len(words)] = _wal_weights(len(words))
    starts, *weights = _weights[len(words)]
    s0, s1 = (
        sum(a * b for a, b in zip(sums, start, strict=True))
        + int((words * weight).sum(dtype=np.uint32))
        for start, weight in zip(starts, weights, strict=True)
    )
    return s0 & _MASK, s1 & _MASK


def _wal_weights(num_words: int) -> tuple[_Start, Words, Words]:
    """Return the weights of the two sums before, and of the words in each of the two results."""
    first, second = np.zeros(num_words, np.uint32), np.zeros(num_words, np.uint32)
    # The step is (s0, s1) -> (s0 + s1, s0 + 2 s1), and the words add (x0, x0 + x1). `power` has the
    # weights of both sums before the pairs that were looked at, which begins at the last one.
    power: _Start = ((1, 0), (0, 1))
    for pair in range(num_words // 2 - 1, -1, -1):
        (a, b), (c, d) = power
        first[2 * pair], first[2 * pair + 1] = (a + b) & _MASK, b
        second[2 * pair], second[2 * pair + 1] = (c + d) & _MASK, d
        power = (
            ((a + b) & _MASK, (a + 2 * b) & _MASK),
            ((c + d) & _MASK, (c + 2 * d) & _MASK),
        )
    return power, first, second
