"""Lists of experiments: filters, columns, cached names."""

import json
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from pydantic_core import to_json

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    PROJECT_NAME,
    EncodingCache,
    experiment_model,
)
from paceline._cluster.master.store.database import load_json
from paceline._cluster.master.store.list_pages import Order
from paceline._cluster.master.store.row_ids_and_counts import (
    ARCHIVED,
    EXPERIMENTS,
    NO_COUNTS,
    TRIALS,
    ExperimentCounts,
    experiment_counts,
    ids_parameter,
    many_ids,
    number_by_state,
)
from paceline._cluster.master.store.series_reader import tagged
from paceline.config._environment_and_secrets import hide_secrets

# Whoever overrides the hyperparameters of an experiment that is continued waits so long at most.
_FRESH_S = 5.0


class NameCache:
    """Cache of the names from the last call; several threads may gather them at once."""

    def __init__(self) -> None:
        self._kept: tuple[Hashable, float, list[str]] | None = None

    def read(self, state: Hashable, gather: Callable[[], list[str]]) -> list[str]:
        """Return the kept names if they are of this state and some seconds old at most."""
        kept, now = self._kept, time.monotonic()
        if kept is not None and kept[0] == state and now < kept[1] + _FRESH_S:
            return kept[2]
        names = gather()
        self._kept = (state, now, names)
        return names


_TEXT_OPERATORS = ("=", "!=", "contains")
_PRESENCE_OPERATORS = ("empty", "not empty")
_NUMBER_OPERATORS = ("<", "<=", ">", ">=", "=", "!=")

# A pattern of SQLite has 50,000 bytes at most; each character may need four, and an escape.
LONGEST_TEXT = 1000

_experiments = tables.experiments
BEST = tables.trials.alias("best")
_any_trial = tables.trials.alias("any_trial")
_first_trial = (
    sa.select(tables.trials.c.id)
    .where(tables.trials.c.experiment_id == _experiments.c.id)
    .order_by(tables.trials.c.id)
    .limit(1)
    .scalar_subquery()
)
_best_id = sa.func.coalesce(_experiments.c.best_trial_id, _first_trial)
_FIELDS: dict[str, sa.ColumnElement[Any]] = {
    "id": _experiments.c.id,
    # Collation of the index `ix_experiments_name`, so that sorting by name uses the index.
    "name": sa.collate(_experiments.c.name, "NOCASE"),
    "description": sa.func.lower(_experiments.c.description),
    "state": _experiments.c.state,
    "progress": _experiments.c.progress,
    "created_at": _experiments.c.created_at,
    "ended_at": _experiments.c.ended_at,
    "best_metric": _experiments.c.best_metric,
    "owner": _experiments.c.owner,
    "project": PROJECT_NAME,
    "searcher": _experiments.c.config["searcher"]["name"].as_string(),
    "metric": _experiments.c.config["searcher"]["metric"].as_string(),
    "kind": sa.func.coalesce(
        _experiments.c.config["interactive"]["kind"].as_string(), sa.literal("training")
    ),
    "num_trials": sa.select(sa.func.coalesce(sa.func.sum(tables.counts.c.number), 0))
    .where(tables.counts.c.kind == TRIALS, tables.counts.c.experiment_id == _experiments.c.id)
    .scalar_subquery(),
}

JSON_COLUMNS = ("config", "labels", "warnings")
# Columns shown in a list: the others (source changes, submitted configuration) may be large.
_LISTED: sa.Select[Any] = sa.select(
    *(
        _experiments.c[name]
        for name in (
            *("id", "name", "description", "state", "progress", "created_at", "ended_at", "error"),
            *("best_trial_id", "best_metric", "parent_trial_id", "forked_from", "is_archived"),
            *("external_id", "external_path", "context_digest", "num_records_lost", "search_end"),
            "owner",
        )
    ),
    PROJECT_NAME.label("project"),
    *(sa.type_coerce(_experiments.c[name], sa.Text).label(name) for name in JSON_COLUMNS),
).where(_experiments.c.id.in_(many_ids()))


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
    """Filters, columns and sort order of an experiment list; None and empty mean no condition."""

    states: Sequence[str] = ()
    search: str | None = None
    labels: Sequence[str] = ()
    is_archived: bool | None = None
    owner: str | None = None
    project: str | None = None
    conditions: Sequence[Condition] = ()
    only: Sequence[int] | None = None
    within: sa.Select[Any] | None = None
    """The query for the ids of those that may be listed."""
    columns: Sequence[str] = ()
    sort_by: str = "id"
    is_descending: bool = True


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the list: the experiment, its values by column, and its place in the order.

    Columns stored as JSON are text in `experiment`.
    """

    experiment: sa.Row[Any]
    values: dict[str, Any]
    position: tuple[Any, int]


def list_rows(
    connection: sa.Connection,
    query: ExperimentQuery,
    *,
    after: Sequence[Any] | None = None,
    limit: int,
) -> list[Listed]:
    """Return rows in order, those after a position.

    Raises:
        ValueError: A column is unknown.
    """
    place = sortable_column(query.sort_by)
    # Found first and read whole afterwards: sorting whole rows would cost far more.
    found = _joined(sa.select(_experiments.c.id, place.label("place")), query)
    order = Order((place, _experiments.c.id), query.is_descending)
    page = order.read(connection, found, after=after, limit=limit)
    statement = _LISTED
    if query.columns:
        shown = [_told_column(name).label(f"column_{n}") for n, name in enumerate(query.columns)]
        statement = statement.add_columns(*shown)
        if _names_best(query.columns):
            statement = _with_best(statement)
    ids = ids_parameter(one.id for one in page)
    rows = {row.id: row for row in connection.execute(statement, ids).all()}
    return [
        Listed(
            rows[one.id],
            {
                name: _column_value(name, rows[one.id]._mapping[f"column_{n}"])
                for n, name in enumerate(query.columns)
            },
            (one.place, one.id),
        )
        for one in page
    ]


def rows_of(connection: sa.Connection, ids: Iterable[int]) -> list[Listed]:
    """Return the experiments with some ids, without further columns, by id."""
    rows = connection.execute(_LISTED.order_by(_experiments.c.id), ids_parameter(ids)).all()
    return [Listed(row, {}, (row.id, row.id)) for row in rows]


def matching_ids(query: ExperimentQuery) -> sa.Select[Any]:
    """Return the query for the ids of all experiments that a query lists, in no order.

    Raises:
        ValueError: A column is unknown.
    """
    return _joined(sa.select(_experiments.c.id), query)


def matching_trials(conditions: Sequence[Condition]) -> sa.Select[Any]:
    """Return the query for the ids of all trials that meet conditions, in no order.

    Columns of the best trial are the trial's own, those of its experiment stay.

    Raises:
        ValueError: A column is unknown.
    """
    own = {"best_metric": BEST.c.best_metric, "progress": BEST.c.progress}
    joined = BEST.join(_experiments, _experiments.c.id == BEST.c.experiment_id)
    held = (
        _compares(one, own[one.column], own[one.column])
        if one.column in own
        else _compares(one, _shown_column(one.column), sortable_column(one.column))
        for one in conditions
    )
    return sa.select(BEST.c.id).select_from(joined).where(*held)


def count_rows(connection: sa.Connection, query: ExperimentQuery) -> int:
    """Return how many experiments a query lists."""
    is_narrowed = query.search or query.labels or query.conditions or query.owner or query.project
    if not is_narrowed and query.within is None and query.only is None:
        return _kept_count(connection, query)
    statement = _joined(sa.select(sa.func.count(_experiments.c.id)), query)
    found: int = connection.execute(statement).scalar_one()
    return found


def _kept_count(connection: sa.Connection, query: ExperimentQuery) -> int:
    """Return how many there are in some states, in the archive or not, without counting them."""
    numbers = number_by_state(connection, ARCHIVED if query.is_archived else EXPERIMENTS)
    if query.is_archived is False:
        for state, number in number_by_state(connection, ARCHIVED).items():
            numbers[state] -= number
    return sum(n for state, n in numbers.items() if not query.states or state in query.states)


def _joined(statement: sa.Select[Any], query: ExperimentQuery) -> sa.Select[Any]:
    compared = (one.column for one in query.conditions if not _is_hparam(one.column))
    names = [query.sort_by, *compared]
    if _names_best(names):
        statement = _with_best(statement)
    return statement.where(*_conditions(query))


def _names_best(columns: Sequence[str]) -> bool:
    """Return whether any of the columns is of the best trial."""
    return any(name not in _FIELDS for name in columns)


def _with_best(statement: sa.Select[Any]) -> sa.Select[Any]:
    return statement.select_from(_experiments.outerjoin(BEST, BEST.c.id == _best_id))


def _conditions(query: ExperimentQuery) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = [
        _condition_holds(condition) for condition in query.conditions
    ]
    if query.states:
        found.append(_experiments.c.state.in_(query.states))
    if query.is_archived is not None:
        found.append(_experiments.c.is_archived.is_(query.is_archived))
    if query.owner is not None:
        found.append(_experiments.c.owner == query.owner)
    if query.project is not None:
        found.append(PROJECT_NAME.in_([query.project]))
    labels = sa.cast(_experiments.c.labels, sa.Text)
    # Labels are stored as a JSON list, so each one is found by its own JSON text.
    found += [column_contains(labels, json.dumps(label)) for label in query.labels]
    if query.only is not None:
        found.append(_experiments.c.id.in_(query.only))
    if query.within is not None:
        found.append(_experiments.c.id.in_(query.within))
    if query.search:
        found.append(_experiments.c.id.in_(found_by_text(query.search)))
    return found


def found_by_text(text: str) -> sa.Select[Any]:
    """Return the ids of experiments with a matching name, description, label list or id."""
    table = _experiments.alias()
    columns = (table.c.name, table.c.description, sa.cast(table.c.labels, sa.Text))
    matches = [column_contains(column, text) for column in columns]
    if text.isascii() and text.isdecimal() and len(text) < 19:
        matches.append(table.c.id == int(text))
    return sa.select(table.c.id).where(sa.or_(*matches))


def column_contains(column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[bool]:
    """Return whether a column has a text; SQLite's LIKE takes a-z and A-Z for the same.

    Raises:
        ValueError: SQLite cannot look for such a text.
    """
    if len(text) > LONGEST_TEXT or "\0" in text:
        raise ValueError(
            f"A text to look for must have at most {LONGEST_TEXT} characters and no NUL, but has"
            f" {len(text)} characters."
        )
    return column.contains(text, autoescape=True)


def _condition_holds(condition: Condition) -> sa.ColumnElement[bool]:
    if not _is_hparam(condition.column):
        shown = _shown_column(condition.column)
        return _compares(condition, shown, sortable_column(condition.column))
    # Any trial may meet a condition on a hyperparameter, not only the best one.
    path = json_path(condition.column.partition(":")[2])
    value = sa.func.json_extract(_any_trial.c.hparams, path)
    wanted = (
        replace(condition, operator="not empty") if condition.operator == "empty" else condition
    )
    found = sa.exists().where(
        _any_trial.c.experiment_id == _experiments.c.id, _compares(wanted, value, value)
    )
    return ~found if condition.operator == "empty" else found


def _is_hparam(column: str) -> bool:
    kind, _, name = column.partition(":")
    return kind == "hparam" and bool(name)


def _compares(
    condition: Condition, shown: sa.ColumnElement[Any], number: sa.ColumnElement[Any]
) -> sa.ColumnElement[bool]:
    """Return whether a condition holds for a value, as it is shown and as a number."""
    operator, value = condition.operator, condition.value
    if isinstance(value, str):
        column: sa.ColumnElement[str] = sa.cast(shown, sa.Text)
        if operator == "contains":
            return column_contains(column, value)
        is_equal = sa.func.lower(column) == value.lower()
        return is_equal if operator == "=" else ~is_equal
    if value is None:
        return number.is_(None) if operator == "empty" else number.is_not(None)
    compared: sa.ColumnElement[bool] = number.op(operator, is_comparison=True)(sa.literal(value))
    return compared


def sortable_column(name: str) -> sa.ColumnElement[Any]:
    """Return a column's expression to sort and to compare by; NaN and text are no numbers."""
    kind, _, rest = name.partition(":")
    if name in _FIELDS:
        return _FIELDS[name]
    shown = _shown_column(name)
    if kind != "last":
        return shown
    text = sa.cast(shown, sa.Text)
    is_number = sa.func.substr(text, 1, 1).in_(list("-0123456789"))
    return sa.case((is_number, sa.cast(text, sa.Float)), else_=None)


def _told_column(name: str) -> sa.ColumnElement[Any]:
    """Return a column's expression for output; `_column_value` decodes its values."""
    kind, _, rest = name.partition(":")
    if kind == "hparam" and rest:
        # Path given twice: SQLite then returns a JSON list, in which true differs from 1.
        path = json_path(rest)
        return sa.func.json_extract(BEST.c.hparams, path, path)
    return _shown_column(name)


def _column_value(name: str, found: Any) -> Any:
    """Return the decoded value of a column selected by `_told_column`."""
    is_list = name.startswith("hparam:") and isinstance(found, str)
    return json.loads(found)[0] if is_list else found


def _shown_column(name: str) -> sa.ColumnElement[Any]:
    """Return a column's expression to compare by, text included."""
    kind, _, rest = name.partition(":")
    if name in _FIELDS:
        return _FIELDS[name]
    if kind == "hparam" and rest:
        return sa.func.json_extract(BEST.c.hparams, json_path(rest))
    group, _, key = rest.partition("/")
    if kind not in ("last", "min", "max") or not group or not key:
        known = ", ".join(_FIELDS)
        raise ValueError(
            f"A column must be one of {known}, hparam:NAME, last:GROUP/NAME, min:GROUP/NAME or"
            f" max:GROUP/NAME, but got {name!r}."
        )
    series = tables.series.c
    of_best = (series.trial_id == BEST.c.id, series.group == group, series.key == key)
    if kind == "last":
        query: sa.Select[Any] = (
            sa.select(series.last).where(*of_best).order_by(series.attempt.desc()).limit(1)
        )
    else:
        query = sa.select(sa.func.min(series.min) if kind == "min" else sa.func.max(series.max))
        query = query.where(*of_best)
    return query.scalar_subquery()


def json_path(name: str) -> str:
    """Return the SQLite JSON path of a hyperparameter with dotted nested names.

    Raises:
        ValueError: No hyperparameter has such a name.
    """
    if "\0" in name:
        raise ValueError(f"The name of a hyperparameter must have no NUL, but got {name!r}.")
    return "$" + "".join(f'."{part}"' for part in name.replace('"', "").split("."))


def encode_experiments(
    connection: sa.Connection, listed: Sequence[Listed], cache: EncodingCache, *, is_brief: bool
) -> list[bytes]:
    """Return each experiment as JSON; `is_brief` leaves the configurations empty."""
    counts = experiment_counts(connection, [one.experiment.id for one in listed])
    return [
        _encode_experiment(one, counts.get(one.experiment.id, NO_COUNTS), cache, is_brief=is_brief)
        for one in listed
    ]


def _encode_experiment(
    listed: Listed, counts: ExperimentCounts, cache: EncodingCache, *, is_brief: bool
) -> bytes:
    def encode() -> bytes:
        row = SimpleNamespace(**listed.experiment._mapping)
        for name in JSON_COLUMNS:
            setattr(row, name, load_json(getattr(row, name)))
        config = {} if is_brief else hide_secrets(row.config)
        model = experiment_model(
            row, counts, config=config, project=row.project or "", values=tagged(listed.values)
        )
        return to_json(model, inf_nan_mode="null")

    if listed.values:
        return encode()
    return cache.encoded(("experiment", tuple(listed.experiment), counts, is_brief), encode)
