"""Lists of experiments: filters, columns by name, order, and cursors that stay true as rows change.

A column is a field of the experiment (`id`, `name` ...), `hparam:NAME` or one of
`last:GROUP/NAME`, `min:GROUP/NAME` and `max:GROUP/NAME`; these are of the best trial, or of the
first one while none is best.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Row,
    Select,
    Text,
    and_,
    case,
    cast,
    func,
    literal,
    or_,
    select,
)

from paceline.master.store import _tables as tables

_TEXT_OPERATORS = ("=", "!=", "contains")
_PRESENCE_OPERATORS = ("empty", "not empty")
_NUMBER_OPERATORS = ("<", "<=", ">", ">=", "=", "!=")

_experiments = tables.experiments
_best = tables.trials.alias("best")
_first_trial = (
    select(func.min(tables.trials.c.id))
    .where(tables.trials.c.experiment_id == _experiments.c.id)
    .scalar_subquery()
)
_best_id = func.coalesce(_experiments.c.best_trial_id, _first_trial)
_FIELDS: dict[str, ColumnElement[Any]] = {
    "id": _experiments.c.id,
    "name": func.lower(_experiments.c.name),
    "description": func.lower(_experiments.c.description),
    "state": _experiments.c.state,
    "progress": _experiments.c.progress,
    "created_at": _experiments.c.created_at,
    "ended_at": _experiments.c.ended_at,
    "best_metric": _experiments.c.best_metric,
    "searcher": _experiments.c.config["searcher"]["name"].as_string(),
    "metric": _experiments.c.config["searcher"]["metric"].as_string(),
    "num_trials": select(func.count())
    .where(tables.trials.c.experiment_id == _experiments.c.id)
    .scalar_subquery(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A column must compare to a value: a number, a text, or nothing for emptiness.

    Raises:
        ValueError: Operator and value do not go together.
    """

    column: str
    operator: str
    value: float | str | None = None

    def __post_init__(self) -> None:
        known: Sequence[str] = _PRESENCE_OPERATORS
        if isinstance(self.value, str):
            known = _TEXT_OPERATORS
        elif self.value is not None:
            known = _NUMBER_OPERATORS
        if self.operator not in known:
            raise ValueError(
                f"The operator for the value {self.value!r} must be one of {', '.join(known)}, but"
                f" got {self.operator!r}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentQuery:
    """Which experiments to list, in which order; None and empty stand for no condition."""

    states: Sequence[str] = ()
    search: str | None = None
    labels: Sequence[str] = ()
    is_archived: bool | None = None
    conditions: Sequence[Condition] = ()
    columns: Sequence[str] = ()
    sort_by: str = "id"
    is_descending: bool = True


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the list: the experiment, its values by column, and its place in the order."""

    experiment: Row[Any]
    values: dict[str, Any]
    position: tuple[Any, int]


def list_rows(
    connection: Connection,
    query: ExperimentQuery,
    *,
    after: tuple[Any, int] | None = None,
    limit: int,
) -> list[Listed]:
    """Return rows in order, those after a position.

    Raises:
        ValueError: A column is unknown.
    """
    place = _sortable(query.sort_by).label("place")
    # Found first and read whole afterwards: sorting whole rows would cost far more.
    found = _joined(select(_experiments.c.id, place), query)
    if after is not None:
        found = found.where(_beyond(place.element, after, query.is_descending))
    order = _order(place, _experiments.c.id, query.is_descending)
    page = found.order_by(*order).limit(limit).subquery()
    shown = [_told(name).label(f"column_{n}") for n, name in enumerate(query.columns)]
    statement = (
        select(_experiments, page.c.place, *shown)
        .select_from(page.join(_experiments, _experiments.c.id == page.c.id))
        .outerjoin(_best, _best.c.id == _best_id)
        .order_by(*_order(page.c.place, page.c.id, query.is_descending))
    )
    rows = connection.execute(statement)
    return [
        Listed(
            row,
            {
                name: _value(name, row._mapping[f"column_{n}"])
                for n, name in enumerate(query.columns)
            },
            (row.place, row.id),
        )
        for row in rows
    ]


def count_rows(connection: Connection, query: ExperimentQuery) -> int:
    """Return how many experiments a query lists."""
    statement = _joined(select(func.count(_experiments.c.id)), query)
    found: int = connection.execute(statement).scalar_one()
    return found


def _joined(statement: Select[Any], query: ExperimentQuery) -> Select[Any]:
    statement = statement.select_from(_experiments.outerjoin(_best, _best.c.id == _best_id))
    return statement.where(*_conditions(query))


def _order(
    place: ColumnElement[Any], identity: ColumnElement[int], is_descending: bool
) -> tuple[ColumnElement[Any], ColumnElement[int]]:
    if is_descending:
        return place.desc().nulls_last(), identity.desc()
    return place.asc().nulls_last(), identity.asc()


def _conditions(query: ExperimentQuery) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [_holds(condition) for condition in query.conditions]
    if query.states:
        found.append(_experiments.c.state.in_(query.states))
    if query.is_archived is not None:
        found.append(_experiments.c.is_archived.is_(query.is_archived))
    labels = cast(_experiments.c.labels, Text)
    # Labels are stored as a JSON list, so each one is found by its own JSON text.
    found += [labels.contains(json.dumps(label), autoescape=True) for label in query.labels]
    if query.search:
        columns = (_experiments.c.name, _experiments.c.description, labels)
        matches = [column.icontains(query.search, autoescape=True) for column in columns]
        if query.search.isascii() and query.search.isdecimal() and len(query.search) < 19:
            matches.append(_experiments.c.id == int(query.search))
        found.append(or_(*matches))
    return found


def _holds(condition: Condition) -> ColumnElement[bool]:
    operator, value = condition.operator, condition.value
    if isinstance(value, str):
        column: ColumnElement[str] = cast(_shown(condition.column), Text)
        if operator == "contains":
            return column.icontains(value, autoescape=True)
        is_equal = func.lower(column) == value.lower()
        return is_equal if operator == "=" else ~is_equal
    number = _sortable(condition.column)
    if value is None:
        return number.is_(None) if operator == "empty" else number.is_not(None)
    compared: ColumnElement[bool] = number.op(operator, is_comparison=True)(literal(value))
    return compared


def _beyond(
    place: ColumnElement[Any], after: tuple[Any, int], is_descending: bool
) -> ColumnElement[bool]:
    """Return the condition on rows behind a position; those without a value come last."""
    value, identity = after
    own_id = _experiments.c.id
    is_later = own_id < identity if is_descending else own_id > identity
    if value is None:
        return and_(place.is_(None), is_later)
    is_beyond = place < value if is_descending else place > value
    return or_(is_beyond, and_(place == value, is_later), place.is_(None))


def _sortable(name: str) -> ColumnElement[Any]:
    """Return a column's expression to sort and to compare by; NaN and text are no numbers."""
    kind, _, rest = name.partition(":")
    if name in _FIELDS:
        return _FIELDS[name]
    shown = _shown(name)
    if kind != "last":
        return shown
    text = cast(shown, Text)
    is_number = func.substr(text, 1, 1).in_(list("-0123456789"))
    return case((is_number, cast(text, Float)), else_=None)


def _told(name: str) -> ColumnElement[Any]:
    """Return a column's expression as it is told: `_value` reads it."""
    kind, _, rest = name.partition(":")
    if kind == "hparam" and rest:
        # Of two paths SQLite makes a JSON list, in which true is not 1.
        path = json_path(rest)
        return func.json_extract(_best.c.hparams, path, path)
    return _shown(name)


def _value(name: str, found: Any) -> Any:
    """Return what a column holds."""
    is_list = name.startswith("hparam:") and isinstance(found, str)
    return json.loads(found)[0] if is_list else found


def _shown(name: str) -> ColumnElement[Any]:
    """Return a column's expression to compare by, text included."""
    kind, _, rest = name.partition(":")
    if name in _FIELDS:
        return _FIELDS[name]
    if kind == "hparam" and rest:
        return func.json_extract(_best.c.hparams, json_path(rest))
    group, _, key = rest.partition("/")
    if kind not in ("last", "min", "max") or not group or not key:
        known = ", ".join(_FIELDS)
        raise ValueError(
            f"A column must be one of {known}, hparam:NAME, last:GROUP/NAME, min:GROUP/NAME or"
            f" max:GROUP/NAME, but got {name!r}."
        )
    series = tables.series.c
    of_best = (series.trial_id == _best.c.id, series.group == group, series.key == key)
    if kind == "last":
        query: Select[Any] = (
            select(series.last).where(*of_best).order_by(series.attempt.desc()).limit(1)
        )
    else:
        query = select(func.min(series.min) if kind == "min" else func.max(series.max))
        query = query.where(*of_best)
    return query.scalar_subquery()


def json_path(name: str) -> str:
    """Return SQLite's path of a hyperparameter whose nested names are joined by dots."""
    return "$" + "".join(f'."{part}"' for part in name.replace('"', "").split("."))
