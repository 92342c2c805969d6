"""JSON with a checksum as the last field, so damaged JSON is never taken for valid JSON.

A file that someone wrote by hand has no checksum and is read as it is.
"""

import re
import zlib

import msgspec

_SEAL = re.compile(rb',\s*"checksum":\s*"([0-9a-f]{8})"\s*\}\s*\Z')


def seal(data: bytes) -> bytes:
    """Return a non-empty JSON object with a checksum of everything before the checksum."""
    content = data.rstrip()
    assert content.endswith(b"}"), data
    content = content[:-1].rstrip()
    line = b"\n " if b"\n" in content else b""
    end = b"\n" if line else b""
    return b'%b,%b"checksum": "%08x"%b}' % (content, line, zlib.crc32(content), end)


def check_seal(data: bytes) -> bytes:
    """Return a JSON object unchanged, after comparing its content with its checksum.

    Raises:
        msgspec.DecodeError: It has another checksum.
    """
    try:
        data.decode()
    except UnicodeDecodeError as error:
        # Decoding JSON raises this as it is, where a name is concerned.
        raise msgspec.DecodeError(str(error)) from error
    found = _SEAL.search(data)
    if found is not None and int(found[1], 16) != zlib.crc32(data[: found.start()]):
        raise msgspec.DecodeError("its checksum does not fit")
    return data


def seal_line(line: bytes) -> bytes:
    """Return a JSON array as a line with a checksum of everything before the checksum."""
    content = line.removesuffix(b"]")
    return b"%b, %d]\n" % (content, zlib.crc32(content))


def check_line(line: bytes) -> bytes:
    """Return the JSON array of a line without its checksum.

    Raises:
        ValueError: The checksum is missing or does not fit.
    """
    line, _, checksum = line.removesuffix(b"\n").rpartition(b", ")
    if int(checksum.removesuffix(b"]")) != zlib.crc32(line):
        raise ValueError("The checksum of a line does not fit.")
    return line + b"]"
