"""Progress of a training: speed, remaining time, text lines, end summary."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TextIO
from unicodedata import combining, east_asian_width

from paceline._base.progress_regions import MOST_AT_ONCE, Region, find_region
from paceline._base.terminal_text import terminal_text

UNITS = ("batches", "epochs", "records", "reports", "trials")
COMPLETED = "completed"

_SINGULAR = {unit: unit.removesuffix("s") for unit in UNITS} | {"batches": "batch"}
_BAR_WIDTH = 20
# On narrower lines the percentage alone says it, and leaves the room to metrics.
_LEAST_WIDTH_WITH_BAR = 99
_SECONDS_OF_DAY = 86_400
_LONGEST_S = 100 * _SECONDS_OF_DAY
_MOST_AT_ONCE_IF_TERSE = 10


@dataclass(slots=True, kw_only=True)
class ProgressFacts:
    """Facts about a training: counts are in `unit`, rates per second.

    `completed` is None within an epoch of unknown length; `epoch` is the present one, from 1.
    """

    total: float | None
    unit: str
    completed: float | None = 0
    epoch: int | None = None
    batches: int | None = None
    per_second: float = 0.0
    batches_per_second: float = 0.0
    records_per_second: float = 0.0
    elapsed_s: float = 0.0
    note: str = ""
    ending: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    validation: Mapping[str, Any] = field(default_factory=dict)


def progress_line(facts: ProgressFacts, width: int | None) -> str:
    """Return the state as a line; parts beyond the width are left out, the least important first.

    Args:
        facts: The state.
        width: The columns there are; None without an edge, for the metrics of most interest.
    """
    first, others = _newest_metrics(facts)
    if width is None:
        others = []
    metrics = [*((2, text) for text in first), *((7, text) for text in others)]
    has_bar = width is not None and width >= _LEAST_WIDTH_WITH_BAR
    line = "  ".join(_parts_fitting_line(_progress_state(facts, has_bar=has_bar) + metrics, width))
    if facts.ending and not all(text in line for text in first):
        # Time taken matters less than the outcome.
        state = _progress_state(facts, has_bar=has_bar, has_duration=False)
        line = "  ".join(_parts_fitting_line(state + metrics, width))
    return line


def report_line(facts: ProgressFacts, group: str, metrics: Mapping[str, Any]) -> str:
    """Return a report as a line of any length; groups other than training are named."""
    values = " ".join(_progress_numbers(metrics))
    told = values if group == "training" else f"{group}: {values}"
    return "  ".join(_parts_fitting_line([*_progress_state(facts), (2, told)], None))


def _progress_state(
    facts: ProgressFacts, *, has_bar: bool = False, has_duration: bool = True
) -> list[tuple[int, str]]:
    """Return parts in the order of the line, with their importance: the smallest stays longest."""
    is_in_records = facts.unit == "records"
    # Once all is over, the outcome matters more.
    of_rate = 8 if facts.ending else 3
    return [
        (0, _progress_count(facts)),
        (9, _bar(facts) if has_bar else ""),
        # Meanwhile the time that is left says as much.
        (1 if facts.ending else 5, _percentage(facts)),
        (6, _position(facts)),
        (of_rate, _rate(facts.batches_per_second, "batches")),
        (of_rate, _rate(facts.per_second, facts.unit) if facts.unit == "reports" else ""),
        (8, _rate(facts.records_per_second, "records") if has_bar or is_in_records else ""),
        (1 if facts.ending else 4, _progress_time(facts) if has_duration else _plain(facts.ending)),
        (1, _plain(facts.note)),
    ]


def _parts_fitting_line(parts: list[tuple[int, str]], width: int | None) -> Iterator[str]:
    if width is None:
        return (text for _, text in parts if text)
    room, fitting = width + 2, set()
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        num_columns = _num_columns(parts[index][1]) + 2
        if num_columns > 2 and num_columns <= room:
            fitting.add(index)
            room -= num_columns
    return (part for index, (_, part) in enumerate(parts) if index in fitting)


def _progress_count(facts: ProgressFacts) -> str:
    unit, completed, total = _SINGULAR[facts.unit], facts.completed or 0, facts.total
    if facts.unit in ("epochs", "trials"):
        # The present one, of which a part may be done.
        completed = facts.epoch or max(ceil(completed), 1)
    if total is None:
        return f"{unit} {_number(completed)}"
    return f"{unit} {_number(min(completed, total))} of {_number(total)}"


def _position(facts: ProgressFacts) -> str:
    """Return the position of training in a unit other than the main count."""
    if facts.unit == "trials":
        return ""
    if facts.unit == "epochs":
        return "" if facts.batches is None else f"batch {facts.batches:,}"
    return "" if facts.epoch is None else f"epoch {facts.epoch:,}"


def _part_done(facts: ProgressFacts) -> float | None:
    if not facts.total or facts.completed is None:
        return None
    return min(facts.completed / facts.total, 1.0)


def _bar(facts: ProgressFacts) -> str:
    done = _part_done(facts)
    if done is None:
        return ""
    num_full = int(_BAR_WIDTH * done)
    return f"[{'#' * num_full}{'-' * (_BAR_WIDTH - num_full)}]"


def _percentage(facts: ProgressFacts) -> str:
    done = _part_done(facts)
    # Rounded down, so that only the end is all.
    return "" if done is None else f"{int(100 * done)}%"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _rate(value: float, unit: str) -> str:
    if value < 0.001:
        return ""
    return f"{value:,.0f} {unit}/s" if value >= 100 else f"{value:.3g} {unit}/s"


def _progress_time(facts: ProgressFacts) -> str:
    elapsed, done = format_duration(facts.elapsed_s), _part_done(facts)
    if facts.ending:
        word = "in" if facts.ending.startswith(COMPLETED) else "after"
        return f"{_plain(facts.ending)} {word} {elapsed}"
    if facts.total is None or done is None:
        return f"{elapsed} elapsed"
    if done == 1 or facts.per_second <= 0:
        return ""
    assert facts.completed is not None
    left_s = (facts.total - facts.completed) / facts.per_second
    return f"{format_duration(ceil(left_s)) if left_s < _LONGEST_S else 'over 99 days'} left"


def format_duration(seconds: float) -> str:
    """Return seconds in at most two units, e.g. `2h 5m`."""
    total = int(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m {total % 60}s"
    if total < _SECONDS_OF_DAY:
        return f"{total // 3600}h {total % 3600 // 60}m"
    return f"{total // _SECONDS_OF_DAY}d {total % _SECONDS_OF_DAY // 3600}h"


def _newest_metrics(facts: ProgressFacts) -> tuple[list[str], list[str]]:
    """Return the first metric of training and of validation, and the others."""
    training = [*_progress_numbers(facts.training)]
    validation = [*_progress_numbers(facts.validation, others=facts.training)]
    return training[:1] + validation[:1], training[1:] + validation[1:]


def _progress_numbers(metrics: Mapping[str, Any], others: Iterable[str] = ()) -> Iterator[str]:
    """Yield the numeric metrics, losses first; names also in `others` get a validation prefix.

    The counts stand in the line already, and only a number is short for certain.
    """
    for name in _losses_first(metrics):
        yield _plain(f"{'validation_' * (name in others)}{name}={metrics[name]:.4g}")


def _losses_first(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of numeric metrics."""
    for name in sorted(metrics, key=lambda name: not name.endswith("loss")):
        if name not in UNITS and isinstance(metrics[name], (int, float)):
            yield name


def _plain(text: str) -> str:
    """Return text as a single line, without characters for moving the cursor."""
    return terminal_text(text).replace("\n", " ").replace("\t", " ")


def _num_columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


# Long enough that a validation does not make the rest jump, short enough to follow a change.
_WINDOW_S = 60.0
_SAMPLE_INTERVAL_S = 1.0
# Below this a rate says more about the start than about the rest.
_SHORTEST_S = 0.5


class Throughput:
    """Rates of counters over the last minute; times are in seconds of a single clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()
        self._first = 0.0
        self._last: tuple[float, tuple[float, ...]] = (0.0, ())

    @property
    def elapsed_s(self) -> float:
        """The seconds between the first and the last addition."""
        return self._last[0] - self._first

    def add(self, now: float, *counters: float) -> None:
        """Note how far counters are at a time, always the same ones."""
        samples = self._samples
        self._last = (now, counters)
        if not samples:
            self._first = now
        if not samples or now - samples[-1][0] >= _SAMPLE_INTERVAL_S:
            samples.append(self._last)
            while len(samples) > 2 and now - samples[1][0] >= _WINDOW_S:
                samples.popleft()

    def rates(self) -> tuple[float, ...]:
        """Return the rate per second of each counter; 0 until enough time has passed."""
        if not self._samples:
            return ()
        begin, before = self._samples[0]
        now, counters = self._last
        seconds = now - begin
        if seconds < _SHORTEST_S:
            return (0.0,) * len(counters)
        return tuple((b - a) / seconds for a, b in zip(before, counters, strict=True))


class TrainingProgress:
    """Progress display of a training: a live line in a terminal or notebook, else lines of a log.

    Lines that the program prints or logs meanwhile appear above the progress. Nothing is shown when
    the variable `PACELINE_PROGRESS` is 0, and in continuous integration (`CI` is set).

    Args:
        total: Where training ends, in `unit`; None if that is not known.
        unit: "batches", "epochs", "records", "reports" or "trials".
        stream: Where to show it; standard error by default.
        is_quiet: Whether to show nothing at all, as on ranks other than the chief.
        is_terse: Whether a file or pipe gets only a report now and then, as programs of this kind
            often print theirs.

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
        is_terse: bool = False,
    ) -> None:
        if unit not in UNITS:
            raise ValueError(f"`unit` must be one of {', '.join(UNITS)}, but got {unit!r}.")
        self._stream = sys.stderr if stream is None else stream
        self._is_quiet = is_quiet
        self._is_terse = is_terse
        self._region: Region | None = None
        self._facts = ProgressFacts(total=total, unit=unit)
        self._throughput = Throughput()
        self._began = self._next_draw = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the display replaces its state in place."""
        return self._region is not None and self._region.is_live

    def start(
        self,
        steps_completed: float | None,
        records: int = 0,
        *,
        batches: int | None = None,
        epoch: int | None = None,
        began: float | None = None,
    ) -> None:
        """Begin to show progress.

        Args:
            steps_completed: Progress made before, in the unit; see `update`.
            records: The records that were trained on before.
            batches: The batches that were trained before.
            epoch: The present epoch, from 1.
            began: The beginning by the monotonic clock; now by default.
        """
        if self._region is None and not self._is_quiet:
            most = _MOST_AT_ONCE_IF_TERSE if self._is_terse else MOST_AT_ONCE
            self._region = find_region(self._stream, most)
        if self._region is None:
            return
        self._throughput = Throughput()
        now = time.monotonic()
        self._began = now if began is None else began
        self._note_position(steps_completed, records, batches, epoch, now)
        self._draw(now)

    def update(
        self,
        steps_completed: float | None,
        records: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        validation: Mapping[str, Any] | None = None,
        batches: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Show how far training is; drawn at most ten times a second. Ends a note.

        Args:
            steps_completed: Progress since the start of training, in the unit; a part of an
                epoch is a fraction. None within an epoch of unknown length, for which `epoch`
                counts.
            records: The records trained on since the start of training.
            metrics: The newest metrics, of which numbers are shown; None leaves those that are.
            validation: The same of a validation.
            batches: The batches trained since the start of training.
            epoch: The present epoch, from 1.
        """
        if self._region is None:
            return
        if metrics is not None:
            self._facts.training = dict(metrics)
        if validation is not None:
            self._facts.validation = dict(validation)
        self._facts.note = ""
        now = time.monotonic()
        self._note_position(steps_completed, records, batches, epoch, now)
        if metrics is not None:
            self._follow(metrics)
        if now >= self._next_draw:
            self._draw(now)

    def expect(self, total: float) -> None:
        """Set where training ends, in the unit."""
        self._facts.total = total

    def report(
        self,
        metrics: Mapping[str, Any],
        group: str = "training",
        *,
        steps_completed: float | None = None,
    ) -> None:
        """Show metrics as the newest of their group.

        Where there is no terminal or notebook, this writes a line. Of many training reports in a
        short time, only one a second has a line there.

        Args:
            metrics: The metrics, of which numbers are shown.
            group: "training" or "validation".
            steps_completed: Progress made, in the unit; the last known by default.
        """
        if self._region is None:
            return
        facts, now = self._facts, time.monotonic()
        if steps_completed is not None:
            facts.note = ""
            self._note_position(steps_completed, 0, None, None, now)
        if group == "validation":
            facts.validation = dict(metrics)
        else:
            facts.training = dict(metrics)
        self._follow(facts.training or metrics)
        if self._region.takes_report(now, is_frequent=group == "training"):
            self._measure(now)
            self._region.write(report_line(facts, group, metrics))
        elif steps_completed is not None and now >= self._next_draw:
            self._draw(now)

    def note(self, text: str) -> None:
        """Show another activity, e.g. "validating", until the next update."""
        if self._region is not None:
            self._facts.note = text
            self._draw(time.monotonic())

    def end(self, how: str, *details: str) -> None:
        """Show how training has ended, and no more afterwards; does nothing after `close`.

        Args:
            how: Such as "completed", "stopped" or "failed".
            details: More to show, such as where the run is; in lines below.
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

    def _follow(self, metrics: Mapping[str, Any]) -> None:
        """Add the first metric to the curve."""
        name = next(_losses_first(metrics), None)
        if name is not None and self._region is not None and self._facts.completed is not None:
            self._region.follow(self._facts.completed, float(metrics[name]))


def locations_of(
    run_dir: str | os.PathLike[str], storage: str | None, checkpoint: str | None
) -> tuple[str, ...]:
    """Return where a run is, and its last checkpoint.

    Args:
        run_dir: The run directory.
        storage: Where the last checkpoint is stored, a path or a URL; None without one.
        checkpoint: Its UUID.
    """
    run = f"run {shortest_path(os.fspath(run_dir))}"
    if storage is None or checkpoint is None:
        return (run,)
    is_inside = storage.startswith(os.path.join(run_dir, ""))
    return (
        run,
        f"checkpoint {checkpoint if is_inside else f'{shortest_path(storage)}/{checkpoint}'}",
    )


def shortest_path(location: str) -> str:
    """Return a path relative to the working directory if inside of the directory."""
    try:
        relative = os.path.relpath(location)
    except OSError:
        # The working directory is gone.
        return location
    return location if "://" in location or relative.startswith(os.pardir) else relative
