"""Order and pages of lists, by keys instead of numbers; samples of trials."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.row_ids_and_counts import (
    TRIALS,
    ids_parameter,
    many_ids,
    numbers_of,
)

_FACTOR, _RANGE = 2_654_435_761, 2**32


@dataclass(frozen=True, slots=True)
class Order:
    """Sort order of a list: the first key, then the other keys as tie-breakers.

    Only the first key may be null; rows without it come last. An index on the keys serves an order
    whose keys have one direction. Where the rest has another one, rows that share the first key
    are sorted.
    """

    keys: tuple[sa.ColumnElement[Any], ...]
    is_descending: bool = False
    is_rest_descending: bool | None = None
    """None for the direction of the first key."""
    is_missing_descending: bool | None = None
    """The direction among rows without the first key; None for the direction of the rest."""

    def read(
        self,
        connection: sa.Connection,
        query: sa.Select[Any],
        *,
        after: Sequence[Any] | None = None,
        limit: int,
    ) -> list[sa.Row[Any]]:
        """Return up to `limit` rows of a query in this order, those behind a row with keys."""
        first, rest = self.keys[0], self.keys[1:]
        terms = [
            _directed(first, self.is_descending),
            *(_directed(key, self._is_rest_descending) for key in rest),
        ]
        rows: list[sa.Row[Any]] = []
        if after is None or after[0] is not None:
            # NULL keys match no comparison, so rows without the first key are read separately.
            beyond = first.is_not(None) if after is None else self._beyond(after)
            rows += connection.execute(query.where(beyond).order_by(*terms).limit(limit)).all()
        # Rows with a NULL first key come last: they are read only if the page has room.
        if len(rows) < limit and rest and _may_be_null(first):
            descending = self._is_missing_descending
            missing: sa.ColumnElement[bool] = first.is_(None)
            if after is not None and after[0] is None:
                missing = sa.and_(missing, _beyond_page(rest, after[1:], descending))
            last = query.where(missing).order_by(*(_directed(key, descending) for key in rest))
            rows += connection.execute(last.limit(limit - len(rows))).all()
        return rows

    @property
    def _is_rest_descending(self) -> bool:
        return self.is_descending if self.is_rest_descending is None else self.is_rest_descending

    @property
    def _is_missing_descending(self) -> bool:
        is_descending = self.is_missing_descending
        return self._is_rest_descending if is_descending is None else is_descending

    def _beyond(self, place: Sequence[Any]) -> sa.ColumnElement[bool]:
        if self._is_rest_descending == self.is_descending:
            return _beyond_page(self.keys, place, self.is_descending)
        first, value = self.keys[0], place[0]
        is_among = first <= value if self.is_descending else first >= value
        is_tie_beyond = sa.and_(
            first == value, _beyond_page(self.keys[1:], place[1:], self._is_rest_descending)
        )
        # The first condition says nothing new, but lets SQLite enter an index.
        return sa.and_(
            is_among,
            sa.or_(_beyond_page(self.keys[:1], place[:1], self.is_descending), is_tie_beyond),
        )


def _may_be_null(key: sa.ColumnElement[Any]) -> bool:
    return bool(getattr(getattr(key, "element", key), "nullable", True))


def _directed(key: sa.ColumnElement[Any], is_descending: bool) -> sa.ColumnElement[Any]:
    return key.desc() if is_descending else key.asc()


def _beyond_page(
    keys: Sequence[sa.ColumnElement[Any]], place: Sequence[Any], is_descending: bool
) -> sa.ColumnElement[bool]:
    """Return the row-value comparison for rows beyond a place; an index on the keys fits."""
    own: Any = sa.tuple_(*keys) if len(keys) > 1 else keys[0]
    other: Any = tuple(place) if len(keys) > 1 else place[0]
    beyond: sa.ColumnElement[bool] = own < other if is_descending else own > other
    return beyond


_trials = tables.trials.c
_SAMPLED: sa.Select[Any] = sa.select(
    _trials.id,
    _trials.state,
    sa.type_coerce(_trials.hparams, sa.Text).label("hparams"),
    _trials.steps_completed,
    _trials.best_metric,
)


def sample_trials(
    connection: sa.Connection, experiment_id: int, limit: int, *, smaller_is_better: bool
) -> tuple[list[sa.Row[Any]], int]:
    """Return up to `limit` trials in order of id, and how many there are.

    The rows have id, state, hyperparameters as JSON, completed steps and best metric.

    Of more trials, half have the best metrics. A hash of the ids chooses the others, so that they
    are spread evenly and mostly the same at the next call.
    """
    trials = tables.trials.c
    everyone = _SAMPLED.where(trials.experiment_id == experiment_id)
    total = numbers_of(connection, TRIALS, [experiment_id]).get(experiment_id, 0)
    if total <= limit:
        return list(connection.execute(everyone.order_by(trials.id).limit(limit)).all()), total
    ids = sa.select(trials.id).where(trials.experiment_id == experiment_id)
    by_metric = Order((trials.best_metric, trials.id), not smaller_is_better)
    chosen = {row.id for row in by_metric.read(connection, ids, limit=(limit + 1) // 2)}
    share = (limit - len(chosen)) * _RANGE // total
    # Read from an index alone, in no order.
    spread = ids.where((trials.id * _FACTOR) % _RANGE < share)
    for trial_id in connection.execute(spread.limit(limit - len(chosen))).scalars():
        chosen.add(trial_id)
    rows = connection.execute(
        _SAMPLED.where(trials.id.in_(many_ids())), ids_parameter(sorted(chosen))
    )
    return sorted(rows, key=lambda row: row.id), total
