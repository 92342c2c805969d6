"""Files of lines that may end within one."""

import os
from pathlib import Path

from paceline._regular_files import regular_opener

_TAIL_BYTES = 64 * 1024


def whole_lines(path: Path) -> int:
    """Return how many bytes of a file are whole lines."""
    with open(path, "rb", opener=regular_opener) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
