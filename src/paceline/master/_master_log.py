"""The master's log: a line per message, bounded in size and in repetition."""

import copy
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline._regular_files import regular_opener

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_BYTES = 10 * 1024 * 1024
_WINDOW_S = 60.0
_MAX_PER_WINDOW = 20


@contextmanager
def logging_to_master_log(path: Path) -> Iterator[None]:
    """Write what the master logs to its standard error.

    If that is appended to the file `path`, the file is kept small: at 10 MiB its content becomes
    that of `NAME.1`, in place of what was there, and the file begins anew.
    """
    handler = _MasterLogHandler(path)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@dataclass(slots=True)
class _Window:
    """Messages that one place in the code has logged since a time.

    `raised_at` has where the errors among them came from, whose tracebacks were written.
    """

    began: float
    num_messages: int = 0
    raised_at: set[tuple[str, int]] = field(default_factory=set)


class _MasterLogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes at most 20 messages a minute from each place in the code, and counts the others.

    Of an error that comes again, the traceback is written once a minute.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT))
        self._path = path
        self._windows: dict[tuple[str, int, type | None], _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, unless the same place has logged many just now."""
        self._end_windows(time.monotonic() - _WINDOW_S)
        # Messages of one place differ in numbers and addresses, so that their texts say little.
        error = record.exc_info[0] if record.exc_info else None
        place = (record.pathname, record.lineno, error)
        window = self._windows.setdefault(place, _Window(time.monotonic()))
        window.num_messages += 1
        if window.num_messages <= _MAX_PER_WINDOW:
            self._write(_without_known_traceback(record, window.raised_at))

    def close(self) -> None:
        """Tell what was left out, and write no more."""
        self._end_windows(float("inf"))
        super().close()

    def _end_windows(self, before: float) -> None:
        for place, window in list(self._windows.items()):
            if window.began > before:
                continue
            del self._windows[place]
            num_left_out = window.num_messages - _MAX_PER_WINDOW
            if num_left_out > 0:
                self._write(_summary(place[0], place[1], num_left_out))

    def _write(self, record: logging.LogRecord) -> None:
        self._rotate_if_large()
        super().emit(record)

    def _rotate_if_large(self) -> None:
        # No log is worth an error of what logs.
        with suppress(OSError, ValueError):
            written = os.fstat(self.stream.fileno())
            if written.st_size >= _MAX_BYTES and os.path.samestat(written, self._path.stat()):
                self._rotate()

    def _rotate(self) -> None:
        # Copied and emptied, not renamed: whatever is printed without `logging` goes there as well.
        try:
            with open(self._path, "rb", opener=regular_opener) as file:
                file.seek(-_MAX_BYTES, os.SEEK_END)
                self._path.with_name(f"{self._path.name}.1").write_bytes(file.read())
        finally:
            os.truncate(self._path, 0)


def _without_known_traceback(
    record: logging.LogRecord, raised_at: set[tuple[str, int]]
) -> logging.LogRecord:
    """Return a record with the error in its text in place of a traceback that was written."""
    if not record.exc_info or record.exc_info[2] is None:
        return record
    innermost = traceback.extract_tb(record.exc_info[2])[-1]
    place = (innermost.filename, innermost.lineno or 0)
    if place not in raised_at:
        raised_at.add(place)
        return record
    shown = copy.copy(record)
    error = record.exc_info[1]
    shown.msg = f"{record.getMessage()} ({type(error).__name__}: {error}; as before)"
    shown.args, shown.exc_info, shown.exc_text = None, None, None
    return shown


def _summary(path: str, line: int, num_messages: int) -> logging.LogRecord:
    text = "%d more messages like those from %s:%d were left out."
    arguments = (num_messages, Path(path).name, line)
    return logging.LogRecord(__name__, logging.WARNING, path, line, text, arguments, None)
