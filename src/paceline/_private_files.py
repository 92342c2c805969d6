"""Files that only their owner can read."""

from pathlib import Path
from typing import IO, Any

from paceline._regular_files import regular_opener


def open_private(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file as `open` does; one that is made has mode 0600. Nothing waits.

    Raises:
        NotRegularFileError: Something else than a regular file is there.
        OSError: The file cannot be opened.
    """
    return open(path, mode, buffering, opener=regular_opener)  # the caller closes it
