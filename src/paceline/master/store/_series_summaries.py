"""Summaries of metric series: count, extremes, sum and last value; stored, read, and trimmed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from sqlalchemy import Connection, Row, select, update

from paceline.master.store import _tables as tables
from paceline.master.store._many_ids import ids_parameter, many_ids
from paceline.master.store._metric_names import attempts_with_series
from paceline.master.store._point_encoding import Points, tagged
from paceline.master.store._series_reader import (
    Selection,
    load_series_points,
    visible_series_limits,
    visible_series_pieces,
)

_POINT_COLUMNS = ("steps", "times", "value_bytes")


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


def summary_columns(summary: Summary) -> dict[str, Any]:
    """Return a summary as columns of a series' row."""
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


def stored_summary(row: Row[Any]) -> Summary:
    """Return the summary in a series' row."""
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


def read_summary(
    connection: Connection, trial_id: int, names: Mapping[str, Collection[str]] | None = None
) -> dict[str, dict[str, Summary]]:
    """Return a summary per group and metric name over the visible points, of all names or some."""
    limits = visible_series_limits(connection, trial_id)
    series = tables.series.c
    query = select(*[column for column in series if column.name not in _POINT_COLUMNS])
    query = query.where(series.trial_id == trial_id).order_by(series.attempt, series.id)
    if names is None:
        rows = connection.execute(query).all()
    else:
        # The index begins with the trial and the attempt.
        attempts = attempts_with_series(connection, trial_id)
        rows = [
            row
            for group, keys in names.items()
            for row in connection.execute(
                query.where(
                    series.attempt.in_(attempts),
                    series.group == group,
                    series.key.in_(many_ids()),
                ),
                ids_parameter(sorted(keys)),
            ).all()
        ]
    summaries: dict[int, Summary] = {}
    cut_groups: set[str] = set()
    for row in rows:
        limit = limits.get(row.attempt)
        if limit is None or row.last_step <= limit:
            summaries[row.id] = stored_summary(row)
        else:
            cut_groups.add(row.group)
    for group in cut_groups:
        _add_missing_metric_summaries(
            connection, Selection(trial_id=trial_id, group=group), summaries, names
        )
    merged: dict[str, dict[str, Summary]] = {}
    for row in rows:
        summary = summaries.get(row.id, Summary())
        by_key = merged.setdefault(row.group, {})
        if row.key in by_key:
            by_key[row.key].merge(summary)
        elif summary.count:
            by_key[row.key] = summary
    return merged


def trim_summaries(connection: Connection, trial_id: int) -> None:
    """Take what later attempts superseded out of the stored extremes and last values.

    Lists sort and filter by them; `read_summary` needs the rest as well, and reads the points.
    """
    limits = visible_series_limits(connection, trial_id)
    series = tables.series.c
    rows = connection.execute(
        select(series.id, series.group, series.attempt, series.last_step).where(
            series.trial_id == trial_id
        )
    ).all()
    cut = [
        row
        for row in rows
        if (limit := limits.get(row.attempt)) is not None and row.last_step > limit
    ]
    trimmed = {row.id: Summary() for row in rows if row not in cut}
    for group in {row.group for row in cut}:
        _add_missing_metric_summaries(
            connection, Selection(trial_id=trial_id, group=group), trimmed
        )
    for row in cut:
        summary = trimmed.get(row.id, Summary())
        connection.execute(
            update(tables.series)
            .where(series.id == row.id)
            .values(min=summary.min, max=summary.max, last=tagged(summary.last))
        )


def _add_missing_metric_summaries(
    connection: Connection,
    selection: Selection,
    summaries: dict[int, Summary],
    names: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Add the summaries of those series of a group of which only a part is visible."""
    present = set(summaries)
    keys = None if names is None else names[selection.group]
    for _, pieces in visible_series_pieces(connection, selection):
        wanted = [
            piece
            for piece in pieces
            if piece.series_id not in present and (keys is None or piece.key in keys)
        ]
        for piece, points in sorted(
            load_series_points(connection, wanted), key=lambda pair: pair[0].precedence
        ):
            summaries.setdefault(piece.series_id, Summary()).add(points)


def _extreme(choose: Any, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return right if left is None else left
    return float(choose(left, right))
