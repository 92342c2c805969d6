"""Progress of a training: how far it is, how fast, how long it will take."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from paceline.display._line import UNITS, Facts, progress_line
from paceline.display._places import NotebookOutput, TerminalLine, find_place
from paceline.display._throughput import Throughput


class TrainingProgress:
    """Show a training's progress in one line of a terminal or notebook, and nothing elsewhere.

    Nothing is shown, and every call returns at once, when the stream is neither, when the variable
    `PACELINE_PROGRESS` is 0, and in continuous integration (`CI` is set). Lines that the program
    prints or logs meanwhile appear above the progress.

    Args:
        total: Where training ends, in `unit`; None if that is not known.
        unit: "batches", "epochs" or "records".
        stream: Where to show it; standard error by default.
        is_quiet: Whether to show nothing at all, as on ranks other than the chief.

    Raises:
        ValueError: There is no such unit.
    """

    def __init__(
        self,
        total: float | None,
        unit: str,
        *,
        stream: TextIO | None = None,
        is_quiet: bool = False,
    ) -> None:
        if unit not in UNITS:
            raise ValueError(f"`unit` must be one of {', '.join(UNITS)}, but got {unit!r}.")
        self._stream = sys.stderr if stream is None else stream
        self._is_quiet = is_quiet
        self._place: TerminalLine | NotebookOutput | None = None
        self._facts = Facts(total=total, unit=unit)
        self._throughput = Throughput()
        self._next_draw = 0.0

    def start(self, steps_completed: float, records: int = 0) -> None:
        """Begin to show progress.

        Args:
            steps_completed: What was done before, in the unit.
            records: The records that were trained on before.
        """
        if self._place is None and not self._is_quiet:
            self._place = find_place(self._stream)
        if self._place is None:
            return
        now = time.monotonic()
        self._facts.completed = steps_completed
        self._throughput = Throughput()
        self._throughput.add(now, steps_completed, records)
        self._draw(now)

    def update(
        self, steps_completed: float, records: int, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Tell how far training is; drawn at most ten times a second. Ends a note.

        Args:
            steps_completed: What is done since the start of training, in the unit; a part of an
                epoch is a fraction.
            records: The records trained on since the start of training.
            metrics: The newest metrics, of which numbers are shown; None leaves those that are.
        """
        if self._place is None:
            return
        facts = self._facts
        facts.completed, facts.note = steps_completed, ""
        if metrics is not None:
            facts.metrics = dict(metrics)
        now = time.monotonic()
        self._throughput.add(now, steps_completed, records)
        if now >= self._next_draw:
            self._draw(now)

    def note(self, text: str) -> None:
        """Show what is under way besides training, such as "validating", until the next update."""
        if self._place is not None:
            self._facts.note = text
            self._draw(time.monotonic())

    def close(self) -> None:
        """Leave the last state standing and show no more; may be called more than once."""
        if self._place is not None:
            self._facts.note = ""
            self._draw(time.monotonic())
            self._place.close()
            self._place = None

    def _draw(self, now: float) -> None:
        assert self._place is not None
        self._next_draw = now + self._place.interval_s
        facts = self._facts
        facts.elapsed_s = self._throughput.elapsed_s
        facts.per_second, facts.records_per_second = self._throughput.rates()
        self._place.draw(progress_line(facts, self._place.width))
