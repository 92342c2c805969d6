"""A digest of a file of `torch.save`, as the comment at the end of the zip that such a file is.

`torch.load` and other readers of zip files do not mind the comment. Earlier versions wrote none.
"""

import os
import re
import zipfile
from typing import BinaryIO

import torch

from paceline.storage import digest_stream

_COMMENT = re.compile(rb"paceline xxh3_128 ([0-9a-f]{32})")
_COMMENT_BYTES = len("paceline xxh3_128 ") + 32
# The record at the end closes with the length of the comment that follows.
_BEGINNING, _END_BEGINS = b"PK\x03\x04", b"PK\x05\x06"
_END_BYTES = 22
_NO_COMMENT = b"\x00\x00"


def seal_zip(file: BinaryIO) -> None:
    """Add the digest to what `torch.save` has written; the file must be open for updates."""
    file.seek(-_END_BYTES, os.SEEK_END)
    end = file.read()
    assert end.startswith(_END_BEGINS), end
    assert end.endswith(_NO_COMMENT), end
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    file.write(_COMMENT_BYTES.to_bytes(len(_NO_COMMENT), "little"))
    file.seek(0)
    digest = digest_stream(file).digest
    file.write(b"paceline xxh3_128 " + digest.encode())


def check_zip(file: BinaryIO) -> None:
    """Check that an open file is as it was written; without a digest, by the checksums of the zip.

    Another file may take its name meanwhile. Afterwards it is at its beginning.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    is_zip = file.read(len(_BEGINNING)) == _BEGINNING
    file.seek(max(0, size - _COMMENT_BYTES))
    comment = _COMMENT.fullmatch(file.read())
    file.seek(max(0, size - _END_BYTES))
    end = file.read()
    file.seek(0)
    if comment is not None:
        found = digest_stream(file, size - _COMMENT_BYTES).digest
        if found.encode() != comment[1]:
            raise ValueError("its content is not what its digest was made of")
    elif is_zip and not (end.startswith(_END_BEGINS) and end.endswith(_NO_COMMENT)):
        raise ValueError("its end is missing or altered")
    elif is_zip and torch.serialization.get_crc32_options():
        _check_records(file)
    file.seek(0)


def _check_records(file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged!r} does not fit")
