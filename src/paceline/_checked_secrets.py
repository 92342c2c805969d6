"""Random secrets that end with a checksum, so that a damaged file is not taken for another secret.

Secrets of earlier versions, and those that people choose, have none and are taken as they are.
"""

import re
import secrets
import zlib
from pathlib import Path

from paceline._regular_files import read_regular

TOKEN_PREFIX = "paceline_"  # noqa: S105 - what tokens begin with, no secret
_NUM_RANDOM_BYTES = 32
# A bit that changes can make a character that counts as none at the end, or one of the line end.
_LENGTHS = {
    len(secrets.token_urlsafe(_NUM_RANDOM_BYTES)) + 8 + length + change
    for length in (0, len(TOKEN_PREFIX))
    for change in (-1, 0, 1)
}
_PRINTABLE = re.compile(rb"[!-~]+")


class DamagedSecretError(ValueError):
    """Raised when a file must have a secret, but what it has is damaged."""


def make_secret(prefix: str = "") -> str:
    """Return a new random text of letters, digits, `-` and `_`."""
    text = prefix + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    return f"{text}{zlib.crc32(text.encode()):08x}"


def read_secret(path: Path, *, is_named: bool = False) -> str:
    """Return the secret that a file has, without blanks around it; empty if there is none.

    Args:
        path: The file.
        is_named: Whether somebody has named it: it may be the output of a program then, which is
            waited for.

    Raises:
        NotRegularFileError: Something else than a regular file is there.
        OSError: The file cannot be read.
        DamagedSecretError: It is damaged.
    """
    data = (path.read_bytes() if is_named else read_regular(path)).strip()
    if not data or not _is_damaged(data):
        return data.decode()
    raise DamagedSecretError(
        f"The secret in {str(path)!r} must be as it was written, but the file is damaged."
    )


def _is_damaged(data: bytes) -> bool:
    if not _PRINTABLE.fullmatch(data):
        return True
    if len(data) not in _LENGTHS:
        return False
    return data[-8:] != b"%08x" % zlib.crc32(data[:-8])
