"""The workers' lines on the launcher's own streams."""

import os
import select

from paceline.workers import OutputLine


class RankLineWriter:
    """Write each line as a whole, with its rank, to the stream that it came from."""

    def __init__(self) -> None:
        self._broken: set[int] = set()

    def __call__(self, line: OutputLine) -> None:
        """Write one line."""
        descriptor = 1 if line.stream == "stdout" else 2
        data = f"[rank={line.rank}] {line.text}\n".encode()
        # Training goes on when nobody reads any more, as with `| head`.
        if descriptor not in self._broken and not _write_all(descriptor, data):
            self._broken.add(descriptor)


def _write_all(descriptor: int, data: bytes) -> bool:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
