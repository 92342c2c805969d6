"""Keyset pages of lists (any page costs the same), and caches of encoded rows and names."""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import msgspec
from pydantic_core import to_json
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    and_,
    or_,
    select,
    tuple_,
    type_coerce,
)

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import TrialFacts, trial_facts, trial_model
from paceline._cluster.master.store.database import load_json
from paceline._cluster.master.store.row_ids_and_counts import (
    TRIALS,
    ids_parameter,
    many_ids,
    numbers_of,
)


@dataclass(frozen=True, slots=True)
class Order:
    """Sort order of a list: the first key, then the other keys as tie-breakers.

    Only the first key may be null; rows without it come last. An index on the keys serves an order
    whose keys have one direction. Where the rest has another one, rows that share the first key
    are sorted.
    """

    keys: tuple[ColumnElement[Any], ...]
    is_descending: bool = False
    is_rest_descending: bool | None = None
    """None for the direction of the first key."""
    is_missing_descending: bool | None = None
    """The direction among rows without the first key; None for the direction of the rest."""

    def read(
        self,
        connection: Connection,
        query: Select[Any],
        *,
        after: Sequence[Any] | None = None,
        limit: int,
    ) -> list[Row[Any]]:
        """Return up to `limit` rows of a query in this order, those behind a row with keys."""
        first, rest = self.keys[0], self.keys[1:]
        terms = [
            _directed(first, self.is_descending),
            *(_directed(key, self._is_rest_descending) for key in rest),
        ]
        rows: list[Row[Any]] = []
        if after is None or after[0] is not None:
            # NULL keys match no comparison, so rows without the first key are read separately.
            beyond = first.is_not(None) if after is None else self._beyond(after)
            rows += connection.execute(query.where(beyond).order_by(*terms).limit(limit)).all()
        # Rows with a NULL first key come last: they are read only if the page has room.
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
        # The first condition says nothing new, but lets SQLite enter an index.
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
    """Return the row-value comparison for rows beyond a place; an index on the keys fits."""
    own: Any = tuple_(*keys) if len(keys) > 1 else keys[0]
    other: Any = tuple(place) if len(keys) > 1 else place[0]
    beyond: ColumnElement[bool] = own < other if is_descending else own > other
    return beyond


_trials = tables.trials.c
_SAMPLED: Select[Any] = select(
    _trials.id,
    _trials.state,
    type_coerce(_trials.hparams, Text).label("hparams"),
    _trials.steps_completed,
    _trials.best_metric,
)
_FACTOR, _RANGE = 2_654_435_761, 2**32


def sample_trials(
    connection: Connection, experiment_id: int, limit: int, *, smaller_is_better: bool
) -> tuple[list[Row[Any]], int]:
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
    ids = select(trials.id).where(trials.experiment_id == experiment_id)
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


_LIMIT_BYTES = 16 * 1024 * 1024
# Size estimate for a dictionary entry in Python, with its key and value objects.
_ENTRY_BYTES = 250


class EncodingCache:
    """Cache of encoded rows, keyed by a digest of their whole content, so entries never go stale.

    Several threads may use it; they may make the same encoding at once.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encoded(self, content: Any, encode: Callable[[], bytes]) -> bytes:
        """Return the cached encoding of a content, or make and keep a new encoding.

        Args:
            content: Plain values: all that the encoding depends on, its kind among them.
            encode: Makes it.
        """
        try:
            plain = msgspec.msgpack.encode(content)
        except OverflowError:
            # An integer of more than 64 bits.
            return encode()
        key = blake2b(plain, digest_size=16).digest()
        found = self._kept.get(key)
        if found is None:
            found = encode()
            self._keep(key, found)
        return found

    def _keep(self, key: bytes, encoded: bytes) -> None:
        num_bytes = len(encoded) + _ENTRY_BYTES
        if num_bytes > _LIMIT_BYTES:
            return
        with self._lock:
            # The next lists fill the cache again, so no order of use is kept.
            if self._num_bytes + num_bytes > _LIMIT_BYTES:
                self._kept.clear()
                self._num_bytes = 0
            if key not in self._kept:
                self._kept[key] = encoded
                self._num_bytes += num_bytes


_JSON_COLUMNS = ("hparams", "latest_metric")
LISTED_TRIAL_COLUMNS = (
    *(
        _trials[name]
        for name in (
            *("id", "experiment_id", "request_id", "state", "seed", "restarts", "retries"),
            *("num_attempts", "steps_completed", "progress", "status", "best_metric", "best_step"),
            *("created_at", "ended_at", "stop_reason", "error", "error_kind", "target_length"),
            "num_records_lost",
        )
    ),
    *(type_coerce(_trials[name], Text).label(name) for name in _JSON_COLUMNS),
)
"""The columns of trials in a list; JSON columns are text."""


def encode_trials(
    connection: Connection, rows: Sequence[Row[Any]], cache: EncodingCache
) -> list[bytes]:
    """Return each trial as JSON.

    Args:
        connection: The database.
        rows: The trials' `LISTED_TRIAL_COLUMNS`; more columns may follow.
        cache: Trials encoded before.
    """
    facts = trial_facts(connection, rows)
    return [_encode_trial(row, facts[row.id], cache) for row in rows]


def _encode_trial(row: Row[Any], facts: TrialFacts, cache: EncodingCache) -> bytes:
    columns = row[: len(LISTED_TRIAL_COLUMNS)]

    def encode() -> bytes:
        shown = SimpleNamespace(**row._mapping)
        for name in _JSON_COLUMNS:
            text = getattr(shown, name)
            setattr(shown, name, None if text is None else load_json(text))
        return to_json(trial_model(shown, facts), inf_nan_mode="null")

    return cache.encoded(("trial", columns, facts), encode)


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
