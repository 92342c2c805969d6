"""Query language of people: `lr < 0.01 and tag:baseline and not state:ERROR` to SQL conditions.

A query holds for a trial with its experiment. The parser is one pass over the text, with limits on
length and nesting, and the conditions have no patterns: no query takes long to understand.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import PROJECT_NAME
from paceline._cluster.master.store.experiment_list import (
    BEST,
    column_contains,
    found_by_text,
    json_path,
    sortable_column,
)
from paceline._cluster.messages.states import (
    STOPPED_BY_SEARCH,
    AttemptState,
    ExperimentState,
    TrialState,
)
from paceline.config._environment_and_secrets import HIDDEN_FIELDS
from paceline.config._experiment_config import ExperimentConfig

LONGEST_QUERY = 2000
_DEEPEST = 50
_SHOWN_NAMES = 5
_VALUES = 20
_NEWEST_TRIALS = 2000

_WORD = r"""(?:(?:hparam|config|last|min|max):)?(?:"[^"]*"|'[^']*'|[^\s()<>=!:"']+)"""
_NAME = re.compile(rf"\s*({_WORD})")
_SIGN = re.compile(r"\s*(<=|>=|!=|==|<|>|=|:)")
_VALUE = re.compile(r"""\s*("[^"]*"|'[^']*'|[^\s()"']+)""")
_MARK = re.compile(r"\s*([()])")
_UNTYPED = re.compile(rf"""(?:^|[\s(])({_WORD})\s*(?:<=|>=|!=|==|<|>|=|:)\s*([^\s()"'<>=!]*)$""")
_TYPED_NAME = re.compile(r"[^\s()<>=!\"']*$")
_AGE = re.compile(r"-(\d{1,6}(?:\.\d{1,6})?)([mhdw])")
_AGE_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Condition = sa.ColumnElement[bool]
_trial, _experiment = BEST.c, tables.experiments.c
_ALL = tables.experiments.outerjoin(BEST, BEST.c.experiment_id == tables.experiments.c.id)
_state = sa.func.coalesce(_trial.state, _experiment.state)
_TIMES = {
    "created": sa.func.coalesce(_trial.created_at, _experiment.created_at),
    "ended": sa.func.coalesce(_trial.ended_at, _experiment.ended_at),
}
_NUMBERS = {
    "trial": _trial.id,
    "experiment": _experiment.id,
    "steps": _trial.steps_completed,
    "progress": _trial.progress,
    "restarts": _trial.restarts,
    "best": _trial.best_metric,
}
_STATE: sa.ColumnElement[Any] = sa.case(
    (sa.and_(_experiment.state == "PAUSED", _state.in_(("ACTIVE", "PAUSED"))), "PAUSED"),
    else_=_state,
)
_HIDDEN_PATHS = [f"$.environment.{field}" for field in sorted(HIDDEN_FIELDS)]
_TEXTS: dict[str, sa.ColumnElement[Any]] = {
    "name": _experiment.name,
    "description": _experiment.description,
    "notes": _experiment.notes,
    "settings": sa.cast(sa.func.json_remove(_experiment.config, *_HIDDEN_PATHS), sa.Text)
    + sa.func.coalesce(sa.cast(_trial.hparams, sa.Text), ""),
    "error": _trial.error,
    "owner": _experiment.owner,
    "project": PROJECT_NAME,
    "searcher": _experiment.config["searcher"]["name"].as_string(),
    "metric": _experiment.config["searcher"]["metric"].as_string(),
    "kind": sa.func.coalesce(
        _experiment.config["interactive"]["kind"].as_string(), sa.literal("training")
    ),
}
_LABELS = ("tag", "label")
_is_running = (
    sa.select(tables.attempts.c.id)
    .where(
        tables.attempts.c.trial_id == _trial.id,
        tables.attempts.c.state == AttemptState.RUNNING.value,
    )
    .exists()
)
# Words of people for a part of the trials of a stored state.
_SHOWN_STATES: dict[str, sa.ColumnElement[bool]] = {
    "RUNNING": sa.and_(_STATE == "ACTIVE", _is_running),
    "QUEUED": sa.and_(_STATE == "ACTIVE", ~_is_running),
    "STOPPED": sa.and_(_STATE == "COMPLETED", _trial.stop_reason == STOPPED_BY_SEARCH),
}
_STATES = ("ACTIVE", *_SHOWN_STATES, "PAUSED", "COMPLETED", "CANCELED", "ERROR")
_ALL_STATES = {one.value for kind in (ExperimentState, TrialState) for one in kind}
_FIELDS = (*_TIMES, *_NUMBERS, *_TEXTS, *_LABELS, "state")
_CONNECTIVES = ("and", "or", "not")


class QueryError(ValueError):
    """Raised when a query has an error; one sentence, with the place."""


class _Value(NamedTuple):
    """What a field is compared to: the text, and whether it was quoted."""

    text: str
    is_quoted: bool

    @property
    def number(self) -> float | int | None:
        """The value as a number, None if it is none."""
        try:
            found = float(self.text)
        except ValueError:
            return None
        if self.is_quoted or not math.isfinite(found) or "_" in self.text:
            return None
        is_whole = found.is_integer() and abs(found) < 2**63
        # Large integers keep all their digits.
        return int(self.text) if is_whole and self.text.lstrip("+-").isdecimal() else found

    @property
    def word(self) -> str:
        """The value in small letters, empty if it was quoted."""
        return "" if self.is_quoted else self.text.lower()


def matching_trials_of(connection: sa.Connection, text: str) -> sa.Select[Any]:
    """Return the query for the ids of all trials that a text describes.

    Raises:
        QueryError: The text is no query, or names an unknown field.
    """
    held = _Parser(connection, text).parse()
    return (
        sa.select(BEST.c.id).select_from(_ALL).where(BEST.c.id.is_not(None), held).correlate(None)
    )


def matching_experiments_of(connection: sa.Connection, text: str) -> sa.Select[Any]:
    """Return the query for the ids of experiments with a trial that a text describes.

    An experiment without trials has itself looked at.

    Raises:
        QueryError: The text is no query, or names an unknown field.
    """
    held = _Parser(connection, text).parse()
    return sa.select(tables.experiments.c.id).select_from(_ALL).where(held).correlate(None)


class _Parser:
    """Recursive descent over a query, which makes the condition as it goes."""

    def __init__(self, connection: sa.Connection, text: str) -> None:
        if len(text) > LONGEST_QUERY:
            raise QueryError(
                f"A query must have at most {LONGEST_QUERY} characters, but has {len(text)}."
            )
        self._connection, self._text, self._place = connection, text, 0
        self._known: dict[str, Callable[[str, _Value], Condition]] = {}

    def parse(self) -> Condition:
        """Return the condition of the whole text; an empty one always holds."""
        if not self._rest.strip():
            return sa.true()
        found = self._either(0)
        if self._rest.strip():
            raise self._wrong("end or go on with `and` or `or`")
        return found

    @property
    def _rest(self) -> str:
        return self._text[self._place :]

    def _wrong(self, must: str, place: int | None = None) -> QueryError:
        place = self._after_blanks(self._place if place is None else place)
        got = repr(self._text[place : place + 40]) if place < len(self._text) else "the end"
        return QueryError(f"A query must {must}, but got {got} at character {place + 1}.")

    def _after_blanks(self, place: int) -> int:
        return len(self._text) - len(self._text[place:].lstrip())

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._place)
        if match is None:
            return None
        self._place = match.end()
        return match[1]

    def _take_word(self, *words: str) -> bool:
        match = _NAME.match(self._text, self._place)
        # A field may have such a name too.
        if match is None or match[1].lower() not in words or _SIGN.match(self._text, match.end()):
            return False
        self._place = match.end()
        return True

    def _either(self, depth: int) -> Condition:
        found = [self._all(depth)]
        while self._take_word("or"):
            found.append(self._all(depth))
        return sa.or_(*found) if len(found) > 1 else found[0]

    def _all(self, depth: int) -> Condition:
        found = [self._one(depth)]
        while self._take_word("and") or self._is_term_next():
            found.append(self._one(depth))
        return sa.and_(*found) if len(found) > 1 else found[0]

    def _is_term_next(self) -> bool:
        """Return whether another term follows without a connective, which means `and`."""
        place, is_or = self._place, self._take_word("or")
        self._place = place
        rest = self._rest.lstrip()
        return not is_or and rest[:1] not in ("", ")") and _SIGN.match(rest) is None

    def _one(self, depth: int) -> Condition:
        if depth > _DEEPEST:
            raise QueryError(f"A query must be nested at most {_DEEPEST} deep, but goes on deeper.")
        if self._take_word("not"):
            # What has no value does not meet the condition, and so meets its opposite.
            return self._one(depth + 1).self_group().is_not(sa.true())
        place = self._place
        mark = self._take(_MARK)
        if mark == "(":
            found = self._either(depth + 1)
            if self._take(_MARK) != ")":
                raise self._wrong("close each parenthesis")
            return found.self_group()
        self._place = place
        name = self._take(_NAME)
        if name is None or name.lower() in _CONNECTIVES[:2]:
            raise self._wrong("have a field or a text here", None if name is None else place)
        sign = self._take(_SIGN)
        if sign is None:
            return _experiment.id.in_(found_by_text(_unquoted(name)))
        raw = self._take(_VALUE)
        if raw is None:
            raise self._wrong(f"have a value after `{name} {sign}`")
        value = _Value(_unquoted(raw), raw[0] in "\"'")
        try:
            return self._compared(_unquoted(name))("=" if sign == "==" else sign, value)
        except QueryError as error:
            raise QueryError(f"{error} (At character {self._after_blanks(place) + 1}.)") from None

    def _compared(self, name: str) -> Callable[[str, _Value], Condition]:
        if name not in self._known:
            self._known[name] = _comparison(self._connection, name)
        return self._known[name]


def _unquoted(text: str) -> str:
    prefix, colon, rest = text.partition(":")
    if colon and rest[:1] in ("'", '"'):
        return f"{prefix}:{rest[1:-1]}"
    return text[1:-1] if text[:1] in ("'", '"') else text


def _comparison(connection: sa.Connection, name: str) -> Callable[[str, _Value], Condition]:
    """Return what compares a field: one of ours, else a hyperparameter, else a metric."""
    if (short := name.lower()) in _FIELDS:
        return _own_field(short)
    kind, _, rest = name.partition(":")
    if kind == "hparam" and rest:
        return partial(_compare_json, name, _trial.hparams, rest)
    if kind == "config" and rest:
        return partial(_compare_json, name, _experiment.config, _config_path(rest))
    if kind in ("last", "min", "max") and rest:
        return partial(_compare_number, name, sortable_column(_metric(connection, kind, rest)))
    if _has_hparam(connection, name):
        return partial(_compare_json, name, _trial.hparams, name)
    if _metrics_named(connection, name):
        return partial(_compare_number, name, sortable_column(_metric(connection, "last", name)))
    if name.partition(".")[0] in ExperimentConfig.model_fields:
        return partial(_compare_json, name, _experiment.config, _config_path(name))
    raise QueryError(
        f"A field must be one of {', '.join(_FIELDS)}, or a hyperparameter, a metric or a field of"
        f" the config that is there, but got {name!r}. Hint: quote a text that is no field."
    )


def _has_hparam(connection: sa.Connection, name: str) -> bool:
    found = sa.func.json_type(tables.trials.c.hparams, json_path(name)).is_not(None)
    return connection.scalar(sa.select(sa.literal(1)).where(found).limit(1)) is not None


def _metrics_named(connection: sa.Connection, name: str) -> list[str]:
    """Return GROUP/NAME of the metrics with a name, or with a group and a name."""
    group, slash, key = name.partition("/")
    names = tables.metric_names.c
    query = sa.select(names.group, names.key).distinct().order_by(names.group, names.key)
    found = list(connection.execute(query.where(names.key == name)))
    if slash:
        found += connection.execute(query.where(names.group == group, names.key == key))
    return [f"{row.group}/{row.key}" for row in found]


def _metric(connection: sa.Connection, kind: str, name: str) -> str:
    """Return the column of the only metric with a name."""
    found = _metrics_named(connection, name)
    if name in found:
        found = [name]
    if len(found) > 1:
        shown = " or ".join(found[:_SHOWN_NAMES])
        raise QueryError(f"A metric field must name one metric, but {name!r} may be {shown}.")
    if not found:
        raise QueryError(f"A metric field must be one that a trial has reported, but got {name!r}.")
    return f"{kind}:{found[0]}"


def _config_path(name: str) -> str:
    parts = name.replace('"', "").split(".")
    if parts[0] == "environment" and not HIDDEN_FIELDS.isdisjoint(parts[1:2]):
        raise QueryError(
            f"A field of the config must not hold variables or secrets, but got {name!r}."
        )
    return name


def _own_field(name: str) -> Callable[[str, _Value], Condition]:
    if name in _TIMES:
        return partial(_compare_time, name)
    if name in _NUMBERS:
        return partial(_compare_number, name, _NUMBERS[name])
    if name in _LABELS:
        return _compare_label
    return _compare_state if name == "state" else partial(_compare_text, name, _TEXTS[name])


def _refuse_sign(name: str, sign: str, known: Sequence[str]) -> None:
    if sign not in known:
        raise QueryError(f"`{name}` must be compared by {' or '.join(known)}, but got {sign!r}.")


def _is_missing(sign: str, value: _Value, column: sa.ColumnElement[Any]) -> Condition | None:
    if value.word != "none" or sign not in ("=", ":", "!="):
        return None
    return column.is_not(None) if sign == "!=" else column.is_(None)


def _compare_number(
    name: str, column: sa.ColumnElement[Any], sign: str, value: _Value
) -> Condition:
    if (missing := _is_missing(sign, value, column)) is not None:
        return missing
    number = value.number
    if number is None:
        raise QueryError(f"`{name}` must be compared to a number, but got {value.text[:40]!r}.")
    sign = "=" if sign == ":" else sign
    return sa.and_(
        column.op(sign, is_comparison=True)(sa.literal(number)), sa.func.abs(column) < math.inf
    )


def _compare_time(name: str, sign: str, value: _Value) -> Condition:
    column = _TIMES[name]
    if (missing := _is_missing(sign, value, column)) is not None:
        return missing
    _refuse_sign(name, sign, ("<", "<=", ">", ">="))
    return column.op(sign, is_comparison=True)(sa.literal(_moment(name, value.text)))


def _moment(name: str, text: str) -> float:
    if age := _AGE.fullmatch(text):
        return time.time() - float(age[1]) * _AGE_S[age[2]]
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        raise QueryError(
            f"`{name}` must be compared to an age such as -7d, -12h or -30m, or to a date such as"
            f" 2026-11-30 or 2026-11-30T09:00 in UTC, but got {text[:40]!r}."
        ) from None


def _compare_label(sign: str, value: _Value) -> Condition:
    _refuse_sign("tag", sign, (":", "=", "!="))
    labels = sa.cast(_experiment.labels, sa.Text)
    if value.word == "none":
        return (labels != "[]") if sign == "!=" else (labels == "[]")
    has = column_contains(labels, json.dumps(value.text))
    return ~has if sign == "!=" else has


def _compare_state(sign: str, value: _Value) -> Condition:
    _refuse_sign("state", sign, (":", "=", "!="))
    wanted = value.text.upper()
    if (shown := _SHOWN_STATES.get(wanted)) is not None:
        return ~sa.func.coalesce(shown, False) if sign == "!=" else shown
    if wanted not in _ALL_STATES:
        raise QueryError(f"`state` must be one of {', '.join(_STATES)}, but got {value.text!r}.")
    return (_STATE != wanted) if sign == "!=" else (_STATE == wanted)  # noqa: SIM300


def _compare_text(name: str, column: sa.ColumnElement[Any], sign: str, value: _Value) -> Condition:
    if (missing := _is_missing(sign, value, sa.func.nullif(column, ""))) is not None:
        return missing
    _refuse_sign(name, sign, (":", "=", "!="))
    if sign == ":":
        return column_contains(column, value.text)
    same = sa.func.lower(column) == sa.func.lower(sa.literal(value.text))
    return ~same if sign == "!=" else same


def _compare_json(
    name: str, column: sa.ColumnElement[Any], path: str, sign: str, value: _Value
) -> Condition:
    """Return the comparison of a value of any type; one of another type does not meet it."""
    path = json_path(path)
    kind, found = sa.func.json_type(column, path), sa.func.json_extract(column, path)
    if (missing := _is_missing(sign, value, sa.func.nullif(kind, "null"))) is not None:
        return missing
    is_opposite = sign == "!="
    if value.word in ("true", "false"):
        _refuse_sign(name, sign, (":", "=", "!="))
        held = kind == value.word
    elif (number := value.number) is not None:
        sign = "=" if sign in (":", "!=") else sign
        is_number = kind.in_(("integer", "real"))
        held = sa.and_(is_number, found.op(sign, is_comparison=True)(sa.literal(number)))
    elif sign not in (":", "=", "!="):
        raise QueryError(f"`{name}` must be compared to a number, but got {value.text[:40]!r}.")
    else:
        text = sa.cast(found, sa.Text)
        held = sa.and_(
            kind == "text", _compare_text(name, text, ":" if sign == ":" else "=", value)
        )
    return sa.and_(kind.is_not(None), held.self_group().is_not(sa.true())) if is_opposite else held


def complete_query(
    connection: sa.Connection, text: str, names: Iterable[str]
) -> tuple[int, list[str]]:
    """Return where the last word of a text begins, and what it may become.

    Args:
        connection: The database.
        text: A query up to the cursor.
        names: Hyperparameters and metrics.
    """
    text = text[:LONGEST_QUERY]
    if untyped := _UNTYPED.search(text):
        place, typed = untyped.start(2), untyped[2]
        options = _values_of(connection, _unquoted(untyped[1]))
    else:
        place = _TYPED_NAME.search(text).start()  # type: ignore[union-attr]
        typed = text[place:]
        options = [*_FIELDS, *map(_quoted, names), *_CONNECTIVES]
    small = typed.lower()
    found = [one for one in dict.fromkeys(options) if small in one.lower()]
    return place, sorted(found, key=lambda one: not one.lower().startswith(small))[:_VALUES]


def _quoted(text: str) -> str:
    is_plain = _VALUE.fullmatch(text) is not None and _NAME.fullmatch(text) is not None
    return text if is_plain or '"' in text else f'"{text}"'


def _values_of(connection: sa.Connection, name: str) -> list[str]:
    """Return values of a field as a query has them."""
    if name == "state":
        return list(_STATES)
    if name in _TIMES:
        return ["-1h", "-1d", "-7d", "-30d"]
    if name in _LABELS:
        lists = sa.select(sa.cast(_experiment.labels, sa.Text)).distinct().limit(_NEWEST_TRIALS)
        known = {label for text in connection.scalars(lists) for label in json.loads(text)}
        return [_quoted(label) for label in sorted(known)]
    if name in ("name", "owner", "project", "searcher", "metric", "kind"):
        query: sa.Select[Any] = sa.select(_TEXTS[name]).distinct().select_from(tables.experiments)
    elif name in _FIELDS:
        return []
    else:
        newest = sa.select(tables.trials.c.hparams).order_by(tables.trials.c.id.desc())
        rows = newest.limit(_NEWEST_TRIALS).subquery()
        path = json_path(name.removeprefix("hparam:"))
        kind = sa.func.json_type(rows.c.hparams, path)
        value = sa.func.json_extract(rows.c.hparams, path)
        shown = sa.case((kind.in_(("true", "false")), kind), else_=sa.cast(value, sa.Text))
        query = sa.select(shown).distinct().where(kind.not_in(("object", "array", "null")))
    found = connection.scalars(query.limit(_NEWEST_TRIALS))
    return [_quoted(one) for one in found if one]
