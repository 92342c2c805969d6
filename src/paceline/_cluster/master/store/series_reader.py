"""Series of metrics: encoding, reading, curves for charts, smoothing."""

import heapq
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from paceline._base.journal_records import decode_value, encode_float
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids

# How values are stored: 64-bit floats, 64-bit integers, or JSON for everything else.
FLOATS, INTEGERS, MIXED = "f", "i", "j"


@dataclass(slots=True)
class Points:
    """Points of a single series in report order."""

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


class PointColumn(NamedTuple):
    """Points of a single value kind in encoded form."""

    kind: str
    steps: bytes
    times: bytes
    values: bytes


def encode_points(points: Points) -> PointColumn:
    """Return points in encoded form; exact for every value of JSON or float."""
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
    """Return the points encoded by `encode_points`."""
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


POINT_BYTES = 8
# Tails come after all chunks of their series, so they count as a chunk beyond every id.
_TAIL = 2**63
_CHUNKS_PER_QUERY = 256
_ROWS_PER_LOAD = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPiece:
    """Location of points, and the wanted range: `first_step` to `last_step`, inclusive."""

    attempt: int
    series_id: int
    key: str
    chunk_id: int
    first_step: int
    last_step: int | None

    @property
    def precedence(self) -> tuple[int, int, int]:
        """Sort key for duplicates of a metric at a step: the value with the lower key counts."""
        return self.attempt, self.series_id, self.chunk_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Range of points to read from a metric group of a trial; None means all."""

    trial_id: int
    group: str
    key: str | None = None
    after_step: int = -1
    up_to_step: int | None = None

    def series(self) -> sa.ColumnElement[bool]:
        """Return the SQL condition for series possibly holding selected points."""
        series = tables.series.c
        condition = sa.and_(series.trial_id == self.trial_id, series.group == self.group)
        if self.key is not None:
            condition = sa.and_(condition, series.key == self.key)
        return sa.and_(condition, self.overlaps(series))

    def chunks(self) -> sa.ColumnElement[bool]:
        """Return the SQL condition for chunks possibly holding selected points."""
        ids = sa.select(tables.series.c.id).where(self.series())
        return sa.and_(tables.chunks.c.series_id.in_(ids), self.overlaps(tables.chunks.c))

    def overlaps(self, columns: Any) -> sa.ColumnElement[bool]:
        """Return the SQL condition for a series or chunk possibly holding selected steps."""
        condition: sa.ColumnElement[bool] = columns.last_step > self.after_step
        if self.up_to_step is not None:
            condition = sa.and_(condition, columns.first_step <= self.up_to_step)
        return condition


def visible_series_limits(connection: sa.Connection, trial_id: int) -> dict[int, int | None]:
    """Return the last visible step of each attempt; None where nothing is superseded."""
    return _limits_of_trials(connection, [trial_id]).get(trial_id, {})


def _limits_of_trials(
    connection: sa.Connection, trial_ids: Iterable[int]
) -> dict[int, dict[int, int | None]]:
    attempts = tables.attempts.c
    query = (
        sa.select(attempts.trial_id, attempts.number, attempts.resumed_steps)
        .where(attempts.trial_id.in_(many_ids()), attempts.started_at.is_not(None))
        .order_by(attempts.trial_id, attempts.number.desc())
    )
    limits: dict[int, dict[int, int | None]] = {}
    lowest: dict[int, int] = {}
    for trial_id, number, resumed in connection.execute(query, ids_parameter(trial_ids)).all():
        limits.setdefault(trial_id, {})[number] = lowest.get(trial_id)
        # Each attempt hides the earlier attempts' points beyond the step it resumed from.
        lowest[trial_id] = min(resumed, lowest.get(trial_id, resumed))
    return limits


def is_visible(limits: Mapping[int, int | None], attempt: int, step: int) -> bool:
    """Return whether no later attempt supersedes a step, by `visible_series_limits`."""
    highest = limits.get(attempt)
    return highest is None or step <= highest


def visible_series_pieces(
    connection: sa.Connection, selection: Selection
) -> Iterator[tuple[int, list[SeriesPiece]]]:
    """Yield (first step, pieces from there on) in order of the first steps.

    Only the places of points are read here, and no further than the caller iterates;
    `load_series_points` reads the points. Points that later attempts supersede are left out.
    """
    limits = visible_series_limits(connection, selection.trial_id)
    chunked: dict[int, SeriesPiece] = {}
    tails: list[SeriesPiece] = []
    for row in connection.execute(_series_query(selection)).all():
        last_step = _least(limits.get(row.attempt), selection.up_to_step)
        if last_step is not None and row.first_step > last_step:
            continue
        first_step = row.first_step
        if row.chunked_steps is not None:
            # Steps may come out of order, so only the tail's own steps show where it begins.
            first_step = min(array("q", row.chunked_steps), default=None)
        piece = SeriesPiece(
            attempt=row.attempt, series_id=row.id, key=row.key, chunk_id=_TAIL,
            first_step=max(first_step or 0, selection.after_step + 1), last_step=last_step,
        )  # fmt: skip
        if row.chunked_steps is not None:
            chunked[row.id] = piece
        if first_step is not None:
            tails.append(piece)
    tails.sort(key=_first_step)
    chunks = _series_pieces_of_chunks(connection, selection, chunked) if chunked else iter(())
    for first, pieces in groupby(heapq.merge(tails, chunks, key=_first_step), _first_step):
        yield first, [p for p in pieces if p.last_step is None or first <= p.last_step]


def load_series_points(
    connection: sa.Connection, pieces: Iterable[SeriesPiece]
) -> list[tuple[SeriesPiece, Points]]:
    """Return the wanted points of pieces."""
    tails: dict[int, SeriesPiece] = {}
    chunks: dict[int, SeriesPiece] = {}
    for piece in pieces:
        if piece.chunk_id == _TAIL:
            tails[piece.series_id] = piece
        else:
            chunks[piece.chunk_id] = piece
    return _load_series(connection, tables.series, tails) + _load_series(
        connection, tables.chunks, chunks
    )


def _series_query(selection: Selection) -> Any:
    series = tables.series.c
    has_chunks = series.num_points * POINT_BYTES > sa.func.length(series.steps)
    chunked_steps = sa.case((has_chunks, series.steps), else_=None).label("chunked_steps")
    columns = (series.id, series.attempt, series.key, series.first_step, chunked_steps)
    return sa.select(*columns).where(selection.series())


def _series_pieces_of_chunks(
    connection: sa.Connection, selection: Selection, series: dict[int, SeriesPiece]
) -> Iterator[SeriesPiece]:
    chunks = tables.chunks.c
    query = (
        sa.select(chunks.id, chunks.series_id, chunks.first_step)
        .where(selection.chunks())
        .order_by(chunks.first_step, chunks.id)
        .limit(_CHUNKS_PER_QUERY)
    )
    rows = connection.execute(query).all()
    while rows:
        for row in rows:
            tail = series.get(row.series_id)
            if tail is not None:
                yield SeriesPiece(
                    attempt=tail.attempt, series_id=tail.series_id, key=tail.key, chunk_id=row.id,
                    first_step=max(row.first_step, selection.after_step + 1),
                    last_step=tail.last_step,
                )  # fmt: skip
        if len(rows) < _CHUNKS_PER_QUERY:
            return
        last = rows[-1]
        beyond = sa.or_(
            chunks.first_step > last.first_step,
            sa.and_(chunks.first_step == last.first_step, chunks.id > last.id),
        )
        rows = connection.execute(query.where(beyond)).all()


def _load_series(
    connection: sa.Connection, table: Any, pieces: dict[int, SeriesPiece]
) -> list[tuple[SeriesPiece, Points]]:
    loaded = []
    ids = list(pieces)
    columns = table.c
    for start in range(0, len(ids), _ROWS_PER_LOAD):
        query = sa.select(
            columns.id, columns.kind, columns.steps, columns.times, columns.value_bytes
        ).where(columns.id.in_(many_ids()))
        wanted = ids_parameter(ids[start : start + _ROWS_PER_LOAD])
        for row in connection.execute(query, wanted).all():
            points = decode_points(row.kind, row.steps, row.times, row.value_bytes)
            loaded.append((pieces[row.id], _cut_series(points, pieces[row.id])))
    return loaded


def _cut_series(points: Points, piece: SeriesPiece) -> Points:
    first, last = piece.first_step, piece.last_step
    if not points.steps or (
        min(points.steps) >= first and (last is None or max(points.steps) <= last)
    ):
        return points
    kept = [
        index
        for index, step in enumerate(points.steps)
        if step >= first and (last is None or step <= last)
    ]
    return Points(
        [points.steps[i] for i in kept],
        [points.times[i] for i in kept],
        [points.values[i] for i in kept],
    )


def _first_step(piece: SeriesPiece) -> int:
    return piece.first_step


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    _Arrays = tuple[Integers, Floats, Floats]

_COLUMNS = ["kind", "steps", "value_bytes"]
_POINTS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order of `x`; `y` is NaN where the value is not a finite number."""

    x: "Floats"
    y: "Floats"
    steps: "Integers"


def read_curve(
    connection: sa.Connection, selection: Selection, *, x: str = "batches"
) -> tuple[Curve, int]:
    """Return the visible points of a single series, and the newest step.

    Args:
        connection: Where to read.
        selection: One metric, with its `key`.
        x: "batches", "time" (seconds since the epoch), or a metric of the same group, whose value
            at the same step counts; points without one are left out.
    """
    return next(read_curves(connection, [selection.trial_id], selection, x=x))


def read_curves(
    connection: sa.Connection, trial_ids: Sequence[int], selection: Selection, *, x: str = "batches"
) -> Iterator[tuple[Curve, int]]:
    """Yield a metric's points and newest step of each trial, like `read_curve`.

    A few queries serve all trials, and only a bounded number of points is in memory at once.

    Args:
        connection: Where to read.
        trial_ids: Distinct trials; the curves come in their order.
        selection: One metric, with its `key`; its own trial does not count.
        x: As for `read_curve`.
    """
    has_others = x not in ("batches", "time")
    found = _read_series_arrays(connection, trial_ids, selection, has_times=x == "time")
    others: Iterable[_Arrays | None] = (
        _read_series_arrays(connection, trial_ids, replace(selection, key=x, up_to_step=None))
        if has_others
        else repeat(None)
    )
    for arrays, other in zip(found, others, strict=False):
        steps = arrays[0]
        last_step = int(steps[-1]) if len(steps) else selection.after_step
        yield _curve_along(arrays, other, is_by_time=x == "time"), last_step


def _curve_along(arrays: "_Arrays", other: "_Arrays | None", *, is_by_time: bool) -> Curve:
    import numpy as np

    steps, values, along = arrays
    if other is not None:
        _, own, others = np.intersect1d(steps, other[0], True, True)
        steps, values, along = steps[own], values[own], other[1][others]
    elif not is_by_time:
        return Curve(steps.astype(np.float64), values, steps)
    usable = np.isfinite(along)
    if not usable.all():
        steps, values, along = steps[usable], values[usable], along[usable]
    order = np.argsort(along, kind="stable")
    return Curve(along[order], values[order], steps[order])


def cut_curve(curve: Curve, low: float | None, high: float | None) -> Curve:
    """Return the points with `low` <= x <= `high`, and a neighbor on each side for the line."""
    import numpy as np

    first = 0 if low is None else max(int(np.searchsorted(curve.x, low, "left")) - 1, 0)
    last = len(curve.x) if high is None else int(np.searchsorted(curve.x, high, "right")) + 1
    return Curve(curve.x[first:last], curve.y[first:last], curve.steps[first:last])


def sample_curve(curve: Curve, max_points: int) -> Curve:
    """Return about `max_points` points of the same look: with extremes, both ends, and gaps.

    The span is cut into equal parts and the least and the greatest value of each is kept, so a
    spike of one point shows in the longest series. Some of many gaps are kept.
    """
    import numpy as np

    if len(curve.x) <= max_points:
        return curve
    is_finite = np.isfinite(curve.y)
    if is_finite.all():
        index = _extremes(curve.x, curve.y, max_points)
        return Curve(curve.x[index], curve.y[index], curve.steps[index])
    finite = np.flatnonzero(is_finite)
    kept = finite
    if len(finite) > max_points:
        kept = finite[_extremes(curve.x[finite], curve.y[finite], max_points)]
    starts = np.flatnonzero(~is_finite & np.concatenate([[True], is_finite[:-1]]))
    if len(starts) > max_points // 4:
        starts = starts[np.linspace(0, len(starts) - 1, max_points // 4).astype(np.int64)]
    index = np.union1d(kept, starts)
    return Curve(curve.x[index], curve.y[index], curve.steps[index])


def _extremes(x: "Floats", y: "Floats", max_points: int) -> "Integers":
    """Return the ascending indices of each part's least and greatest value, and of both ends."""
    import numpy as np

    chosen = _sampler().downsample(
        np.ascontiguousarray(x), np.ascontiguousarray(y), n_out=max_points // 2 * 2
    )
    return np.unique(np.concatenate([[0], chosen.astype(np.int64), [len(x) - 1]]))


@cache
def _sampler() -> Any:
    from tsdownsample import MinMaxDownsampler

    sampler: Any = MinMaxDownsampler
    return sampler()


def _read_series_arrays(
    connection: sa.Connection,
    trial_ids: Sequence[int],
    selection: Selection,
    *,
    has_times: bool = False,
) -> "Iterator[_Arrays]":
    """Yield steps, values and times (else no numbers) of each trial, each step once, in order."""
    series = tables.series.c
    query = (
        sa.select(series.id, series.trial_id, series.attempt, series.num_points)
        .where(
            series.trial_id.in_(many_ids()),
            series.group == selection.group,
            series.key == selection.key,
            selection.overlaps(series),
        )
        .order_by(series.trial_id, series.attempt)
    )
    rows = connection.execute(query, ids_parameter(trial_ids)).all()
    of_trials = {key: list(own) for key, own in groupby(rows, lambda row: row.trial_id)}
    limits = _limits_of_trials(connection, of_trials)
    columns = [*_COLUMNS, "times"] if has_times else _COLUMNS
    for batch in _bounded_batches(trial_ids, of_trials):
        ids = [row.id for trial_id in batch for row in of_trials.get(trial_id, ())]
        pieces = _load_arrays(connection, ids, selection, columns)
        for trial_id in batch:
            own = [(row.attempt, pieces.pop(row.id)) for row in of_trials.get(trial_id, ())]
            yield _join_arrays(own, limits.get(trial_id, {}), selection.after_step)


def _bounded_batches(
    trial_ids: Sequence[int], of_trials: Mapping[int, list[Any]]
) -> Iterator[list[int]]:
    batch: list[int] = []
    num_points = 0
    for trial_id in trial_ids:
        batch.append(trial_id)
        num_points += sum(row.num_points for row in of_trials.get(trial_id, ()))
        if num_points >= _POINTS_AT_ONCE:
            yield batch
            batch, num_points = [], 0
    if batch:
        yield batch


def _load_arrays(
    connection: sa.Connection, ids: list[int], selection: Selection, columns: list[str]
) -> "dict[int, list[_Arrays]]":
    """Return the chunks and then the tail of each series, decoded."""
    pieces: dict[int, list[_Arrays]] = {}
    for table, key in ((tables.chunks, "series_id"), (tables.series, "id")):
        query = sa.select(table.c.id, table.c[key], *[table.c[name] for name in columns]).where(
            table.c[key].in_(many_ids()), selection.overlaps(table.c)
        )
        # SQLite would copy the points to sort them.
        rows = sorted(connection.execute(query, ids_parameter(ids)).all(), key=lambda row: row[0])
        for _, series_id, *encoded in rows:
            pieces.setdefault(series_id, []).append(_decode_series(*encoded))
    return pieces


def _join_arrays(
    parts: "list[tuple[int, list[_Arrays]]]", limits: Mapping[int, int | None], after_step: int
) -> "_Arrays":
    import numpy as np

    visible = []
    for attempt, pieces in parts:
        steps, values, times = map(_joined_array, zip(*pieces, strict=True))
        limit = limits.get(attempt)
        wanted = steps > after_step
        if limit is not None:
            wanted &= steps <= limit
        # Long series: a copy costs more than this look.
        if not wanted.all():
            steps, values = steps[wanted], values[wanted]
            times = times[wanted] if len(times) else times
        visible.append((steps, values, times))
    if not visible:
        return np.empty(0, np.int64), np.empty(0), np.empty(0)
    steps, values, times = map(_joined_array, zip(*visible, strict=True))
    if not (steps[1:] > steps[:-1]).all():
        # Duplicates at the same step: the first report of the earliest attempt counts.
        steps, index = np.unique(steps, return_index=True)
        values, times = values[index], times[index] if len(times) else times
    return steps, values, times


def _joined_array(parts: "Sequence[NDArray[Any]]") -> "NDArray[Any]":
    import numpy as np

    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _decode_series(kind: str, steps: bytes, value_bytes: bytes, times: bytes = b"") -> "_Arrays":
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


# Below this ratio of a step to the time constant the closed form loses digits; a series does not.
_SMALL = 1e-4


def smooth_at(curve: Curve, steps: "Integers", time_constant: float) -> "Floats":
    """Return a curve's exponential moving average with respect to steps, at some of its steps.

    It is the mean of the lines between the points up to a step, where the weight of the points
    before falls to 1/e every `time_constant` steps:

        S(t) = integral of f(u) exp((u - t) / T) du / integral of exp((u - t) / T) du

    with u from the first step to t (Zumbach and Müller, "Operators on inhomogeneous time series",
    2001, with linear interpolation; the division by the sum of weights is ours). Values that are
    not finite are left out, and NaN is returned in their place.

    Args:
        curve: A whole series, in the order of its steps.
        steps: Steps of the curve, in any order.
        time_constant: More than 0, in steps.
    """
    import numpy as np

    result = np.full(len(steps), np.nan)
    is_finite = np.isfinite(curve.y)
    known, values = curve.steps[is_finite], curve.y[is_finite]
    if not len(known):
        return result
    places = np.minimum(np.searchsorted(known, steps), len(known) - 1)
    is_there = known[places] == steps
    ends, index = np.unique(places[is_there], return_inverse=True)
    if len(ends):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            result[is_there] = _smoothed_means(known, values, ends, time_constant)[index]
    return result


def _smoothed_means(
    known: "Integers", values: "Floats", ends: "Integers", time_constant: float
) -> "Floats":
    """Return the smoothed means at the points with the ascending indices `ends`."""
    import numpy as np

    known, values = known[: ends[-1] + 1], values[: ends[-1] + 1]
    # Integral of each line, weighted relative to its end; rescaled below to the next wanted point.
    parts = _line_integrals(np.diff(known) / time_constant, values)
    lengths = np.diff(ends, prepend=-1)
    to_end = (known - np.repeat(known[ends], lengths)) / time_constant
    sums = np.add.reduceat(parts * np.exp(to_end), np.concatenate([[0], ends[:-1] + 1]))
    decays = np.exp(-np.diff(known[ends], prepend=known[0]) / time_constant)
    total, totals = 0.0, []
    for decay, part in zip(decays.tolist(), sums.tolist(), strict=True):
        total = total * decay + part
        totals.append(total)
    masses = -np.expm1((known[0] - known[ends]) / time_constant)
    # At the first step there is no line yet.
    return np.where(masses > 0, np.divide(totals, np.where(masses > 0, masses, 1)), values[ends])


def _line_integrals(widths: "Floats", values: "Floats") -> "Floats":
    """Return the weighted integral over the line up to each point, 0 for the first point."""
    import numpy as np

    decay = np.exp(-widths)
    mean = -np.expm1(-widths) / widths
    is_small = widths < _SMALL
    before = np.where(is_small, widths / 2 - widths**2 / 3, mean - decay)
    here = np.where(is_small, widths / 2 - widths**2 / 6, 1 - mean)
    return np.concatenate([[0.0], before * values[:-1] + here * values[1:]])
