"""Columns of metric points as bytes: steps, times and values of one series."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from paceline.journal import decode_value, encode_float

# How values are stored: 64-bit floats, 64-bit integers, or JSON for everything else.
FLOATS, INTEGERS, MIXED = "f", "i", "j"


@dataclass(slots=True)
class Points:
    """Points of one series in the order in which they were reported."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def extend(self, other: "Points") -> None:
        """Append the points of `other`."""
        self.steps += other.steps
        self.times += other.times
        self.values += other.values

    def decode_non_finite(self) -> None:
        """Replace tagged NaN and infinities by floats."""
        if dict in set(map(type, self.values)):
            self.values = [decode_value(value) for value in self.values]


@dataclass(frozen=True, slots=True)
class PointColumn:
    """Points of one kind as bytes."""

    kind: str
    steps: bytes
    times: bytes
    values: bytes


def encode_points(points: Points) -> PointColumn:
    """Return points as bytes; exact for every value that JSON or a float can hold."""
    kinds = set(map(type, points.values))
    if kinds == {float}:
        kind, values = FLOATS, array("d", points.values).tobytes()
    elif kinds == {int}:
        kind, values = INTEGERS, array("q", points.values).tobytes()
    else:
        kind = MIXED
        values = json.dumps([_tag(value) for value in points.values]).encode()
    steps, times = array("q", points.steps), array("d", points.times)
    return PointColumn(kind, steps.tobytes(), times.tobytes(), values)


def decode_points(kind: str, steps: bytes, times: bytes, values: bytes) -> Points:
    """Return the points that `encode_points` was given."""
    decoded: Sequence[Any]
    if kind == MIXED:
        decoded = decode_value(json.loads(values)) if values else []
    else:
        decoded = array("d" if kind == FLOATS else "q", values).tolist()
    return Points(array("q", steps).tolist(), array("d", times).tolist(), list(decoded))


@dataclass(slots=True)
class Summary:
    """Summary of a series; the extremes and the sum are over its finite numbers."""

    count: int = 0
    num_numbers: int = 0
    sum: float = 0.0
    min: float | None = None
    max: float | None = None
    last: Any = None
    first_step: int = 0
    last_step: int = 0

    def add(self, points: Points) -> None:
        """Include further points."""
        if not points.steps:
            return
        numbers = [v for v in points.values if type(v) in (int, float) and isfinite(v)]
        first, last = min(points.steps), max(points.steps)
        self.first_step = min(self.first_step, first) if self.count else first
        if not self.count or last >= self.last_step:
            self.last_step = last
            self.last = points.values[points.steps.index(last)]
        self.count += len(points.steps)
        if numbers:
            self.num_numbers += len(numbers)
            self.sum += float(sum(numbers))
            lowest, highest = float(min(numbers)), float(max(numbers))
            self.min = lowest if self.min is None else min(self.min, lowest)
            self.max = highest if self.max is None else max(self.max, highest)

    def merge(self, later: "Summary") -> None:
        """Include the summary of a later attempt's series."""
        if not later.count:
            return
        # A later attempt may add a name to an earlier step, which is not the last one then.
        if not self.count or later.last_step >= self.last_step:
            self.last, self.last_step = later.last, later.last_step
        self.first_step = min(self.first_step, later.first_step) if self.count else later.first_step
        self.count += later.count
        self.num_numbers += later.num_numbers
        self.sum += later.sum
        self.min = _extreme(min, self.min, later.min)
        self.max = _extreme(max, self.max, later.max)


def tagged(value: Any) -> Any:
    """Return `value` with NaN and infinities tagged, for JSON."""
    return _tag(value)


def _extreme(choose: Any, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return right if left is None else left
    return float(choose(left, right))


def _tag(value: Any) -> Any:
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, dict):
        return {key: _tag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    return value
