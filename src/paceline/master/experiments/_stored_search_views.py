"""What a search shows of its rungs: made once for the inputs that it has, and kept.

To make a view of an ended search, all of its inputs are applied again, which takes seconds for a
large one. So a view is stored when its search ends, and those of earlier versions at the first
look. While a search goes on, its own state is at hand.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Connection, delete, func, insert, select

from paceline.journal import encode_float
from paceline.master.experiments._stored_searches import Searches, load_search
from paceline.master.store import Database, Transaction, tables
from paceline.search import RungView, Search, SearchMethodError

logger = logging.getLogger(__name__)

MAX_RUNG_ENTRIES = 1000
# A view is made again after so many times what it took to make, however many inputs come.
_REST = 20


class ShownEntry(msgspec.Struct, array_like=True):
    """A trial at a rung."""

    trial_id: int
    metric: Any
    decision: str


class ShownRung(msgspec.Struct, array_like=True):
    """A rung: all entries by decision, and some of them in their order, first and last included."""

    length: int
    num_by_decision: dict[str, int]
    entries: list[ShownEntry]


Brackets: TypeAlias = list[list[ShownRung]]
_decoder: msgspec.json.Decoder[Brackets] = msgspec.json.Decoder(Brackets)


@dataclass(frozen=True, slots=True)
class _Made:
    brackets: Brackets
    num_inputs: int
    fresh_until: float


class SearchViews:
    """Read the rungs of searches; from any thread but the writer's."""

    def __init__(self, database: Database, searches: Searches) -> None:
        self._database = database
        self._searches = searches
        self._made: dict[int, _Made] = {}
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def read(self, experiment_id: int) -> Brackets:
        """Return the rungs; of a large search that goes on they may be seconds old."""
        found = self._find(experiment_id)
        if found is not None:
            return found
        # Those who ask at the same time wait for one to make it.
        with self._locks[experiment_id]:
            found = self._find(experiment_id)
            return self._make(experiment_id) if found is None else found

    def _find(self, experiment_id: int) -> Brackets | None:
        with self._database.read() as connection:
            num_inputs = _num_inputs(connection, experiment_id)
            made = self._made.get(experiment_id)
            if made is not None and made.num_inputs == num_inputs:
                return made.brackets
            stored = connection.execute(
                select(tables.search_views).where(
                    tables.search_views.c.experiment_id == experiment_id
                )
            ).first()
        # Of a search that has ended nobody looks again: what is seconds old would stay on a page.
        if stored is not None and stored.num_inputs == num_inputs:
            self._made.pop(experiment_id, None)
            return _decoder.decode(stored.view)
        if made is not None and time.monotonic() < made.fresh_until:
            return made.brackets
        self._made.pop(experiment_id, None)
        return None

    def _make(self, experiment_id: int) -> Brackets:
        began = time.monotonic()

        def look(transaction: Transaction) -> tuple[Brackets, int]:
            search = self._searches.peek(transaction, experiment_id)
            num_inputs = _num_inputs(transaction.connection, experiment_id)
            return _read_view(transaction.connection, experiment_id, search), num_inputs

        if self._searches.is_loaded(experiment_id):
            # It changes in the writer's thread alone.
            brackets, num_inputs = self._database.write(look).result()
            fresh_until = time.monotonic() + _REST * (time.monotonic() - began)
            self._made[experiment_id] = _Made(brackets, num_inputs, fresh_until)
            return brackets
        with self._database.read() as connection:
            loaded = load_search(connection, experiment_id)
            brackets = _read_view(connection, experiment_id, loaded.search)
        if loaded.search is not None:
            num_inputs = loaded.num_inputs
            self._database.write(
                lambda transaction: _store_view(
                    transaction.connection, experiment_id, brackets, num_inputs
                )
            ).result()
        return brackets


def store_search_view(transaction: Transaction, searches: Searches, experiment_id: int) -> None:
    """Store what a search that ends shows, if it is at hand and has rungs."""
    if not searches.is_loaded(experiment_id):
        return
    search = searches.peek(transaction, experiment_id)
    connection = transaction.connection
    try:
        brackets = _read_view(connection, experiment_id, search)
    except SearchMethodError:
        logger.exception("The rungs of experiment %d cannot be stored.", experiment_id)
        return
    if brackets:
        _store_view(connection, experiment_id, brackets, _num_inputs(connection, experiment_id))


def thinned(entries: Sequence[Any], limit: int) -> list[Any]:
    """Return up to `limit` entries in their order, spread evenly, the first and last included."""
    if len(entries) <= limit:
        return list(entries)
    last = len(entries) - 1
    return [entries[index * last // max(limit - 1, 1)] for index in range(limit)]


def _num_inputs(connection: Connection, experiment_id: int) -> int:
    inputs = tables.search_inputs.c
    newest = select(func.max(inputs.number)).where(inputs.experiment_id == experiment_id)
    found: int | None = connection.execute(newest).scalar()
    return 0 if found is None else found + 1


def _read_view(connection: Connection, experiment_id: int, search: Search | None) -> Brackets:
    rungs = [bracket.rungs for bracket in (() if search is None else search.rungs())]
    shown = [[thinned(rung.entries, MAX_RUNG_ENTRIES) for rung in bracket] for bracket in rungs]
    requests = {entry.request_id for bracket in shown for rung in bracket for entry in rung}
    trial_ids = _trial_ids(connection, experiment_id, sorted(requests))
    return [
        [
            _shown_rung(rung, entries, trial_ids)
            for rung, entries in zip(bracket, shown_bracket, strict=True)
        ]
        for bracket, shown_bracket in zip(rungs, shown, strict=True)
    ]


def _shown_rung(rung: RungView, entries: list[Any], trial_ids: dict[str, int]) -> ShownRung:
    return ShownRung(
        rung.units,
        dict(Counter(entry.decision.value for entry in rung.entries)),
        [
            ShownEntry(
                trial_ids[entry.request_id],
                None if entry.metric is None else encode_float(entry.metric),
                entry.decision.value,
            )
            for entry in entries
        ],
    )


def _trial_ids(
    connection: Connection, experiment_id: int, request_ids: list[str]
) -> dict[str, int]:
    trials = tables.trials.c
    found: dict[str, int] = {}
    for start in range(0, len(request_ids), 500):
        query = select(trials.request_id, trials.id).where(
            trials.experiment_id == experiment_id,
            trials.request_id.in_(request_ids[start : start + 500]),
        )
        found |= {row.request_id: row.id for row in connection.execute(query).all()}
    return found


def _store_view(
    connection: Connection, experiment_id: int, brackets: Brackets, num_inputs: int
) -> None:
    views = tables.search_views
    if connection.execute(
        select(tables.experiments.c.id).where(tables.experiments.c.id == experiment_id)
    ).first():
        connection.execute(delete(views).where(views.c.experiment_id == experiment_id))
        view = msgspec.json.encode(brackets)
        values = {"experiment_id": experiment_id, "num_inputs": num_inputs, "view": view}
        connection.execute(insert(views).values(values))
