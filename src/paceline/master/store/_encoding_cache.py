"""Answers as JSON that are kept until what they are made of changes."""

import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

_LIMIT_BYTES = 16 * 1024 * 1024
# What Python takes for an entry of a dictionary and its two objects.
_ENTRY_BYTES = 250


class EncodingCache:
    """Encodings of rows, found by all that they are made of, so that none is ever out of date.

    Several threads may use it; they may make the same encoding at once.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encoded(self, content: Any, encode: Callable[[], bytes]) -> bytes:
        """Return an encoding, which is made if that of this content is not here.

        Args:
            content: Plain values: all that the encoding depends on, its kind among them.
            encode: Makes it.
        """
        try:
            plain = msgspec.msgpack.encode(content)
        except OverflowError:
            # An integer of more than 64 bits.
            return encode()
        key = blake2b(plain, digest_size=16).digest()
        found = self._kept.get(key)
        if found is None:
            found = encode()
            self._keep(key, found)
        return found

    def _keep(self, key: bytes, encoded: bytes) -> None:
        num_bytes = len(encoded) + _ENTRY_BYTES
        if num_bytes > _LIMIT_BYTES:
            return
        with self._lock:
            if self._num_bytes + num_bytes > _LIMIT_BYTES:
                self._kept.clear()
                self._num_bytes = 0
            if key not in self._kept:
                self._kept[key] = encoded
                self._num_bytes += num_bytes
