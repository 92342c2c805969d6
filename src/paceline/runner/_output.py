"""The spool of an attempt's output: lines wait here until the master has them."""

import json
import logging
import threading
from pathlib import Path

from paceline.messages.attempts import LogEntry
from paceline.workers import OutputLine

logger = logging.getLogger(__name__)


class OutputSpool:
    """Number the lines of an attempt and append them to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8", errors="replace")
        self._next_sequence = 0
        self._num_lost = 0
        self._lock = threading.Lock()

    def add(self, line: OutputLine) -> None:
        """Append one line; on a full disk it is lost and counted, and the attempt goes on."""
        with self._lock:
            fields = (
                self._next_sequence, line.time, line.rank, line.stream, line.level, line.text,
            )  # fmt: skip
            try:
                self._file.write(json.dumps(fields) + "\n")
                self._file.flush()
            except OSError as error:
                if not self._num_lost:
                    logger.warning("Output cannot be kept: %s.", error)
                self._num_lost += 1
            finally:
                # What the file's buffer still holds may follow once there is space again.
                self._next_sequence += 1

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class SpoolReader:
    """Read a spool from a sequence number on, also while it is being written."""

    def __init__(self, path: Path, after: int = -1) -> None:
        self._path = path
        self._offset = 0
        self.last_sequence = after

    def read(self, max_lines: int) -> list[LogEntry]:
        """Return the next whole lines."""
        if not self._path.exists():
            return []
        entries: list[LogEntry] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                try:
                    entry = LogEntry(*json.loads(line))
                except (ValueError, TypeError):
                    continue  # a line that a full disk tore
                if entry.sequence > self.last_sequence:
                    self.last_sequence = entry.sequence
                    entries.append(entry)
                    if len(entries) >= max_lines:
                        break
        return entries
