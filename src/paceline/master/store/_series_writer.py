"""Writing metric series: a summary, and the newest points as a tail until they fill a chunk."""

from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from paceline.master.store import _tables as tables
from paceline.master.store._point_encoding import (
    Points,
    decode_points,
    encode_points,
)
from paceline.master.store._series_reader import POINT_BYTES
from paceline.master.store._series_summaries import Summary, stored_summary, summary_columns

_CHUNK_POINTS = 1024


def store_columns(
    connection: Connection, trial_id: int, attempt: int, columns: dict[tuple[str, str], Points]
) -> None:
    """Append points to an attempt's series, by (group, key)."""
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
        connection.execute(insert(tables.series), inserts)
    if long:
        full += _first_chunks_of_series(connection, trial_id, attempt, long)
    if updates:
        _update_series(connection, updates)
    if full:
        connection.execute(insert(tables.chunks), full)


def _update_series(connection: Connection, updates: list[dict[str, Any]]) -> None:
    """Change rows of series: each of the dictionaries has a `row_id` and the same columns."""
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


def _first_chunks_of_series(
    connection: Connection, trial_id: int, attempt: int, long: dict[tuple[str, str], Points]
) -> list[dict[str, Any]]:
    """Return the chunks of new series that began with more points than a tail may have."""
    series = tables.series.c
    query = select(series.id, series.group, series.key).where(
        series.trial_id == trial_id, series.attempt == attempt
    )
    return [
        chunk
        for row in connection.execute(query)
        if (row.group, row.key) in long
        for chunk in _chunks_of_series(row.id, long[row.group, row.key])
    ]


def _extended_series_tail(
    row: Row[Any], points: Points
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the series' changed columns, and the chunks that the tail became if it is full."""
    summary = stored_summary(row)
    summary.add(points)
    num_points = len(row.steps) // POINT_BYTES + len(points.steps)
    column = encode_points(points)
    tail = decode_points(row.kind, row.steps, row.times, row.value_bytes)
    if column.kind == row.kind and num_points < _CHUNK_POINTS:
        tail.extend(points)
        column = encode_points(tail)
        full = None
    elif column.kind == row.kind:
        tail.extend(points)
        full = tail
        column = encode_points(Points())
    else:
        full = tail
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
        _chunk_of_series(
            series_id,
            Points(
                points.steps[start : start + _CHUNK_POINTS],
                points.times[start : start + _CHUNK_POINTS],
                points.values[start : start + _CHUNK_POINTS],
            ),
        )
        for start in range(0, len(points.steps), _CHUNK_POINTS)
    ]


def _chunk_of_series(series_id: int, points: Points) -> dict[str, Any]:
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
