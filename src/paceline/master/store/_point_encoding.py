"""Columns of metric points as bytes: steps, times and values of one series."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
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


def tagged(value: Any) -> Any:
    """Return `value` with NaN and infinities tagged, for JSON."""
    return _tag(value)


def _tag(value: Any) -> Any:
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, dict):
        return {key: _tag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    return value
