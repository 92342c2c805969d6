"""Metric series in pieces, read in step order: as little as a page needs, whatever there is.

A piece is a full chunk of a series, or its tail: the newest points, which lie in the series' row.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from paceline.master.store import _tables as tables
from paceline.master.store._many_ids import ids_parameter, many_ids
from paceline.master.store._point_encoding import Points, decode_points

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
        """Of two values of one metric at one step, the one with the lower precedence stands."""
        return self.attempt, self.series_id, self.chunk_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which points of a trial's metric group to read; None stands for all."""

    trial_id: int
    group: str
    key: str | None = None
    after_step: int = -1
    up_to_step: int | None = None

    def series(self) -> ColumnElement[bool]:
        """Return the condition on series that may hold such points."""
        series = tables.series.c
        condition = and_(series.trial_id == self.trial_id, series.group == self.group)
        if self.key is not None:
            condition = and_(condition, series.key == self.key)
        return and_(condition, self._overlap(series))

    def chunks(self) -> ColumnElement[bool]:
        """Return the condition on chunks that may hold such points."""
        ids = select(tables.series.c.id).where(self.series())
        return and_(tables.chunks.c.series_id.in_(ids), self._overlap(tables.chunks.c))

    def _overlap(self, columns: Any) -> ColumnElement[bool]:
        condition: ColumnElement[bool] = columns.last_step > self.after_step
        if self.up_to_step is not None:
            condition = and_(condition, columns.first_step <= self.up_to_step)
        return condition


def visible_series_limits(connection: Connection, trial_id: int) -> dict[int, int | None]:
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


def visible_series_pieces(
    connection: Connection, selection: Selection
) -> Iterator[tuple[int, list[SeriesPiece]]]:
    """Yield (first step, pieces from there on) in order of the first steps.

    Only where points lie is read here, and no further than the caller iterates; the points
    themselves are for `load_series_points`. What later attempts supersede is left out.
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
            # Steps may come out of order, so only the tail's steps tell where it begins.
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
    connection: Connection, pieces: Iterable[SeriesPiece]
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
    has_chunks = series.num_points * POINT_BYTES > func.length(series.steps)
    chunked_steps = case((has_chunks, series.steps), else_=None).label("chunked_steps")
    columns = (series.id, series.attempt, series.key, series.first_step, chunked_steps)
    return select(*columns).where(selection.series())


def _series_pieces_of_chunks(
    connection: Connection, selection: Selection, series: dict[int, SeriesPiece]
) -> Iterator[SeriesPiece]:
    chunks = tables.chunks.c
    query = (
        select(chunks.id, chunks.series_id, chunks.first_step)
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
        beyond = or_(
            chunks.first_step > last.first_step,
            and_(chunks.first_step == last.first_step, chunks.id > last.id),
        )
        rows = connection.execute(query.where(beyond)).all()


def _load_series(
    connection: Connection, table: Any, pieces: dict[int, SeriesPiece]
) -> list[tuple[SeriesPiece, Points]]:
    loaded = []
    ids = list(pieces)
    columns = table.c
    for start in range(0, len(ids), _ROWS_PER_LOAD):
        query = select(
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
