"""Metrics as rows, and the metrics of a checkpoint."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from paceline._base.journal_records import MetricsReported, same_value
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.series_reader import (
    Points,
    Selection,
    SeriesPiece,
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
    connection: sa.Connection,
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
    connection: sa.Connection,
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


def iter_points(
    connection: sa.Connection, selection: Selection
) -> Iterator[tuple[int, float, Any]]:
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
    connection: sa.Connection, trial_id: int, group: str, key: str
) -> list[tuple[int, Any]]:
    """Return the visible (step, value) pairs of a metric in step order."""
    selection = Selection(trial_id=trial_id, group=group, key=key)
    return [(step, value) for step, _, value in iter_points(connection, selection)]


def metric_at(
    connection: sa.Connection, trial_id: int, group: str, key: str, step: int
) -> float | None:
    """Return the visible value of a metric at a step; None unless a finite number."""
    return metric_numbers_at(connection, trial_id, group, key, {step}).get(step)


def metric_numbers_at(
    connection: sa.Connection, trial_id: int, group: str, key: str, steps: set[int]
) -> dict[int, float]:
    """Return a metric's visible values by step, for the given steps with a finite number."""
    found = _metric_values_at(connection, trial_id, group, {(step, key) for step in steps})
    return {
        step: float(value)
        for (step, _), value in found.items()
        if type(value) in (int, float) and isfinite(value)
    }


def has_points_beyond(connection: sa.Connection, trial_id: int, step: int) -> bool:
    """Return whether any attempt of the trial reported something beyond a step."""
    query = sa.select(tables.series.c.id).where(
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
    connection: sa.Connection, trial_id: int, attempt: int, records: list[MetricsReported]
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
    connection: sa.Connection,
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
_STEPS_OF_CHECKPOINTS = sa.select(tables.checkpoints.c.steps_completed).where(
    tables.checkpoints.c.trial_id == sa.bindparam("trial"),
    tables.checkpoints.c.steps_completed.between(sa.bindparam("least"), sa.bindparam("most")),
)


def measure_checkpoints(
    connection: sa.Connection,
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
        sa.update(checkpoints)
        .where(
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.steps_completed == sa.bindparam("at_step"),
        )
        .values(metric=sa.bindparam("new_metric"))
    )
    connection.execute(
        statement, [{"at_step": at, "new_metric": values.get(at)} for at in sorted(steps)]
    )
