"""Progress of a training: how far it is, how fast, how long it will take, how it has ended."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from paceline.display._progress_line import UNITS, ProgressFacts, progress_line, report_line
from paceline.display._progress_regions import Region, find_region
from paceline.display._throughput import Throughput


class TrainingProgress:
    """Show a training's progress: one line of a terminal or notebook, elsewhere a line per report.

    Lines that the program prints or logs meanwhile appear above the progress. Nothing is shown when
    the variable `PACELINE_PROGRESS` is 0, and in continuous integration (`CI` is set).

    Args:
        total: Where training ends, in `unit`; None if that is not known.
        unit: "batches", "epochs", "records" or "reports".
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
        self._region: Region | None = None
        self._facts = ProgressFacts(total=total, unit=unit)
        self._throughput = Throughput()
        self._began = self._next_draw = 0.0

    @property
    def is_live(self) -> bool:
        """Whether a state is shown that is replaced by the next one."""
        return self._region is not None and self._region.is_live

    def start(
        self,
        steps_completed: float | None,
        records: int = 0,
        *,
        batches: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Begin to show progress.

        Args:
            steps_completed: What was done before, in the unit; see `update`.
            records: The records that were trained on before.
            batches: The batches that were trained before.
            epoch: The present epoch, from 1.
        """
        if self._region is None and not self._is_quiet:
            self._region = find_region(self._stream)
        if self._region is None:
            return
        self._throughput = Throughput()
        self._began = time.monotonic()
        self._note_position(steps_completed, records, batches, epoch, self._began)
        self._draw(self._began)

    def update(
        self,
        steps_completed: float | None,
        records: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        batches: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Tell how far training is; drawn at most ten times a second. Ends a note.

        Args:
            steps_completed: What is done since the start of training, in the unit; a part of an
                epoch is a fraction. None within an epoch of unknown length, of which `epoch` tells.
            records: The records trained on since the start of training.
            metrics: The newest metrics, of which numbers are shown; None leaves those that are.
            batches: The batches trained since the start of training.
            epoch: The present epoch, from 1.
        """
        if self._region is None:
            return
        if metrics is not None:
            self._facts.training = dict(metrics)
        self._facts.note = ""
        now = time.monotonic()
        self._note_position(steps_completed, records, batches, epoch, now)
        if now >= self._next_draw:
            self._draw(now)

    def report(self, metrics: Mapping[str, Any], group: str = "training") -> None:
        """Show metrics as the newest of their group, with the position that was told last.

        Where there is no terminal or notebook, this writes a line. Of many training reports in a
        short time, only one a second has a line there.

        Args:
            metrics: The metrics, of which numbers are shown.
            group: "training" or "validation".
        """
        if self._region is None:
            return
        facts, now = self._facts, time.monotonic()
        if group == "validation":
            facts.validation = dict(metrics)
        else:
            facts.training = dict(metrics)
        if self._region.takes_report(now, is_frequent=group == "training"):
            self._measure(now)
            self._region.write(report_line(facts, group, metrics))

    def note(self, text: str) -> None:
        """Show what is under way besides training, such as "validating", until the next update."""
        if self._region is not None:
            self._facts.note = text
            self._draw(time.monotonic())

    def end(self, how: str, *details: str) -> None:
        """Show how training has ended, and no more afterwards; does nothing after `close`.

        Args:
            how: Such as "completed", "stopped" or "failed".
            details: What else to tell, such as where the run is; in lines below.
        """
        region, self._region = self._region, None
        if region is None:
            return
        facts = self._facts
        facts.note, facts.ending = "", how
        self._measure(time.monotonic())
        region.end(progress_line(facts, region.width), details)

    def close(self) -> None:
        """Leave the last state standing and show no more; may be called more than once."""
        if self._region is not None:
            self._facts.note = ""
            self._draw(time.monotonic())
            self._region.close()
            self._region = None

    def _note_position(
        self,
        steps_completed: float | None,
        records: int,
        batches: int | None,
        epoch: int | None,
        now: float,
    ) -> None:
        facts = self._facts
        facts.completed, facts.batches, facts.epoch = steps_completed, batches, epoch
        if batches is None and facts.unit == "batches":
            batches = int(steps_completed or 0)
        self._throughput.add(now, steps_completed or 0.0, batches or 0, records)

    def _measure(self, now: float) -> None:
        facts = self._facts
        facts.elapsed_s = now - self._began
        rates = self._throughput.rates()
        facts.per_second, facts.batches_per_second, facts.records_per_second = rates

    def _draw(self, now: float) -> None:
        assert self._region is not None
        self._next_draw = now + self._region.interval_s
        if self._region.is_live:
            self._measure(now)
            self._region.draw(progress_line(self._facts, self._region.width))
