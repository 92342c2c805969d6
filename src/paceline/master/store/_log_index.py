"""An index of a log file: which blocks of lines can hold a text, a level or a time at all.

Each full block has a record: a bit for every three bytes that follow each other in it, in small
letters, and the span of its times. A block without the bits of a text holds no line with it. The
others are looked through. A record carries a digest of itself and of its block, so that one that
is damaged, or not of these bytes, is made again.
"""

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """What the index says of a block, but for its texts: the span of the times of its lines.

    `digest` is that of the record's body, to know whether it is still what it was.
    """

    low: float
    high: float
    num_damaged: int
    digest: int


def make_index_record(content: bytes, times: list[float], num_damaged: int) -> bytes:
    """Return the record of a full block; `times` are those of its lines that can be read."""
    low, high = min(times, default=np.inf), max(times, default=-np.inf)
    text = _CHECKSUM.sub(b"]\n", content)  # nobody looks for checksums
    body = HEAD.pack(0, low, high, num_damaged)[DIGEST_BYTES:] + _bits_of(text)
    digest = xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(content))
    return digest.to_bytes(DIGEST_BYTES, "little") + body


def read_index_record(content: bytes, record: bytes) -> LogBlock | None:
    """Return what a record says; None if it is damaged, or not the block's."""
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
    """Tell whether bytes hold a letter outside ASCII that is equal to one within but for case."""
    # Most logs are ASCII, which shows at once; the searches take longer than all the rest.
    return not content.isascii() and any(letter in content for letter in _ODD_LETTERS)


def grams_of(values: "NDArray[np.uint8]") -> "NDArray[np.uint32]":
    """Return a number for every three bytes that follow each other."""
    wide = values.astype(np.uint32)
    grams = wide[:-2] | wide[1:-1] << np.uint32(8) | wide[2:] << np.uint32(16)
    hashed: NDArray[np.uint32] = (grams * _FACTOR) >> np.uint32(32 - _BITS)
    return hashed
