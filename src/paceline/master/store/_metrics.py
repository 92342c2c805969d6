"""Metrics: written in columns per series, read as rows with superseded points left out.

An attempt that started from step s supersedes what earlier attempts reported beyond s. Nothing is
rewritten for that: each attempt has its own series, and views cut the earlier ones at s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from paceline.journal import MetricsReported, same_value
from paceline.master.store import _tables as tables
from paceline.master.store._columns import (
    Points,
    Summary,
    decode_points,
    encode_points,
    tagged,
)

_CHUNK_POINTS = 1024
_POINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Conflict:
    """A value that differs from the one an earlier attempt reported at the same step."""

    group: str
    step: int
    key: str
    kept: Any
    refused: Any


@dataclass(frozen=True, slots=True)
class MetricRow:
    """All visible values of one group at one step."""

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
    """Store reports of one attempt.

    A report at or before the step from which the attempt resumed must agree with what is there:
    identical values are dropped, others are returned as conflicts, and new keys are stored.
    """
    columns: dict[tuple[str, str], Points] = {}
    conflicts: list[Conflict] = []
    for record in records:
        metrics = record.metrics
        if attempt > 1 and record.steps_completed <= resumed_steps:
            metrics = _without_known(connection, trial_id, attempt, record, conflicts)
        for key, value in metrics.items():
            points = columns.get((record.group, key))
            if points is None:
                points = columns[record.group, key] = Points()
            points.steps.append(record.steps_completed)
            points.times.append(record.time)
            points.values.append(value)
    if columns:
        _store_columns(connection, trial_id, attempt, columns)
    return conflicts


def visible_limits(connection: Connection, trial_id: int) -> dict[int, int | None]:
    """Return the last visible step of each attempt; None where nothing is superseded."""
    rows = connection.execute(
        select(tables.attempts.c.number, tables.attempts.c.resumed_steps)
        .where(tables.attempts.c.trial_id == trial_id, tables.attempts.c.started_at.is_not(None))
        .order_by(tables.attempts.c.number.desc())
    )
    limits: dict[int, int | None] = {}
    limit: int | None = None
    for number, resumed_steps in rows:
        limits[number] = limit
        limit = resumed_steps if limit is None else min(limit, resumed_steps)
    return limits


def read_rows(
    connection: Connection,
    trial_id: int,
    group: str,
    *,
    after_step: int = -1,
    limit: int | None = None,
) -> list[MetricRow]:
    """Return visible rows in step order, those beyond `after_step`, at most `limit`."""
    rows: dict[int, MetricRow] = {}
    for series, points in _visible_points(connection, trial_id, group, after_step=after_step):
        for step, time, value in zip(points.steps, points.times, points.values, strict=True):
            row = rows.get(step)
            if row is None:
                rows[step] = MetricRow(step, series.attempt, time, {series.key: value})
            else:
                row.metrics.setdefault(series.key, value)
    ordered = [rows[step] for step in sorted(rows)]
    return ordered if limit is None else ordered[:limit]


def read_series(
    connection: Connection, trial_id: int, group: str, key: str
) -> list[tuple[int, Any]]:
    """Return the visible (step, value) pairs of one metric in step order."""
    values: dict[int, Any] = {}
    for _, points in _visible_points(connection, trial_id, group, key=key):
        for step, value in zip(points.steps, points.values, strict=True):
            values.setdefault(step, value)
    return sorted(values.items())


def read_summary(connection: Connection, trial_id: int) -> dict[str, dict[str, Summary]]:
    """Return a summary per group and metric name over the visible points."""
    limits = visible_limits(connection, trial_id)
    merged: dict[str, dict[str, Summary]] = {}
    for series in _series_rows(connection, trial_id):
        limit = limits.get(series.attempt)
        if limit is None or series.last_step <= limit:
            summary = _stored_summary(series)
        else:
            summary = Summary()
            summary.add(_cut(_all_points(connection, series, -1), -1, limit))
        by_key = merged.setdefault(series.group, {})
        if series.key in by_key:
            by_key[series.key].merge(summary)
        elif summary.count:
            by_key[series.key] = summary
    return merged


def has_points_beyond(connection: Connection, trial_id: int, step: int) -> bool:
    """Tell whether any attempt of the trial reported something beyond a step."""
    query = select(tables.series.c.id).where(
        tables.series.c.trial_id == trial_id, tables.series.c.last_step > step
    )
    return connection.execute(query.limit(1)).first() is not None


def _without_known(
    connection: Connection,
    trial_id: int,
    attempt: int,
    record: MetricsReported,
    conflicts: list[Conflict],
) -> dict[str, Any]:
    step = record.steps_completed
    known: dict[str, Any] = {}
    for series, points in _visible_points(
        connection, trial_id, record.group, after_step=step - 1, up_to_step=step
    ):
        if series.attempt < attempt and points.values:
            known.setdefault(series.key, points.values[-1])
    fresh = {}
    for key, value in record.metrics.items():
        if key not in known:
            fresh[key] = value
        elif not same_value(tagged(known[key]), value):
            conflicts.append(Conflict(record.group, step, key, known[key], value))
    return fresh


def _store_columns(
    connection: Connection, trial_id: int, attempt: int, columns: dict[tuple[str, str], Points]
) -> None:
    existing = {
        (row.group, row.key): row
        for row in connection.execute(
            select(tables.series).where(
                tables.series.c.trial_id == trial_id, tables.series.c.attempt == attempt
            )
        )
        if (row.group, row.key) in columns
    }
    inserts: list[dict[str, Any]] = []
    updates: list[dict[str, Any]] = []
    full: list[dict[str, Any]] = []
    for (group, key), points in columns.items():
        points.decode_non_finite()
        row = existing.get((group, key))
        if row is None:
            identity = {"trial_id": trial_id, "attempt": attempt, "group": group, "key": key}
            inserts.append(identity | _new_tail(points, Summary()))
        else:
            changed, chunk = _extended_tail(row, points)
            updates.append({"row_id": row.id, **changed})
            if chunk is not None:
                full.append(chunk)
    if inserts:
        connection.execute(insert(tables.series), inserts)
    if updates:
        names = [name for name in updates[0] if name != "row_id"]
        statement = update(tables.series).where(tables.series.c.id == bindparam("row_id"))
        # Bound under other names, as SQLAlchemy keeps column names to itself in an update.
        connection.execute(
            statement.values({name: bindparam(f"new_{name}") for name in names}),
            [
                {"row_id": row["row_id"], **{f"new_{name}": row[name] for name in names}}
                for row in updates
            ],
        )
    if full:
        connection.execute(insert(tables.chunks), full)


def _new_tail(points: Points, summary: Summary) -> dict[str, Any]:
    summary.add(points)
    column = encode_points(points)
    return {
        "kind": column.kind,
        "steps": column.steps,
        "times": column.times,
        "value_bytes": column.values,
        **_summary_columns(summary),
    }


def _extended_tail(row: Row[Any], points: Points) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the series' changed columns, and a chunk if the tail became full."""
    summary = _stored_summary(row)
    summary.add(points)
    num_points = len(row.steps) // _POINT_BYTES + len(points.steps)
    column = encode_points(points)
    tail = decode_points(row.kind, row.steps, row.times, row.value_bytes)
    if column.kind == row.kind and num_points < _CHUNK_POINTS:
        tail.extend(points)
        column = encode_points(tail)
        chunk = None
    elif column.kind == row.kind:
        tail.extend(points)
        chunk = _chunk(row.id, tail)
        column = encode_points(Points())
    else:
        chunk = _chunk(row.id, tail) if tail.steps else None
    kind = column.kind if column.steps else row.kind
    return {
        "kind": kind,
        "steps": column.steps,
        "times": column.times,
        "value_bytes": column.values if column.steps else b"",
        **_summary_columns(summary),
    }, chunk


def _chunk(series_id: int, points: Points) -> dict[str, Any]:
    column = encode_points(points)
    return {
        "series_id": series_id,
        "first_step": min(points.steps),
        "last_step": max(points.steps),
        "kind": column.kind,
        "steps": column.steps,
        "times": column.times,
        "value_bytes": column.values,
    }


def _summary_columns(summary: Summary) -> dict[str, Any]:
    return {
        "num_points": summary.count,
        "num_numbers": summary.num_numbers,
        "sum": summary.sum,
        "min": summary.min,
        "max": summary.max,
        "last": tagged(summary.last),
        "first_step": summary.first_step,
        "last_step": summary.last_step,
    }


def _stored_summary(row: Row[Any]) -> Summary:
    return Summary(
        count=row.num_points,
        num_numbers=row.num_numbers,
        # SQLite keeps NaN, the sum of infinities that sums overflowed to, as null.
        sum=nan if row.sum is None else row.sum,
        min=row.min,
        max=row.max,
        last=row.last,
        first_step=row.first_step,
        last_step=row.last_step,
    )


def _series_rows(
    connection: Connection, trial_id: int, group: str | None = None, key: str | None = None
) -> list[Row[Any]]:
    query = select(tables.series).where(tables.series.c.trial_id == trial_id)
    if group is not None:
        query = query.where(tables.series.c.group == group)
    if key is not None:
        query = query.where(tables.series.c.key == key)
    order = query.order_by(tables.series.c.attempt, tables.series.c.id)
    return list(connection.execute(order))


def _visible_points(
    connection: Connection,
    trial_id: int,
    group: str,
    *,
    key: str | None = None,
    after_step: int = -1,
    up_to_step: int | None = None,
) -> list[tuple[Row[Any], Points]]:
    limits = visible_limits(connection, trial_id)
    found = []
    for series in _series_rows(connection, trial_id, group, key):
        limit = limits.get(series.attempt)
        if up_to_step is not None:
            limit = up_to_step if limit is None else min(limit, up_to_step)
        if series.last_step <= after_step or (limit is not None and series.first_step > limit):
            continue
        points = _cut(_all_points(connection, series, after_step), after_step, limit)
        found.append((series, points))
    return found


def _all_points(connection: Connection, series: Row[Any], after_step: int) -> Points:
    points = Points()
    if series.num_points * _POINT_BYTES > len(series.steps):
        for chunk in connection.execute(
            select(tables.chunks)
            .where(tables.chunks.c.series_id == series.id, tables.chunks.c.last_step > after_step)
            .order_by(tables.chunks.c.id)
        ):
            points.extend(decode_points(chunk.kind, chunk.steps, chunk.times, chunk.value_bytes))
    points.extend(decode_points(series.kind, series.steps, series.times, series.value_bytes))
    return points


def _cut(points: Points, after_step: int, limit: int | None) -> Points:
    if after_step < 0 and limit is None:
        return points
    kept = [
        index
        for index, step in enumerate(points.steps)
        if step > after_step and (limit is None or step <= limit)
    ]
    return Points(
        [points.steps[i] for i in kept],
        [points.times[i] for i in kept],
        [points.values[i] for i in kept],
    )
