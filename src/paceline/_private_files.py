"""Files that only their owner can read."""

import os
from pathlib import Path
from typing import IO, Any


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file as `open` does; one that is made has mode 0600.

    Raises:
        OSError: The file cannot be opened.
    """
    return open(path, mode, buffering, opener=_open)  # the caller closes it


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
