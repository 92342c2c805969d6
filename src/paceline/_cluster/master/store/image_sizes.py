"""Numbers of pixels of images, read from their first bytes: a small file can be a huge image."""

import struct
from typing import IO

_HEAD_BYTES = 32
# Markers of JPEG's frames, which begin with the size.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MAX_SEGMENTS = 1000


def image_size(content: IO[bytes]) -> tuple[int, int] | None:
    """Return width and height of a PNG, GIF, WebP or JPEG in pixels, None for all else.

    The content is read from where it stands, and stands anywhere afterwards.
    """
    head = content.read(_HEAD_BYTES)
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", head, 16)
            return width, height
        if head.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", head, 6)
            return width, height
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp_size(head)
        if head.startswith(b"\xff\xd8"):
            content.seek(2 - len(head), 1)
            return _jpeg_size(content)
    except struct.error:
        pass
    return None


def _webp_size(head: bytes) -> tuple[int, int]:
    if head[12:16] == b"VP8X":
        return (
            1 + int.from_bytes(head[24:27], "little"),
            1 + int.from_bytes(head[27:30], "little"),
        )
    if head[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_size(content: IO[bytes]) -> tuple[int, int] | None:
    for _ in range(_MAX_SEGMENTS):
        mark, kind, length = struct.unpack(">BBH", content.read(4))
        if mark != 0xFF or length < 2:
            return None
        if kind in _FRAMES:
            height, width = struct.unpack(">xHH", content.read(5))
            return width, height
        content.seek(length - 2, 1)
    return None
