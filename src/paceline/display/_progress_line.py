"""Lines of text about progress, cut to the width there is."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any
from unicodedata import combining, east_asian_width

from paceline._terminal_text import terminal_text

UNITS = ("batches", "epochs", "records", "reports")
COMPLETED = "completed"

_SINGULAR = {"batches": "batch", "epochs": "epoch", "records": "record", "reports": "report"}
_BAR_WIDTH = 20
# On narrower lines the percentage alone says it, and leaves the room to metrics.
_LEAST_WIDTH_WITH_BAR = 99
_SECONDS_OF_DAY = 86_400
_LONGEST_S = 100 * _SECONDS_OF_DAY


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
    """Return the state in one line; of what does not fit, the least important is left out.

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
        # How long it took matters less than what came of it.
        state = _progress_state(facts, has_bar=has_bar, has_duration=False)
        line = "  ".join(_parts_fitting_line(state + metrics, width))
    return line


def report_line(facts: ProgressFacts, group: str, metrics: Mapping[str, Any]) -> str:
    """Return one report as a line of any length; only those of training carry no group."""
    values = " ".join(_progress_numbers(metrics))
    told = values if group == "training" else f"{group}: {values}"
    return "  ".join(_parts_fitting_line([*_progress_state(facts), (2, told)], None))


def _progress_state(
    facts: ProgressFacts, *, has_bar: bool = False, has_duration: bool = True
) -> list[tuple[int, str]]:
    """Return parts in the order of the line, with their importance: the smallest stays longest."""
    is_in_records = facts.unit == "records"
    return [
        (0, _progress_count(facts)),
        (9, _bar(facts) if has_bar else ""),
        # Meanwhile the time that is left tells as much.
        (1 if facts.ending else 5, _percentage(facts)),
        (6, _position(facts)),
        (3, _rate(facts.batches_per_second, "batches")),
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
    if facts.unit == "epochs":
        # The present one, of which a part may be done.
        completed = facts.epoch or max(ceil(completed), 1)
    if total is None:
        return f"{unit} {_number(completed)}"
    return f"{unit} {_number(min(completed, total))} of {_number(total)}"


def _position(facts: ProgressFacts) -> str:
    """Return where training is, in another unit than that of the count."""
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
    if value <= 0:
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
    """Return seconds in at most two units, such as `2h 5m`."""
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
    """Yield the metrics that are numbers, losses first; those named as `others` say what they are.

    The counts stand in the line already, and only a number is short for certain.
    """
    for name in sorted(metrics, key=lambda name: not name.endswith("loss")):
        value = metrics[name]
        if name not in UNITS and isinstance(value, (int, float)):
            yield _plain(f"{'validation_' * (name in others)}{name}={value:.4g}")


def _plain(text: str) -> str:
    """Return text in one line, without what would move the cursor."""
    return terminal_text(text).replace("\n", " ").replace("\t", " ")


def _num_columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )
