"""Pages of a list by the keys of the last row, so that a page costs the same wherever it begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, or_, tuple_

Place: TypeAlias = Sequence[Any] | int
"""The keys of the row before a page; or the number of rows before it, as earlier cursors say."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a list: by the first key, and by the rest among those that share it.

    Only the first key may be null; rows without it come last. An index on the keys serves an order
    whose keys have one direction. Where the rest has another one, rows that share the first key
    are sorted.
    """

    keys: tuple[ColumnElement[Any], ...]
    is_descending: bool = False
    is_rest_descending: bool | None = None
    """None for the direction of the first key."""
    is_missing_descending: bool | None = None
    """The direction among rows without the first key; None for that of the rest."""

    def read(
        self,
        connection: Connection,
        query: Select[Any],
        *,
        after: Place | None = None,
        limit: int,
    ) -> list[Row[Any]]:
        """Return up to `limit` rows of a query in this order, those behind a place."""
        first, rest = self.keys[0], self.keys[1:]
        terms = [
            _directed(first, self.is_descending),
            *(_directed(key, self._is_rest_descending) for key in rest),
        ]
        if isinstance(after, int):
            terms[0] = terms[0].nulls_last()
            return [*connection.execute(query.order_by(*terms).offset(after).limit(limit)).all()]
        rows: list[Row[Any]] = []
        if after is None or after[0] is not None:
            # Those without the first key are no answer to a comparison.
            beyond = first.is_not(None) if after is None else self._beyond(after)
            rows += connection.execute(query.where(beyond).order_by(*terms).limit(limit)).all()
        if len(rows) < limit and rest and _may_be_null(first):
            descending = self._is_missing_descending
            missing: ColumnElement[bool] = first.is_(None)
            if after is not None and after[0] is None:
                missing = and_(missing, _beyond_page(rest, after[1:], descending))
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

    def _beyond(self, place: Sequence[Any]) -> ColumnElement[bool]:
        if self._is_rest_descending == self.is_descending:
            return _beyond_page(self.keys, place, self.is_descending)
        first, value = self.keys[0], place[0]
        is_among = first <= value if self.is_descending else first >= value
        is_tie_beyond = and_(
            first == value, _beyond_page(self.keys[1:], place[1:], self._is_rest_descending)
        )
        # The first condition says nothing new, but an index can be entered by it.
        return and_(
            is_among, or_(_beyond_page(self.keys[:1], place[:1], self.is_descending), is_tie_beyond)
        )


def _may_be_null(key: ColumnElement[Any]) -> bool:
    return bool(getattr(getattr(key, "element", key), "nullable", True))


def _directed(key: ColumnElement[Any], is_descending: bool) -> ColumnElement[Any]:
    return key.desc() if is_descending else key.asc()


def _beyond_page(
    keys: Sequence[ColumnElement[Any]], place: Sequence[Any], is_descending: bool
) -> ColumnElement[bool]:
    """Compare as rows of values, which an index on the keys can find."""
    own: Any = tuple_(*keys) if len(keys) > 1 else keys[0]
    other: Any = tuple(place) if len(keys) > 1 else place[0]
    beyond: ColumnElement[bool] = own < other if is_descending else own > other
    return beyond
