"""Progress as lines of a log, and what it has in common with progress that is drawn in place."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

# So many reports in a row have a line each in a log.
_MOST_AT_ONCE = 100


class Region:
    """Shows the present state in place of the one before (if it is live), or reports as lines.

    Attributes:
        is_live: Whether there is a state that is replaced.
        interval_s: The seconds from one drawing to the next.
    """

    is_live = True
    interval_s = 0.1

    @property
    def width(self) -> int | None:
        """The columns that a text may have; None if there is no edge."""
        raise NotImplementedError

    def draw(self, text: str) -> None:
        """Show a text in place of the one before."""
        raise NotImplementedError

    def takes_report(self, now: float, *, is_frequent: bool) -> bool:
        """Tell whether a report is to be written now; a live state shows it anyway."""
        return False

    def write(self, text: str) -> None:
        """Write the line of a report."""
        raise NotImplementedError

    def end(self, text: str, details: Sequence[str]) -> None:
        """Show the last state with details below it, and close."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave what is shown standing; may be called more than once."""


class LogLines(Region):
    """Lines of a file, a pipe or a terminal that cannot go back: one for each report.

    Args:
        stream: The stream.
    """

    is_live = False
    width = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_free, self._counted_at = float(_MOST_AT_ONCE), time.monotonic()

    def takes_report(self, now: float, *, is_frequent: bool) -> bool:
        """Tell whether a report is to be written: of frequent ones one a second in the long run."""
        if not is_frequent:
            return True
        seconds, self._counted_at = now - self._counted_at, now
        self._num_free = min(self._num_free + seconds, _MOST_AT_ONCE)
        if self._num_free < 1:
            return False
        self._num_free -= 1
        return True

    def write(self, text: str) -> None:
        """Write a line."""
        # Training goes on when nobody reads any more, on a full disk, and when a signal's handler
        # has interrupted the same stream.
        with suppress(OSError, ValueError, RuntimeError):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def end(self, text: str, details: Sequence[str]) -> None:
        """Write the last state, and details."""
        self.write(text)
        if details:
            self.write("  ".join(details))


def paragraph(details: Sequence[str], width: int) -> str:
    """Return details in one line if they fit, else in a line each."""
    line = "  ".join(details)
    return "".join(f"{part}\n" for part in ([line] if len(line) <= width else details) if part)
