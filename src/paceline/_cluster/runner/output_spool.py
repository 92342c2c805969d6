"""Output of an attempt: spooled on disk, and shipped to the master."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from paceline._base.files import open_private
from paceline._base.journal_records import check_line, seal_line
from paceline._cluster.messages.runner_messages import LogEntry, LogReply, LogRequest
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    ShippingLoop,
    encode,
)
from paceline._training.workers.processes.worker_output import OutputLine

logger = logging.getLogger(__name__)


# How much output waits in memory for space on the disk.
_MAX_WAITING_BYTES = 8 * 2**20
_PATIENCE_S = 10.0
_DAMAGED = "Here the output is damaged on the disk of the runner; what is damaged is left out."
# A shorter text stands in others by chance.
_SHORTEST_SECRET = 6
_OUTPUT_POLL_S = 0.1


class OutputSpool:
    """Number the lines of an attempt and append them to a file.

    On a full disk, lines wait in memory for space. Lines for which there is no room are lost and
    counted, and the attempt continues.

    Args:
        path: The file.
        secrets: Texts that are replaced by `***` wherever a line holds one of them.
    """

    def __init__(self, path: Path, secrets: Iterable[str] = ()) -> None:
        # The longest first: one may hold another.
        found = {part for secret in secrets for part in secret.splitlines()}
        self._secrets = sorted((s for s in found if len(s) >= _SHORTEST_SECRET), key=len)[::-1]
        # Unbuffered: bytes that the disk did not take must stay in `_waiting`.
        self._file = open_private(path, "ab", buffering=0)
        self._waiting = bytearray()
        self._next_sequence = 0
        self._num_lost = 0
        self._was_full = False
        self._lock = threading.Lock()

    def add(self, line: OutputLine) -> None:
        """Append a line, with secrets masked."""
        text = line.text
        for secret in self._secrets:
            text = text.replace(secret, "***")
        fields: tuple[Any, ...] = (line.time, line.rank, line.stream, line.level, text)
        # In a masked text the colours have lost their places.
        if line.colors and text == line.text:
            fields += (line.colors,)
        with self._lock:
            data = seal_line(json.dumps((self._next_sequence, *fields)).encode())
            self._next_sequence += 1
            if self._waiting and len(self._waiting) + len(data) > _MAX_WAITING_BYTES:
                # The disk may have space again.
                self._write()
            if self._waiting and len(self._waiting) + len(data) > _MAX_WAITING_BYTES:
                self._num_lost += 1
                return
            self._waiting += data
            self._write()

    def finish(self, patience_s: float = _PATIENCE_S) -> str | None:
        """Wait for space for the waiting lines; return a message about lost lines, or None."""
        deadline = time.monotonic() + patience_s
        while not self._is_written() and time.monotonic() < deadline:
            time.sleep(_OUTPUT_POLL_S)
        with self._lock:
            num_lost = self._num_lost + self._waiting.count(b"\n")
        if num_lost == 0:
            return None
        lines = "1 line" if num_lost == 1 else f"{num_lost} lines"
        return f"{lines} of the attempt's output could not be kept, because its disk was full."

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _is_written(self) -> bool:
        with self._lock:
            self._write()
            return not self._waiting

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if not self._was_full:
                logger.warning("Output cannot be kept yet: %s.", error)
            self._was_full = True


class SpoolReader:
    """Reader of a spool after a sequence number, also during writing."""

    def __init__(self, path: Path, after: int = -1) -> None:
        self._path = path
        self._offset = 0
        self.last_sequence = after
        # The newest line that is whole, known to the caller or not, and when it was printed.
        self._newest = -1
        self._time = 0.0

    def read(self, max_lines: int) -> list[LogEntry]:
        """Return the next complete lines; each run of damaged lines becomes a notice."""
        if not self._path.exists():
            return []
        entries: list[LogEntry] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # A line without an end is still being written.
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                entry = self._parse(line)
                if entry.sequence > self.last_sequence:
                    self.last_sequence = entry.sequence
                    entries.append(entry)
                    if len(entries) >= max_lines:
                        break
        return entries

    def _parse(self, line: bytes) -> LogEntry:
        try:
            entry = msgspec.json.decode(check_line(line), type=LogEntry)
        except (ValueError, msgspec.DecodeError):
            logger.warning("A line of the output is damaged: %.60r", line)
            # Sequence number after the last readable line: damage may span several lines or a part.
            return LogEntry(self._newest + 1, self._time, None, "stderr", "WARNING", _DAMAGED)
        self._newest, self._time = entry.sequence, entry.time
        return entry


_MAX_LINES = 1000
# How often, and for how long, the end of an attempt waits for output that the master cannot store.
_MAX_TRIES = 8


class OutputShipper(ShippingLoop):
    """Sender of the output spool's lines; unacknowledged lines are sent again.

    A single line that the master refuses is left out, so that it does not hold up the rest.

    Args:
        directory: The attempt's directory.
        path: Where to send them in the API.
        link: A connection of its own.
        is_first: Whether nothing was ever sent, so that the master need not be asked for its state.
    """

    def __init__(
        self, directory: AttemptDirectory, path: str, link: MasterLink, *, is_first: bool = False
    ) -> None:
        super().__init__("output")
        self._directory = directory
        self._path = path
        self._link = link
        self._spool = SpoolReader(directory.output_path) if is_first else None

    def forget_positions(self) -> None:
        """Forget the master's position: after a failure the amount received is unknown."""
        self._spool = None

    def ship_once(self) -> bool:
        """Send at most a single request; return False if there is nothing to send."""
        if self._spool is None:
            reply = msgspec.json.decode(self._post([]), type=LogReply)
            self._spool = SpoolReader(self._directory.output_path, after=reply.last_sequence)
        entries = self._spool.read(_MAX_LINES)
        if entries:
            self._send(entries)
        return bool(entries)

    def ship_rest_or_tell(self, check_master: Callable[[], None]) -> str | None:
        """Send everything; return an error if a working master rejects only the output.

        Args:
            check_master: Raises `UnreachableError` where the master takes nothing else either.
        """
        backoff = MasterBackoff()
        deadline = time.monotonic() + _PATIENCE_S
        trouble: Exception | None = None
        for _ in range(_MAX_TRIES):
            try:
                self.ship_rest()
                return None
            except Exception as error:
                trouble = error
            self.forget_positions()
            # Raises unless the master works: only then is the output to blame.
            check_master()
            if time.monotonic() > deadline:
                break
            time.sleep(backoff.next_s())
        kept = self._directory.kept_output_path
        text = f"The attempt's output cannot be stored ({trouble}); it is kept in {str(kept)!r}."
        logger.error("%s", text)
        return text

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _send(self, entries: list[LogEntry]) -> None:
        try:
            self._post(entries)
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            if len(entries) == 1:
                # Log message, not an output line: the master might refuse the notice as well.
                logger.error("Line %d of the output is left out: %s", entries[0].sequence, error)
                return
            middle = len(entries) // 2
            self._send(entries[:middle])
            self._send(entries[middle:])

    def _post(self, entries: list[LogEntry]) -> bytes:
        return self._link.post(self._path, encode(LogRequest(entries=entries)))
