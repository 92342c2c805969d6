"""Writing of metric series: chunks and tails."""

from operator import add
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.metric_summaries import (
    Summary,
    XAxes,
    stored_summary,
    summary_columns,
)
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids
from paceline._cluster.master.store.series_reader import (
    MIXED,
    POINT_BYTES,
    PointColumn,
    Points,
    decode_points,
    encode_points,
)

NO_AXES = XAxes(group="")


_CHUNK_POINTS = 1024
# Made once: for each report they cost more to make than to run.
_series = tables.series.c
_OF_KEYS = sa.select(tables.series).where(
    _series.trial_id == sa.bindparam("of_trial"),
    _series.attempt == sa.bindparam("of_attempt"),
    _series.group == sa.bindparam("of_group"),
    _series.key.in_(many_ids()),
)
_CHANGE = sa.update(tables.series).where(_series.id == sa.bindparam("row_id"))


def store_columns(
    connection: sa.Connection, trial_id: int, attempt: int, columns: dict[tuple[str, str], Points]
) -> None:
    """Append points to an attempt's series, by (group, key)."""
    groups: dict[str, list[str]] = {}
    place = {"of_trial": trial_id, "of_attempt": attempt}
    for group, key in columns:
        groups.setdefault(group, []).append(key)
    # Only these: a trial may have a hundred thousand others.
    existing = {
        (group, row.key): row
        for group, keys in groups.items()
        for row in connection.execute(_OF_KEYS, ids_parameter(keys) | place | {"of_group": group})
    }
    inserts: list[dict[str, Any]] = []
    updates: list[dict[str, Any]] = []
    full: list[dict[str, Any]] = []
    long: dict[tuple[str, str], Points] = {}
    for (group, key), points in columns.items():
        points.decode_non_finite()
        row = existing.get((group, key))
        if row is None:
            identity = {"trial_id": trial_id, "attempt": attempt, "group": group, "key": key}
            inserts.append(identity | _new_series_tail(points, Summary()))
            if len(points.steps) >= _CHUNK_POINTS:
                long[group, key] = points
        else:
            changed, chunks = _extended_series_tail(row, points)
            updates.append({"row_id": row.id, **changed})
            full += chunks
    if inserts:
        connection.execute(sa.insert(tables.series), inserts)
    if long:
        full += _first_series_chunks(connection, trial_id, attempt, long)
    if updates:
        connection.execute(_CHANGE, updates)
    if full:
        connection.execute(sa.insert(tables.chunks), full)


def _new_series_tail(points: Points, summary: Summary) -> dict[str, Any]:
    summary.add(points)
    column = encode_points(points)
    is_tail = len(points.steps) < _CHUNK_POINTS
    return {
        "kind": column.kind,
        "steps": column.steps if is_tail else b"",
        "times": column.times if is_tail else b"",
        "value_bytes": column.values if is_tail else b"",
        **summary_columns(summary),
    }


def _first_series_chunks(
    connection: sa.Connection, trial_id: int, attempt: int, long: dict[tuple[str, str], Points]
) -> list[dict[str, Any]]:
    """Return the chunks of new series too long for a tail."""
    series = tables.series.c
    query = sa.select(series.id, series.group, series.key).where(
        series.trial_id == trial_id, series.attempt == attempt
    )
    return [
        chunk
        for row in connection.execute(query)
        if (row.group, row.key) in long
        for chunk in _chunks_of_series(row.id, long[row.group, row.key])
    ]


def _extended_series_tail(
    row: sa.Row[Any], points: Points
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the changed columns of the series, and the chunks made from a full tail."""
    summary = stored_summary(row)
    summary.add(points)
    is_tail = len(row.steps) // POINT_BYTES + len(points.steps) < _CHUNK_POINTS
    column = encode_points(points)
    full: Points | None = None
    if column.kind == row.kind != MIXED and is_tail:
        old = (row.steps, row.times, row.value_bytes)
        column = PointColumn(row.kind, *map(add, old, column[1:]))
    else:
        tail = decode_points(row.kind, row.steps, row.times, row.value_bytes)
        # Tails hold a single value kind: points of another kind turn the tail into a chunk.
        if column.kind == row.kind:
            tail.extend(points)
            column = encode_points(tail if is_tail else Points())
        full = None if column.kind == row.kind and is_tail else tail
    kind = column.kind if column.steps else row.kind
    return {
        "kind": kind,
        "steps": column.steps,
        "times": column.times,
        "value_bytes": column.values if column.steps else b"",
        **summary_columns(summary),
    }, [] if full is None else _chunks_of_series(row.id, full)


def _chunks_of_series(series_id: int, points: Points) -> list[dict[str, Any]]:
    """Cut points into chunks: a large request must not make pages large for ever."""
    return [
        _series_chunk(
            series_id,
            Points(
                points.steps[start : start + _CHUNK_POINTS],
                points.times[start : start + _CHUNK_POINTS],
                points.values[start : start + _CHUNK_POINTS],
            ),
        )
        for start in range(0, len(points.steps), _CHUNK_POINTS)
    ]


def _series_chunk(series_id: int, points: Points) -> dict[str, Any]:
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
