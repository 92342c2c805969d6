"""Metric series as arrays, and down-sampled so that no extreme is lost: what a chart draws."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, select

from paceline.journal import decode_value
from paceline.master.store import _tables as tables
from paceline.master.store._point_encoding import FLOATS, INTEGERS
from paceline.master.store._series_reader import POINT_BYTES, Selection, visible_series_limits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

_COLUMNS = ["kind", "steps", "value_bytes"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order of `x`; `y` is NaN where the value is not a finite number."""

    x: "Floats"
    y: "Floats"
    steps: "Integers"


def read_curve(
    connection: Connection, selection: Selection, *, x: str = "batches"
) -> tuple[Curve, int]:
    """Return the visible points of one series, and its newest step.

    Args:
        connection: Where to read.
        selection: One metric, with its `key`.
        x: "batches", "time" (seconds since the epoch), or a metric of the same group, whose value
            at the same step counts; points without one are left out.
    """
    import numpy as np

    steps, values, times = _read_series_arrays(connection, selection, has_times=x == "time")
    last_step = int(steps[-1]) if len(steps) else selection.after_step
    if x == "batches":
        return Curve(steps.astype(np.float64), values, steps), last_step
    if x == "time":
        along = times
    else:
        other = Selection(
            trial_id=selection.trial_id, group=selection.group, key=x,
            after_step=selection.after_step,
        )  # fmt: skip
        other_steps, other_values, _ = _read_series_arrays(connection, other)
        _, own, others = np.intersect1d(steps, other_steps, True, True)
        steps, values, along = steps[own], values[own], other_values[others]
    usable = np.isfinite(along)
    if not usable.all():
        steps, values, along = steps[usable], values[usable], along[usable]
    order = np.argsort(along, kind="stable")
    return Curve(along[order], values[order], steps[order]), last_step


def cut_curve(curve: Curve, low: float | None, high: float | None) -> Curve:
    """Return the points with `low` <= x <= `high`, and one more on each side for the line."""
    import numpy as np

    first = 0 if low is None else max(int(np.searchsorted(curve.x, low, "left")) - 1, 0)
    last = len(curve.x) if high is None else int(np.searchsorted(curve.x, high, "right")) + 1
    return Curve(curve.x[first:last], curve.y[first:last], curve.steps[first:last])


def sample_curve(curve: Curve, max_points: int) -> Curve:
    """Return about `max_points` points that look the same: all extremes, both ends, all gaps.

    The span is cut into equal parts and the least and the greatest value of each is kept, so a
    spike of one point shows however long the series is. Of many gaps some are kept.
    """
    import numpy as np
    from tsdownsample import MinMaxDownsampler

    if len(curve.x) <= max_points:
        return curve
    is_finite = np.isfinite(curve.y)
    finite = np.flatnonzero(is_finite)
    kept = finite
    if len(finite) > max_points:
        x, y = np.ascontiguousarray(curve.x[finite]), np.ascontiguousarray(curve.y[finite])
        sampler: Any = MinMaxDownsampler
        chosen = sampler().downsample(x, y, n_out=max_points // 2 * 2)
        kept = finite[np.concatenate([[0], chosen.astype(np.int64), [len(finite) - 1]])]
    starts = np.flatnonzero(~is_finite & np.concatenate([[True], is_finite[:-1]]))
    if len(starts) > max_points // 4:
        starts = starts[np.linspace(0, len(starts) - 1, max_points // 4).astype(np.int64)]
    index = np.union1d(kept, starts)
    return Curve(curve.x[index], curve.y[index], curve.steps[index])


def _read_series_arrays(
    connection: Connection, selection: Selection, *, has_times: bool = False
) -> "tuple[Integers, Floats, Floats]":
    """Return steps, values and times (else no numbers) in step order, each step once."""
    import numpy as np

    limits = visible_series_limits(connection, selection.trial_id)
    columns = [*_COLUMNS, "times"] if has_times else _COLUMNS
    series = tables.series.c
    query = select(series.id, series.attempt, series.num_points, *[series[c] for c in columns])
    parts = []
    for row in connection.execute(query.where(selection.series()).order_by(series.attempt)).all():
        tail = [row._mapping[name] for name in columns]
        own = [_decode_series(*tail)]
        if row.num_points * POINT_BYTES > len(row.steps):
            own = [*_series_chunks(connection, selection, row.id, columns), *own]
        steps, values, times = (np.concatenate(column) for column in zip(*own, strict=True))
        limit = limits.get(row.attempt)
        wanted = steps > selection.after_step
        if limit is not None:
            wanted &= steps <= limit
        parts.append((steps[wanted], values[wanted], times[wanted] if has_times else times))
    if not parts:
        return np.empty(0, np.int64), np.empty(0), np.empty(0)
    steps, values, times = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not (steps[1:] > steps[:-1]).all():
        # Of two values at one step, the one reported first in the earliest attempt stands.
        steps, index = np.unique(steps, return_index=True)
        values, times = values[index], times[index] if has_times else times
    return steps, values, times


def _series_chunks(
    connection: Connection, selection: Selection, series_id: int, columns: list[str]
) -> "list[tuple[Integers, Floats, Floats]]":
    chunks = tables.chunks.c
    query = select(*[chunks[c] for c in columns]).where(
        chunks.series_id == series_id, chunks.last_step > selection.after_step
    )
    return [_decode_series(*row) for row in connection.execute(query.order_by(chunks.id)).all()]


def _decode_series(
    kind: str, steps: bytes, value_bytes: bytes, times: bytes = b""
) -> "tuple[Integers, Floats, Floats]":
    import numpy as np

    if kind == FLOATS:
        values = np.frombuffer(value_bytes, np.float64)
    elif kind == INTEGERS:
        values = np.frombuffer(value_bytes, np.int64).astype(np.float64)
    else:
        decoded = decode_value(json.loads(value_bytes)) if value_bytes else []
        values = np.array([_series_number(value) for value in decoded], np.float64)
    return np.frombuffer(steps, np.int64), values, np.frombuffer(times, np.float64)


def _series_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    return float(value)
