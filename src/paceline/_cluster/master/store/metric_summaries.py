"""Names, x axes and summaries of metrics."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids
from paceline._cluster.master.store.series_reader import (
    Points,
    Selection,
    load_series_points,
    tagged,
    visible_series_limits,
    visible_series_pieces,
)

_names = tables.metric_names.c
# Skip scan: each step jumps to the next name, past all experiments sharing this name.
_ALL_NAMES = sa.text("""
    WITH RECURSIVE
      groups (name) AS (
        SELECT min("group") FROM metric_names
        UNION ALL
        SELECT (SELECT min("group") FROM metric_names WHERE "group" > groups.name)
        FROM groups WHERE groups.name IS NOT NULL
      ),
      names ("group", key) AS (
        SELECT name, (SELECT min(key) FROM metric_names WHERE "group" = name)
        FROM groups WHERE name IS NOT NULL
        UNION ALL
        SELECT "group", (
          SELECT min(key) FROM metric_names m WHERE m."group" = names."group" AND m.key > names.key
        )
        FROM names WHERE key IS NOT NULL
      )
    SELECT "group", key FROM names WHERE key IS NOT NULL ORDER BY "group", key
""")


class XAxes(msgspec.Struct, frozen=True):
    """Metrics along which others of a group are to be drawn, by name and by what names begin with.

    None stands for the steps.
    """

    group: str
    names: dict[str, str | None] = {}
    prefixes: dict[str, str | None] = {}

    def of(self, group: str, name: str) -> str | None:
        """Return the x axis of a metric; the longest of several prefixes counts."""
        found = self.names.get(name)
        if group != self.group:
            return None
        if name not in self.names:
            begins = max(filter(name.startswith, self.prefixes), key=len, default=None)
            found = None if begins is None else self.prefixes[begins]
        return None if found == name else found


def all_metric_names(connection: sa.Connection) -> list[tuple[str, str]]:
    """Return (group, name) of the metrics of all experiments, sorted."""
    return [(row.group, row.key) for row in connection.execute(_ALL_NAMES)]


def metric_names(
    connection: sa.Connection,
    experiment_id: int,
    *,
    after: tuple[str, str] = ("", ""),
    limit: int | None = None,
) -> list[tuple[str, str]]:
    """Return (group, name) of the metrics of an experiment beyond `after`, sorted."""
    query = sa.select(_names.group, _names.key).where(
        _names.experiment_id == experiment_id, sa.tuple_(_names.group, _names.key) > after
    )
    query = query.order_by(_names.group, _names.key).limit(limit)
    return [(row.group, row.key) for row in connection.execute(query).all()]


def read_x_axes(connection: sa.Connection, trial_ids: Collection[int]) -> dict[int, XAxes]:
    """Return the x axes that the code of trials has chosen, for those that have chosen any."""
    trials, documents = tables.trials.c, tables.documents.c
    chosen = documents.content["x_axes"]
    query = (
        sa.select(trials.id, chosen)
        .join(tables.documents, documents.experiment_id == trials.experiment_id)
        .where(trials.id.in_(many_ids()))
    )
    found = connection.execute(query, ids_parameter(trial_ids))
    return {id: msgspec.convert(axes, XAxes) for id, axes in found if axes is not None}


def num_metric_names(connection: sa.Connection, trial_id: int, group: str, *, at_most: int) -> int:
    """Return the largest number of names in a group over the attempts of a trial."""
    series = tables.series.c
    most = 0
    for number in attempts_with_series(connection, trial_id):
        keys = sa.select(series.key).where(
            series.trial_id == trial_id, series.attempt == number, series.group == group
        )
        found = connection.scalar(
            sa.select(sa.func.count()).select_from(keys.limit(at_most).subquery())
        )
        most = max(most, found or 0)
    return most


def attempts_with_series(connection: sa.Connection, trial_id: int) -> list[int]:
    """Return the numbers of the trial's attempts with reported metrics, newest first."""
    attempt = tables.series.c.attempt
    query = sa.select(attempt).where(tables.series.c.trial_id == trial_id)
    query = query.order_by(attempt.desc()).limit(1)
    found: list[int] = []
    number = connection.scalar(query)
    # The index skips the names of each attempt.
    while number is not None:
        found.append(number)
        number = connection.scalar(query.where(attempt < number))
    return found


MAX_GROUPS = 1000
MAX_NAMES = 1000
"""Limits on the listed groups and names of a trial; each group shows at least one name."""


def first_metric_names(
    connection: sa.Connection, trial_id: int
) -> tuple[dict[str, set[str]], bool]:
    """Return the first names of a trial's metrics by group, and whether there are more.

    Reading grows with the result.
    """
    series = tables.series.c
    found: dict[str, set[str]] = {}
    num_found, has_more = 0, False
    for attempt in attempts_with_series(connection, trial_id):
        of_attempt = (series.trial_id == trial_id, series.attempt == attempt)
        groups = sa.select(series.group).where(*of_attempt).order_by(series.group).limit(1)
        group = connection.scalar(groups)
        while group is not None:
            if group not in found and len(found) >= MAX_GROUPS:
                return found, True
            names = sa.select(series.key).where(*of_attempt, series.group == group)
            most = max(MAX_NAMES - num_found, 1)
            keys = connection.scalars(names.order_by(series.key).limit(most + 1)).all()
            has_more = has_more or len(keys) > most
            own = found.setdefault(group, set())
            num_found -= len(own)
            own.update(keys[:most])
            num_found += len(own)
            group = connection.scalar(groups.where(series.group > group))
    return found, has_more


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


def stored_summary(row: sa.Row[Any]) -> Summary:
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
    connection: sa.Connection, trial_id: int, names: Mapping[str, Collection[str]] | None = None
) -> dict[str, dict[str, Summary]]:
    """Return a summary per group and metric name over the visible points, of all names or some."""
    limits = visible_series_limits(connection, trial_id)
    series = tables.series.c
    query = sa.select(*[column for column in series if column.name not in _POINT_COLUMNS])
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


def trim_summaries(connection: sa.Connection, trial_id: int, since: int | None = None) -> None:
    """Exclude superseded points from the stored extremes and last values of a trial's series.

    Lists sort and filter by them; `read_summary` needs the rest as well, and reads the points.

    Args:
        connection: The connection of a write job.
        trial_id: The trial.
        since: A step beyond which points were excluded before and may count again.
    """
    limits = visible_series_limits(connection, trial_id)
    series = tables.series.c
    rows = connection.execute(
        sa.select(series.id, series.group, series.attempt, series.last_step).where(
            series.trial_id == trial_id
        )
    ).all()
    cut = [
        row
        for row in rows
        if ((limit := limits.get(row.attempt)) is not None and row.last_step > limit)
        or (since is not None and row.last_step > since)
    ]
    trimmed = {row.id: Summary() for row in rows if row not in cut}
    for group in {row.group for row in cut}:
        _add_missing_metric_summaries(
            connection, Selection(trial_id=trial_id, group=group), trimmed
        )
    for row in cut:
        summary = trimmed.get(row.id, Summary())
        connection.execute(
            sa.update(tables.series)
            .where(series.id == row.id)
            .values(min=summary.min, max=summary.max, last=tagged(summary.last))
        )


def _add_missing_metric_summaries(
    connection: sa.Connection,
    selection: Selection,
    summaries: dict[int, Summary],
    names: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Add the summaries of a group's partly visible series, computed from their points."""
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
