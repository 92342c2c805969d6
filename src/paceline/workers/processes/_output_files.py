"""Output of workers: to the driver's streams and to files of the run directory."""

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from paceline.workers.processes._output_lines import OutputLine


class WorkerOutput:
    """Show the lines of workers, and write them to ``rank-<n>.log`` of the present run.

    Args:
        is_of_several: Whether each line begins with the rank, as there may be several workers.
    """

    def __init__(self, is_of_several: bool) -> None:
        self._is_one_of_many = is_of_several
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._files: dict[int, IO[str]] = {}

    def __call__(self, line: OutputLine) -> None:
        """Take one line; called from a thread of the workers' pool."""
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        prefix = f"[rank={line.rank}] " if self._is_one_of_many else ""
        # Training goes on when nobody reads any more, and on a full disk.
        with suppress(OSError, ValueError, AttributeError):
            stream.write(f"{prefix}{line.text}\n")
            stream.flush()
        with self._lock, suppress(OSError):
            file = self._file_of(line.rank or 0)
            if file is not None:
                file.write(f"{line.text}\n")

    def open(self, directory: Path) -> None:
        """Write to files in a directory from now on, until the next run or the end of workers."""
        with self._lock:
            self._close_files()
            self._directory = directory

    def close(self) -> None:
        """Write to no files any more."""
        with self._lock:
            self._close_files()
            self._directory = None

    def _file_of(self, rank: int) -> IO[str] | None:
        if self._directory is None:
            return None
        if rank not in self._files:
            self._directory.mkdir(exist_ok=True)
            path = self._directory / f"rank-{rank}.log"
            # Each line at once, so that what was printed before a crash is there.
            self._files[rank] = path.open("a", encoding="utf-8", buffering=1)
        return self._files[rank]

    def _close_files(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        self._files.clear()
