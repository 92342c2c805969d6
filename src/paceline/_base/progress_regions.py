"""Places for progress: a terminal's last line, a notebook's output, or lines of a log."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from importlib import import_module
from math import isfinite
from typing import Any, TextIO

from paceline._base.terminal_text import terminal_text

SWITCH_VARIABLE = "PACELINE_PROGRESS"

_CLEAR = "\r\x1b[K"
_NARROWEST = 20
# Log lines of frequent reports in a row, until about as many follow within 100 s.
MOST_AT_ONCE = 100
_MOST_CURVE_POINTS = 400


class Region:
    """Place for progress: shows a state in place (if live), or reports as lines.

    Attributes:
        is_live: Whether there is a state that is replaced.
        interval_s: The seconds from one drawing to the next.
    """

    is_live = True
    interval_s = 0.1

    @property
    def width(self) -> int | None:
        """Columns available for a text; None if unlimited."""
        raise NotImplementedError

    def draw(self, text: str) -> None:
        """Show a text in place of the previous text."""
        raise NotImplementedError

    def follow(self, progress: float, value: float) -> None:
        """Add a point to the curve of a metric, where one is shown."""

    def takes_report(self, now: float, *, is_frequent: bool) -> bool:
        """Tell whether to write a report now; a live state shows the report anyway."""
        return False

    def write(self, text: str) -> None:
        """Write the line of a report."""
        raise NotImplementedError

    def end(self, text: str, details: Sequence[str]) -> None:
        """Show the final state with details below, and close."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop drawing and keep the shown text; may be called more than once."""


class TerminalRegion(Region):
    """Live line at the bottom of a terminal, redrawn in place.

    While it is there, whatever this process writes to the terminal by Python's standard streams
    (print, logging, warnings, tracebacks) clears the line first and appears above it. Processes
    that write to the terminal by themselves are not seen.

    Args:
        stream: A stream to a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._pid = os.getpid()
        # A signal's handler may log while this thread draws.
        self._lock = threading.RLock()
        self._text = ""
        self._is_shown = False
        self._is_other_line_open = False
        self._next_return = 0.0
        self._taken: list[tuple[TextIO, Any, Any]] = []
        for other in (stream, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if _is_terminal(other) and all(other is not taken for taken, _, _ in self._taken):
                self._take_over(other)

    @property
    def width(self) -> int:
        """Columns available for a text; the last column is left for the cursor."""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:
            columns = 0
        # A terminal that does not know its size says 0.
        return max(columns or 80, _NARROWEST) - 1

    def draw(self, text: str) -> None:
        """Show a text in place of the previous text, unless another line is unfinished."""
        with self._lock:
            self._text = text
            self._show()

    def end(self, text: str, details: Sequence[str]) -> None:
        """Show the final state with details below, and release the streams."""
        with self._lock:
            if self._is_other_line_open and not self._is_shown:
                for stream, _, _ in self._taken:
                    with suppress(OSError, ValueError):
                        stream.flush()
                self._put("\n")
            self._put(f"\r{text}\x1b[K\n" + _paragraph(details))
            self._is_shown = False
            self.close()

    def close(self) -> None:
        """Leave the text standing, end its line, and let go of the streams."""
        with self._lock:
            if self._is_shown:
                self._put("\n")
            self._is_shown = False
            self._text = ""
            for stream, own, before in self._taken:
                attributes = vars(stream)
                # A later display that took over keeps the stream; ours then only passes on.
                if attributes.get("write") is own:
                    del attributes["write"]
                    if before is not None:
                        attributes["write"] = before
            self._taken.clear()

    def _take_over(self, stream: Any) -> None:
        """Put a function of ours before the stream's `write`.

        The stream itself stays where it is, as handlers of `logging` keep the object that they
        were made with.
        """
        try:
            attributes = vars(stream)
        except TypeError:
            return
        write = stream.write

        def write_above(text: str) -> Any:
            # Loader processes are forks that have the function, but not the line.
            if not self._taken or os.getpid() != self._pid:
                return write(text)
            with self._lock:
                if self._is_shown:
                    self._put(_CLEAR)
                    self._is_shown = False
                # Written under the lock: a drawing thread must not put the line into the middle.
                written = write(text)
                self._return_below(text)
                return written

        self._taken.append((stream, write_above, attributes.get("write")))
        attributes["write"] = write_above

    def _return_below(self, text: str) -> None:
        if text:
            self._is_other_line_open = not text.endswith(("\n", "\r"))
        # A burst of lines must not pay for drawing each time; the next update draws anyway.
        if time.monotonic() >= self._next_return:
            self._show()

    def _show(self) -> None:
        if self._text and not self._is_other_line_open:
            self._put(f"\r{self._text}\x1b[K")
            self._is_shown = True
            self._next_return = time.monotonic() + self.interval_s

    def _put(self, text: str) -> None:
        # Past the stream's buffer, which must not be entered twice when a signal's handler logs. A
        # terminal that was closed ends no training.
        with suppress(OSError):
            os.write(self._fd, text.encode(errors="replace"))


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; a mere import of one is not."""
    kernels = sys.modules.get("ipykernel.kernelapp")
    return kernels is not None and kernels.IPKernelApp.initialized()


class NotebookRegion(Region):
    """A line and a curve in a notebook cell's output, replaced in place; one of each in each cell.

    The curve has the first metric that is shown, over the progress made.
    """

    interval_s = 0.5
    width = 120

    def __init__(self) -> None:
        self._handle: Any = None
        self._cell: Any = None
        self._curve: list[tuple[float, float]] = []

    def follow(self, progress: float, value: float) -> None:
        """Add a point to the curve; NaN and infinities are left out."""
        if not isfinite(value):
            return
        if self._curve and progress <= self._curve[-1][0]:
            self._curve.pop()
        self._curve.append((progress, value))
        if len(self._curve) > _MOST_CURVE_POINTS:
            # The newest one stays.
            del self._curve[-2:0:-2]

    def draw(self, text: str) -> None:
        """Show a text in place of the previous text, above the curve."""
        data = {"text/plain": text}
        if len(self._curve) > 1:
            data["text/html"] = f"<pre>{escape(text)}</pre>{_curve_svg(self._curve)}"
        shell = import_module("IPython").get_ipython()
        cell = getattr(shell, "execution_count", None)
        if self._handle is None or cell != self._cell:
            self._cell = cell
            display = import_module("IPython.display").display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def end(self, text: str, details: Sequence[str]) -> None:
        """Show the final state with details below."""
        self.draw(f"{text}\n{_paragraph(details)}".rstrip())


def _curve_svg(points: Sequence[tuple[float, float]]) -> str:
    """Return a curve with its smallest and largest value as SVG, in the color of text."""
    xs, ys = zip(*points, strict=True)
    low, high = min(ys), max(ys)
    width, height = (xs[-1] - xs[0]) or 1.0, (high - low) or 1.0
    places = " ".join(
        f"{60 + 340 * (x - xs[0]) / width:.1f},{75 - 70 * (y - low) / height:.1f}"
        for x, y in points
    )
    return (
        '<svg width="400" height="80" role="img" font-size="11" fill="currentColor">'
        f'<text x="0" y="14">{high:.4g}</text><text x="0" y="76">{low:.4g}</text>'
        f'<polyline points="{places}" fill="none" stroke="#228be6" stroke-width="1.5"/></svg>'
    )


class LogLines(Region):
    """Log lines in a file, pipe or plain terminal: a line for each report.

    Args:
        stream: The stream.
        most_at_once: How many frequent reports in a row are written.
    """

    is_live = False
    width = None

    def __init__(self, stream: TextIO, most_at_once: int = MOST_AT_ONCE) -> None:
        self._stream = stream
        self._most_at_once = most_at_once
        self._num_free, self._counted_at = float(most_at_once), time.monotonic()

    def takes_report(self, now: float, *, is_frequent: bool) -> bool:
        """Tell whether to write a report; by default frequent ones get about a line per second."""
        if not is_frequent:
            return True
        seconds, self._counted_at = now - self._counted_at, now
        gained = seconds * self._most_at_once / MOST_AT_ONCE
        self._num_free = min(self._num_free + gained, self._most_at_once)
        if self._num_free < 1:
            return False
        self._num_free -= 1
        return True

    def write(self, text: str) -> None:
        """Write a line."""
        # Training continues when nobody reads any more, on a full disk, and when a signal's handler
        # has interrupted the same stream.
        with suppress(OSError, ValueError, RuntimeError):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def end(self, text: str, details: Sequence[str]) -> None:
        """Write the last state, and details."""
        for line in (text, *details):
            self.write(terminal_text(line))


def show_lines(text: str, *details: str) -> None:
    """Write lines to standard error, where progress is shown; nothing where it is not."""
    region = find_region(sys.stderr)
    if region is not None:
        region.end(terminal_text(text), details)


def find_region(stream: TextIO | None, most_at_once: int = MOST_AT_ONCE) -> Region | None:
    """Return the region for showing progress on a stream, or None to show nothing.

    Args:
        stream: The stream.
        most_at_once: See `LogLines`.
    """
    if stream is None:
        # A program without a console has none.
        return None
    switch = os.environ.get(SWITCH_VARIABLE)
    is_off = switch == "0" or os.environ.get("CI", "").lower() not in ("", "0", "false")
    if is_off and switch != "1":
        return None
    if type(stream).__module__.startswith("ipykernel."):
        return NotebookRegion()
    is_able = os.environ.get("TERM") != "dumb"
    if is_able and _is_terminal(stream):
        return TerminalRegion(stream)
    return LogLines(stream, most_at_once)


def _is_terminal(stream: Any) -> bool:
    # A closed stream raises ValueError, and a stand-in may have no file descriptor.
    with suppress(AttributeError, ValueError, OSError):
        return os.isatty(stream.fileno())
    return False


def _paragraph(details: Sequence[str]) -> str:
    """Return details as a line each, which can be copied."""
    return "".join(f"{terminal_text(part)}\n" for part in details if part)
