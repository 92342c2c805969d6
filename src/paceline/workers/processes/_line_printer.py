"""Workers' lines on the driver's own streams."""

import sys
from collections.abc import Callable
from contextlib import suppress

from paceline._terminal_text import terminal_text
from paceline.workers.processes._output_lines import OutputLine


class LinePrinter:
    """Write the workers' lines to the driver's streams, as they are at that moment.

    Args:
        num_workers: Tells how many workers there are.
    """

    def __init__(self, num_workers: Callable[[], int]) -> None:
        self._num_workers = num_workers

    def __call__(self, line: OutputLine) -> None:
        """Write one line."""
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        prefix = f"[rank={line.rank}] " if self._num_workers() > 1 else ""
        # Training goes on when nobody reads any more.
        with suppress(OSError, ValueError, AttributeError):
            stream.write(f"{prefix}{terminal_text(line.text)}\n")
            stream.flush()
