"""Metrics as rows and as curves of groups, metric of a checkpoint, time of attempts by use."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, Row, bindparam, insert, select, update

from paceline._base.journal_records import (
    AttemptTimes,
    MetricsReported,
    TimeShares,
    TimeSpent,
    divide_time,
    same_value,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.metric_series import (
    Curve,
    Points,
    Selection,
    SeriesPiece,
    cut_curve,
    load_series_points,
    tagged,
    visible_series_pieces,
)
from paceline._cluster.master.store.series_writer import store_columns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Value refused because an earlier attempt reported another value at the same step."""

    group: str
    step: int
    key: str
    kept: Any
    refused: Any


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Visible values of all metrics of a group at a single step."""

    step: int
    attempt: int
    time: float
    metrics: dict[str, Any]


def add_metrics(
    connection: Connection,
    *,
    trial_id: int,
    attempt: int,
    resumed_steps: int,
    records: Iterable[MetricsReported],
) -> list[Conflict]:
    """Store the metric reports of an attempt, and return the conflicting values.

    A report at or before the step from which the attempt resumed must agree with the stored one:
    identical values are dropped, others are returned as conflicts, and new keys are stored.
    """
    columns: dict[tuple[str, str], Points] = {}
    conflicts: list[Conflict] = []
    reports = list(records)
    # A first attempt repeats no steps.
    repeated = [r for r in reports if attempt > 1 and r.steps_completed <= resumed_steps]
    known = _known_metric_values(connection, trial_id, attempt, repeated)
    for record in reports:
        standing = known.get(record.group, {})
        for key, value in record.metrics.items():
            cell = (record.steps_completed, key)
            if cell in standing:
                if not same_value(tagged(standing[cell]), value):
                    conflicts.append(Conflict(record.group, *cell, standing[cell], value))
                continue
            points = columns.get((record.group, key))
            if points is None:
                points = columns[record.group, key] = Points()
            points.steps.append(record.steps_completed)
            points.times.append(record.time)
            points.values.append(value)
    if columns:
        store_columns(connection, trial_id, attempt, columns)
    return conflicts


def read_rows(
    connection: Connection,
    trial_id: int,
    group: str,
    *,
    after_step: int = -1,
    limit: int | None = None,
) -> list[MetricRow]:
    """Return visible rows in step order, those beyond `after_step`, at most `limit`.

    Reading and memory grow with the rows returned, not with the rows beyond.
    """
    selection = Selection(trial_id=trial_id, group=group, after_step=after_step)
    loaded: list[tuple[SeriesPiece, Points]] = []
    steps = _MetricSteps()
    for first_step, pieces in visible_series_pieces(connection, selection):
        # Every step below the first one of the pieces to come is known by now.
        if limit is not None and steps.num_below(first_step) >= limit:
            break
        for piece, points in load_series_points(connection, pieces):
            loaded.append((piece, points))
            steps.add(points.steps)
    rows: dict[int, MetricRow | None] = dict.fromkeys(sorted(steps.seen)[:limit])
    for piece, points in sorted(loaded, key=_precedence):
        for step, at, value in zip(points.steps, points.times, points.values, strict=True):
            if step not in rows:
                continue
            row = rows[step]
            if row is None:
                rows[step] = MetricRow(step, piece.attempt, at, {piece.key: value})
            else:
                row.metrics.setdefault(piece.key, value)
    return [row for row in rows.values() if row is not None]


def iter_points(connection: Connection, selection: Selection) -> Iterator[tuple[int, float, Any]]:
    """Yield the visible (step, time, value) of a metric in step order, each step once.

    Memory grows with the chunks that overlap, not with the series.
    """
    held: dict[int, tuple[tuple[int, int, int], float, Any]] = {}
    for first_step, pieces in visible_series_pieces(connection, selection):
        # Every step below the first one of the pieces to come is known by now.
        for step in sorted(step for step in held if step < first_step):
            yield (step, *held.pop(step)[1:])
        for piece, points in load_series_points(connection, pieces):
            # Backwards, as the first one of several values at one step stands.
            times, values = points.times[::-1], points.values[::-1]
            rows = zip(repeat(piece.precedence), times, values, strict=False)
            own = dict(zip(points.steps[::-1], rows, strict=True))
            for step in held.keys() & own.keys():
                own[step] = min(own[step], held[step], key=itemgetter(0))
            held |= own
    for step in sorted(held):
        yield (step, *held[step][1:])


def read_series(
    connection: Connection, trial_id: int, group: str, key: str
) -> list[tuple[int, Any]]:
    """Return the visible (step, value) pairs of a metric in step order."""
    selection = Selection(trial_id=trial_id, group=group, key=key)
    return [(step, value) for step, _, value in iter_points(connection, selection)]


def metric_at(
    connection: Connection, trial_id: int, group: str, key: str, step: int
) -> float | None:
    """Return the visible value of a metric at a step; None unless a finite number."""
    return metric_numbers_at(connection, trial_id, group, key, {step}).get(step)


def metric_numbers_at(
    connection: Connection, trial_id: int, group: str, key: str, steps: set[int]
) -> dict[int, float]:
    """Return a metric's visible values by step, for the given steps with a finite number."""
    found = _metric_values_at(connection, trial_id, group, {(step, key) for step in steps})
    return {
        step: float(value)
        for (step, _), value in found.items()
        if type(value) in (int, float) and isfinite(value)
    }


def has_points_beyond(connection: Connection, trial_id: int, step: int) -> bool:
    """Return whether any attempt of the trial reported something beyond a step."""
    query = select(tables.series.c.id).where(
        tables.series.c.trial_id == trial_id, tables.series.c.last_step > step
    )
    return connection.execute(query.limit(1)).first() is not None


class _MetricSteps:
    """Set of distinct steps; counts the steps below an increasing bound."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self._beyond: list[int] = []
        self._num_below = 0

    def add(self, steps: Iterable[int]) -> None:
        for step in steps:
            if step not in self.seen:
                self.seen.add(step)
                heapq.heappush(self._beyond, step)

    def num_below(self, bound: int) -> int:
        while self._beyond and self._beyond[0] < bound:
            heapq.heappop(self._beyond)
            self._num_below += 1
        return self._num_below


def _known_metric_values(
    connection: Connection, trial_id: int, attempt: int, records: list[MetricsReported]
) -> dict[str, dict[tuple[int, str], Any]]:
    """Return the values from earlier attempts at the records' (step, key) cells, per group."""
    wanted: dict[str, set[tuple[int, str]]] = {}
    for record in records:
        cells = wanted.setdefault(record.group, set())
        cells.update((record.steps_completed, key) for key in record.metrics)
    return {
        group: _metric_values_at(connection, trial_id, group, cells, below_attempt=attempt)
        for group, cells in wanted.items()
        if cells
    }


def _metric_values_at(
    connection: Connection,
    trial_id: int,
    group: str,
    cells: set[tuple[int, str]],
    *,
    below_attempt: int | None = None,
) -> dict[tuple[int, str], Any]:
    """Return the visible values at (step, key) cells; cells without a value are left out."""
    steps, keys = {step for step, _ in cells}, {key for _, key in cells}
    selection = Selection(
        trial_id=trial_id,
        group=group,
        key=next(iter(keys)) if len(keys) == 1 else None,
        after_step=min(steps) - 1,
        up_to_step=max(steps),
    )
    found: dict[tuple[int, str], tuple[tuple[int, int, int], Any]] = {}
    for _, pieces in visible_series_pieces(connection, selection):
        wanted = [
            piece
            for piece in pieces
            if piece.key in keys and (below_attempt is None or piece.attempt < below_attempt)
        ]
        for piece, points in load_series_points(connection, wanted):
            for step, value in zip(points.steps, points.values, strict=True):
                cell = (step, piece.key)
                if cell in cells and (cell not in found or piece.precedence < found[cell][0]):
                    found[cell] = (piece.precedence, value)
    return {cell: value for cell, (_, value) in found.items()}


def _precedence(pair: tuple[SeriesPiece, Points]) -> tuple[int, int, int]:
    return pair[0].precedence


_GROUP = "validation"
# Made once: it is for each report.
_STEPS_OF_CHECKPOINTS = select(tables.checkpoints.c.steps_completed).where(
    tables.checkpoints.c.trial_id == bindparam("trial"),
    tables.checkpoints.c.steps_completed.between(bindparam("least"), bindparam("most")),
)


def measure_checkpoints(
    connection: Connection,
    trial_id: int,
    key: str,
    *,
    least: int,
    most: int = 2**63 - 1,
) -> None:
    """Update the stored metric of a trial's checkpoints from the validation values.

    Args:
        connection: The connection of a write job.
        trial_id: The trial.
        key: The searched metric.
        least: The first step whose checkpoints are updated,
        most: and the last one.
    """
    checkpoints = tables.checkpoints
    wanted = {"trial": trial_id, "least": least, "most": most}
    steps = set(connection.execute(_STEPS_OF_CHECKPOINTS, wanted).scalars())
    if not steps:
        return
    values = metric_numbers_at(connection, trial_id, _GROUP, key, steps)
    statement = (
        update(checkpoints)
        .where(
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.steps_completed == bindparam("at_step"),
        )
        .values(metric=bindparam("new_metric"))
    )
    connection.execute(
        statement, [{"at_step": at, "new_metric": values.get(at)} for at in sorted(steps)]
    )


# Events of the records kept for a later session to resume from;
# of the other records only the newest stays.
_KEPT = ("start", "checkpoint")


def add_time_mark(
    connection: Connection, attempt_id: int, generation: int, record: TimeSpent
) -> None:
    """Store a record of the chief of an attempt."""
    marks = tables.time_marks
    of_session = (marks.c.attempt_id == attempt_id) & (marks.c.generation == generation)
    newest = connection.execute(
        select(marks.c.number, marks.c.event)
        .where(of_session)
        .order_by(marks.c.number.desc())
        .limit(1)
    ).first()
    values = {
        "time": record.time,
        "event": record.event,
        "steps_completed": record.steps_completed,
        "seconds": record.seconds,
    }
    if newest is not None and newest.event not in _KEPT:
        is_newest = of_session & (marks.c.number == newest.number)
        connection.execute(update(marks).where(is_newest).values(**values))
        return
    number = 0 if newest is None else newest.number + 1
    key = {"attempt_id": attempt_id, "generation": generation, "number": number}
    connection.execute(insert(marks).values(**key, **values))


def time_shares(connection: Connection, trial: Row[Any]) -> tuple[TimeShares, float]:
    """Return the shares of a trial's time, and the end of the measured span: its end or now."""
    attempts = tables.attempts
    rows = connection.execute(
        select(attempts).where(attempts.c.trial_id == trial.id).order_by(attempts.c.number)
    ).all()
    until = time.time() if trial.ended_at is None else trial.ended_at
    sessions = _attempt_time_records(connection, trial.id)
    divided = divide_time(
        trial.created_at,
        until,
        [
            AttemptTimes(
                created_at=row.created_at,
                ended_at=row.ended_at,
                sessions=sessions.get(row.id, []),
            )
            for row in rows
        ],
    )
    return divided, until


def attempt_spent(connection: Connection, attempt: Row[Any], end: float) -> dict[str, float] | None:
    """Return the seconds of kept and of lost training of an attempt that ends; None if unknown.

    What it did after its last checkpoint is lost, unless its training came to an end.
    """
    sessions = _attempt_time_records(connection, attempt.trial_id, attempt.id).get(attempt.id)
    if not sessions:
        return None
    last = sessions[-1]
    times = [AttemptTimes(created_at=attempt.created_at, ended_at=end, sessions=sessions)]
    if last[-1].event != "end":
        kept = [one for one in last if one.event in _KEPT][-1:] or last[:1]
        resumed = msgspec.structs.replace(kept[0], time=end, event="start")
        times.append(AttemptTimes(created_at=end, ended_at=end, sessions=[[resumed]]))
    shares = divide_time(attempt.created_at, end, times)
    return {"training_s": shares.training_s, "lost_s": shares.lost_s}


def _attempt_time_records(
    connection: Connection, trial_id: int, attempt_id: int | None = None
) -> dict[int, list[list[TimeSpent]]]:
    """Return the records of each attempt, or of a single one, by generation."""
    marks, attempts = tables.time_marks, tables.attempts
    wanted = attempts.c.trial_id == trial_id
    if attempt_id is not None:
        wanted = marks.c.attempt_id == attempt_id
    rows = connection.execute(
        select(marks)
        .join(attempts, attempts.c.id == marks.c.attempt_id)
        .where(wanted)
        .order_by(marks.c.attempt_id, marks.c.generation, marks.c.number)
    )
    sessions: dict[int, list[list[TimeSpent]]] = {}
    for (attempt_id, _), group in groupby(rows, lambda row: (row.attempt_id, row.generation)):
        records = [
            TimeSpent(
                time=row.time,
                event=row.event,
                steps_completed=row.steps_completed,
                seconds=row.seconds,
            )
            for row in group
        ]
        sessions.setdefault(attempt_id, []).append(records)
    return sessions


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, sample standard deviation, least and greatest value of `counts` curves at each `x`."""

    x: "Floats"
    means: "Floats"
    deviations: "Floats"
    lows: "Floats"
    highs: "Floats"
    counts: "NDArray[np.int64]"
    num_curves: int


@dataclass(frozen=True, slots=True)
class CurvePart:
    """Finite points of a curve in a range, long ones summed up: each stands for `sizes` points."""

    x: "Floats"
    smoothed: "Floats"
    lows: "Floats"
    highs: "Floats"
    sizes: "NDArray[np.int64]"


# A long curve is summed up at so many places for each of its group's.
_FINENESS = 8


def part_of(
    curve: Curve,
    smoothed: "Floats",
    max_points: int,
    low: float | None = None,
    high: float | None = None,
) -> CurvePart:
    """Return a curve's part for `spread_of`, which takes little memory and keeps all extremes.

    Args:
        curve: All points.
        smoothed: Their smoothed values, for means and deviations.
        max_points: Those of `spread_of`.
        low: The least x, None for all.
        high: The greatest x, None for all.
    """
    import numpy as np

    is_used = np.isfinite(curve.y) & np.isfinite(smoothed)
    known = Curve(curve.x[is_used], curve.y[is_used], np.flatnonzero(is_used))
    cut = cut_curve(known, low, high)
    x, y, smoothed = cut.x, cut.y, smoothed[cut.steps]
    if len(x) <= _FINENESS * max_points:
        return CurvePart(x, smoothed, y, y, np.ones(len(x), np.int64))
    edges = np.linspace(x[0], x[-1], _FINENESS * max_points + 1)[:-1]
    starts = np.unique(np.searchsorted(x, edges))
    sizes = np.diff(starts, append=len(x))
    places = np.add.reduceat(x, starts) / sizes
    places[0], places[-1] = x[0], x[-1]
    return CurvePart(
        places,
        np.add.reduceat(smoothed, starts) / sizes,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
        sizes,
    )


def spread_of(
    curves: Sequence[CurvePart], max_points: int, quantile: float | None = None
) -> Spread:
    """Return the spread of curves at about `max_points` places at most.

    Between its first and its last value each curve counts at every place, with the line between
    its neighbors where it has no value.

    Args:
        curves: Parts made for as many points.
        max_points: With more places than these, the span is cut into equal parts: there a curve
            counts with its mean, and with its least and greatest value.
        quantile: Below 0.5: `lows` and `highs` are this quantile of the curves' means and the
            opposite one, not the extremes.
    """
    import numpy as np

    used = [one for one in curves if len(one.x)]
    if not used:
        none = np.empty(0)
        return Spread(none, none, none, none, none, np.empty(0, np.int64), 0)
    # Most curves of a group have the same places: what depends on these is found once.
    alike: dict[bytes, list[CurvePart]] = {}
    for one in used:
        alike.setdefault(one.x.tobytes() + one.sizes.tobytes(), []).append(one)
    grid = np.unique(np.concatenate([some[0].x for some in alike.values()]))
    edges = grid
    if len(grid) > max_points:
        edges = np.linspace(grid[0], grid[-1], max_points + 1)[:-1]
        parts = np.searchsorted(edges, grid, "right") - 1
        sizes = np.bincount(parts, minlength=max_points)
        is_used = sizes > 0
        grid = (np.bincount(parts, weights=grid, minlength=max_points)[is_used]) / sizes[is_used]
        edges = edges[is_used]
    rows = [_along_grid(some, grid, edges) for some in alike.values()]
    means, lows, highs = (np.concatenate(column) for column in zip(*rows, strict=True))
    is_there = ~np.isnan(means)
    counts = is_there.sum(axis=0)
    mean = np.where(is_there, means, 0).sum(axis=0) / counts
    squares = np.where(is_there, means - mean, 0) ** 2
    deviations = np.sqrt(squares.sum(axis=0) / np.maximum(counts - 1, 1))
    if quantile is None:
        ends = np.nanmin(lows, axis=0), np.nanmax(highs, axis=0)
    else:
        # NaN sorts last.
        rising = np.sort(means, axis=0)
        ends = _quantile(rising, counts, quantile), _quantile(rising, counts, 1 - quantile)
    return Spread(grid, mean, deviations, *ends, counts, len(used))


def _quantile(rising: "Floats", counts: "NDArray[np.int64]", share: float) -> "Floats":
    """Return a quantile of the first `counts` values of each column, with linear interpolation."""
    import numpy as np

    place = (counts - 1) * share
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    columns = np.arange(len(counts))
    low, high = rising[below, columns], rising[above, columns]
    found: Floats = low + (high - low) * (place - below)
    return found


def _along_grid(
    parts: Sequence[CurvePart], grid: "Floats", edges: "Floats"
) -> "tuple[Floats, Floats, Floats]":
    """Return means, least and greatest values of curves with the same x, NaN beyond its ends."""
    import numpy as np

    x, sizes = parts[0].x, parts[0].sizes
    places = np.searchsorted(edges, x, "right") - 1
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    own = places[starts]
    gaps = np.setdiff1d(np.arange(own[0], own[-1] + 1), own)

    def along(name: str, join: Callable[["Floats"], "Floats"]) -> "Floats":
        values = np.stack([getattr(one, name) for one in parts])
        found = np.full((len(parts), len(grid)), np.nan)
        found[:, own] = join(values)
        if len(gaps):
            found[:, gaps] = [np.interp(grid[gaps], x, one) for one in values]
        return found

    total = np.add.reduceat(sizes, starts)
    return (
        along("smoothed", lambda y: np.add.reduceat(y * sizes, starts, axis=1) / total),
        along("lows", lambda y: np.minimum.reduceat(y, starts, axis=1)),
        along("highs", lambda y: np.maximum.reduceat(y, starts, axis=1)),
    )
