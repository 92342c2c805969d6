"""A line of text about progress, cut to the width there is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any
from unicodedata import combining, east_asian_width

UNITS = ("batches", "epochs", "records")

_BAR_WIDTH = 20
_SECONDS_OF_DAY = 86_400
_LONGEST_S = 100 * _SECONDS_OF_DAY


@dataclass(slots=True, kw_only=True)
class Facts:
    """What is known of a training: counts are in `unit`, rates per second."""

    total: float | None
    unit: str
    completed: float = 0
    per_second: float = 0.0
    records_per_second: float = 0.0
    elapsed_s: float = 0.0
    note: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)


def progress_line(facts: Facts, width: int) -> str:
    """Return the line; parts that do not fit are left out, metrics and rates before the note."""
    note = _plain(facts.note)
    line = _joined(_bar(facts), _count(facts), width)
    room = width - _num_columns(note) - 2 * bool(note)
    for part in [*_rates(facts), _time(facts)]:
        line = _joined(line, part, room)
    line = _joined(line, note, width)
    for name, value in facts.metrics.items():
        # The counts stand in the line already, and only a number is short for certain.
        if name not in UNITS and isinstance(value, (int, float)):
            line = _joined(line, _plain(f"{name}={value:.4g}"), width)
    return line


def _joined(line: str, part: str, width: int) -> str:
    longer = f"{line}  {part}" if line and part else line or part
    return longer if _num_columns(longer) <= width else line


def _bar(facts: Facts) -> str:
    if not facts.total:
        return ""
    num_full = min(_BAR_WIDTH, int(_BAR_WIDTH * facts.completed / facts.total))
    return f"[{'#' * num_full}{'-' * (_BAR_WIDTH - num_full)}]"


def _count(facts: Facts) -> str:
    completed = _number(facts.completed)
    return f"{completed} {facts.unit}" if facts.total is None else (
        f"{completed}/{_number(facts.total)} {facts.unit}"
    )  # fmt: skip


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _rates(facts: Facts) -> list[str]:
    rates = []
    if facts.unit == "batches" and facts.per_second > 0:
        rates.append(f"{_rate(facts.per_second)} batches/s")
    if facts.records_per_second > 0:
        rates.append(f"{_rate(facts.records_per_second)} records/s")
    return rates


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(facts: Facts) -> str:
    if facts.total is None:
        return f"{_duration(facts.elapsed_s)} elapsed"
    left = facts.total - facts.completed
    if left <= 0:
        return f"in {_duration(facts.elapsed_s)}"
    if facts.per_second <= 0:
        return ""
    return f"ETA {_duration(left / facts.per_second)}"


def _duration(seconds: float) -> str:
    if not isfinite(seconds) or seconds >= _LONGEST_S:
        return "over 99 days"
    days, rest = divmod(int(seconds), _SECONDS_OF_DAY)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def _plain(text: str) -> str:
    """Return text without characters that would move the cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def _num_columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )
