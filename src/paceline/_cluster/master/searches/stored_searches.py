"""Searches as input log and snapshot; views of their rungs."""

import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import sqlalchemy as sa

from paceline import faults
from paceline._base.journal_records import encode_float
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Database, Transaction, dump_json_fast
from paceline.config._searcher_registry import MissingSearcher
from paceline.search import _search_messages as messages
from paceline.search._rungs import Losses, pareto_front
from paceline.search._search import Search
from paceline.search._search_method import Arrival, RungView, SearchMethodError

logger = logging.getLogger(__name__)

_SNAPSHOT_INPUTS = 100

faults.register("master.search.applied")

_INPUT = (
    "INSERT INTO search_inputs (experiment_id, number, time, input, operations)"
    " VALUES (?, ?, ?, ?, ?)"
)


@dataclass(slots=True)
class LoadedSearch:
    """Search with its number of inputs; None as `search` (no method) defers all decisions."""

    search: Search | None
    num_inputs: int
    num_in_snapshot: int


class Searches:
    """Application of inputs to searches; state = newest snapshot + the later inputs.

    The method of a search can be missing, as it may come from a package. Inputs are stored without
    operations then, and `catch_up` lets the search decide once the method is back.

    Used in the writer thread only.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, LoadedSearch] = {}
        # Transaction and experiment that were looked up last: a search has many inputs in one.
        self._last: tuple[Transaction, int] | None = None
        # Told of each search that has trials without hyperparameters, after a commit.
        self.on_asks: Callable[[int], None] = lambda experiment_id: None
        # Told of each experiment whose state has changed, after a commit.
        self.on_state: Callable[[int], None] = lambda experiment_id: None

    def apply(
        self, transaction: Transaction, experiment_id: int, given: messages.Input
    ) -> list[messages.Operation]:
        """Apply an input, and store the input with the resulting operations.

        Raises:
            SearchMethodError: The search's method fails.
        """
        loaded = self._load(transaction, experiment_id)
        operations = None if loaded.search is None else loaded.search.apply(given)
        place = experiment_id, loaded.num_inputs, time.time()
        stored = (*place, messages.message_to_json(given), dump_json_fast(_as_json(operations)))
        if isinstance(given, messages.Reported):
            transaction.insert_late(_INPUT, stored)
        else:
            transaction.connection.exec_driver_sql(_INPUT, stored)
        # A decision that was carried out must not be taken again, maybe in another way.
        transaction.force()
        faults.reach("master.search.applied")
        loaded.num_inputs += 1
        # Growing intervals keep the cost per input constant, however long the search is.
        num_fresh = loaded.num_inputs - loaded.num_in_snapshot
        num_asks = 0 if loaded.search is None else loaded.search.num_asks
        if num_fresh >= max(_SNAPSHOT_INPUTS, max(loaded.num_in_snapshot, num_asks) // 2):
            self._store_snapshot(transaction.connection, experiment_id, loaded)
        if num_asks:
            transaction.after_commit(lambda: self.on_asks(experiment_id))
        return operations or []

    def catch_up(
        self, transaction: Transaction, experiment_id: int
    ) -> list[tuple[messages.Input, list[messages.Operation]]]:
        """Apply the inputs stored while the search method was missing, and return the operations.

        Raises:
            SearchMethodError: The search's method fails.
        """
        loaded = self._load(transaction, experiment_id)
        if loaded.search is None:
            return []
        inputs, decided = tables.search_inputs, []
        waiting = sa.select(inputs.c.number, inputs.c.input).where(
            inputs.c.experiment_id == experiment_id, _is_undecided()
        )
        for number, stored in list(transaction.connection.execute(waiting.order_by("number"))):
            given = messages.input_from_json(json.dumps(stored))
            operations = loaded.search.apply(given)
            decided.append((given, operations))
            transaction.connection.execute(
                sa.update(inputs)
                .where(inputs.c.experiment_id == experiment_id, inputs.c.number == number)
                .values(operations=_as_json(operations))
            )
        return decided

    def check(self, transaction: Transaction, experiment_id: int) -> None:
        """Save and restore a newly started search, to find state errors at once and not later.

        Raises:
            SearchMethodError: The search's method fails, or does not take its state back.
        """
        search = self.peek(transaction, experiment_id)
        assert search is not None
        stored = search.snapshot()
        row = _row(transaction.connection, experiment_id)
        if _restored(row, json.loads(json.dumps(stored))).snapshot() != stored:
            raise SearchMethodError(
                f"The search method `{stored['kind']}` must have the same state after `load`, but"
                " its snapshot is another.\nHint: keep to what JSON holds: strings as keys, lists"
                " instead of tuples and sets."
            )

    def note_progress(
        self, transaction: Transaction, experiment_id: int, told: messages.Progressed
    ) -> None:
        """Report a trial's progress to a search; this decides nothing and is not stored."""
        search = self.peek(transaction, experiment_id)
        if search is not None:
            search.apply(told)

    def peek(self, transaction: Transaction, experiment_id: int) -> Search | None:
        """Return the current search, None without its method; the state is read-only."""
        return self._load(transaction, experiment_id).search

    def is_loaded(self, experiment_id: int) -> bool:
        """Return whether a search is at hand; may be asked from any thread."""
        return experiment_id in self._loaded

    def forget(self, experiment_id: int) -> None:
        """Drop an ended search from the cache."""
        self._loaded.pop(experiment_id, None)

    def _load(self, transaction: Transaction, experiment_id: int) -> LoadedSearch:
        # Cached searches are changed in place, so a rollback must drop the cached state.
        if self._last != (transaction, experiment_id):
            transaction.after_rollback(lambda: self.forget(experiment_id))
            self._last = transaction, experiment_id
        loaded = self._loaded.get(experiment_id)
        if loaded is None:
            loaded = load_search(transaction.connection, experiment_id)
            self._loaded[experiment_id] = loaded
        return loaded

    @staticmethod
    def _store_snapshot(
        connection: sa.Connection, experiment_id: int, loaded: LoadedSearch
    ) -> None:
        if loaded.search is None:
            return
        snapshots = tables.search_snapshots
        connection.execute(sa.delete(snapshots).where(snapshots.c.experiment_id == experiment_id))
        connection.execute(
            sa.insert(snapshots).values(
                experiment_id=experiment_id,
                num_inputs=loaded.num_inputs,
                snapshot=loaded.search.snapshot(),
            )
        )
        loaded.num_in_snapshot = loaded.num_inputs


def load_search(connection: sa.Connection, experiment_id: int) -> LoadedSearch:
    """Return a search from the database."""
    inputs = tables.search_inputs
    row = _row(connection, experiment_id)
    snapshots = tables.search_snapshots
    snapshot = connection.execute(
        sa.select(snapshots).where(snapshots.c.experiment_id == experiment_id)
    ).first()
    num_in_snapshot = 0 if snapshot is None else snapshot.num_inputs
    num_inputs = connection.execute(
        sa.select(sa.func.count()).where(inputs.c.experiment_id == experiment_id)
    ).scalar_one()
    decided = connection.execute(
        sa.select(inputs.c.input)
        .where(
            inputs.c.experiment_id == experiment_id,
            inputs.c.number >= num_in_snapshot,
            # Undecided inputs are left to `catch_up`, which returns their operations as well.
            ~_is_undecided(),
        )
        .order_by(inputs.c.number)
    ).scalars()
    search = None
    try:
        search = _restored(row, None if snapshot is None else snapshot.snapshot)
        for stored in decided:
            search.apply(messages.input_from_json(json.dumps(stored)))
    except SearchMethodError as error:
        if num_inputs == 0:
            raise
        # An error in code that worked before comes from another version: all is kept until one
        # that works is back. A missing method was reported when the master started.
        if not isinstance(config_of(row).searcher, MissingSearcher):
            logger.warning("The search of experiment %d waits: %s", experiment_id, error)
        search = None
    return LoadedSearch(search, num_inputs, num_in_snapshot)


def _row(connection: sa.Connection, experiment_id: int) -> sa.Row[Any]:
    experiments = tables.experiments
    return connection.execute(sa.select(experiments).where(experiments.c.id == experiment_id)).one()


def _restored(row: sa.Row[Any], snapshot: dict[str, Any] | None) -> Search:
    config = config_of(row)
    if snapshot is None:
        is_asking = config.searcher.is_asking
        return Search(config.search_config(), config.hyperparameters, row.seed, is_asking=is_asking)
    return Search.restore(config.search_config(), config.hyperparameters, snapshot)


def missing_methods(connection: sa.Connection) -> list[tuple[int, str]]:
    """Return the live experiments with a missing search method, and the method's name."""
    experiments = tables.experiments
    rows = connection.execute(sa.select(experiments).where(*_is_going_on()).order_by("id"))
    searchers = [(row.id, config_of(row).searcher) for row in rows]
    return [(id_, one.name) for id_, one in searchers if isinstance(one, MissingSearcher)]


def undecided_searches(connection: sa.Connection) -> list[int]:
    """Return the live experiments with undecided search inputs."""
    experiments, inputs = tables.experiments, tables.search_inputs
    query = (
        sa.select(experiments.c.id)
        .join(inputs, inputs.c.experiment_id == experiments.c.id)
        .where(*_is_going_on(), _is_undecided())
    )
    return list(connection.execute(query.distinct().order_by(experiments.c.id)).scalars())


def _is_going_on() -> tuple[sa.ColumnElement[bool], ...]:
    experiments = tables.experiments
    return experiments.c.ended_at.is_(None), experiments.c.external_id.is_(None)


def _is_undecided() -> sa.ColumnElement[bool]:
    return sa.cast(tables.search_inputs.c.operations, sa.String) == "null"


def _as_json(operations: list[messages.Operation] | None) -> Any:
    if operations is None:
        return None
    return [json.loads(messages.message_to_json(operation)) for operation in operations]


class StoredProposal(msgspec.Struct):
    """Who proposed the hyperparameters of a trial, and why."""

    by: str
    why: str
    is_fallback: bool


def proposal_of(connection: sa.Connection, trial: sa.Row[Any]) -> StoredProposal | None:
    """Return who proposed a trial; None if its search draws by itself."""
    given = tables.search_inputs.c
    query = sa.select(given.input).where(
        given.experiment_id == trial.experiment_id,
        # Stored in the same moment; few inputs are read so.
        given.time.between(trial.created_at - _MOMENT_S, trial.created_at + _MOMENT_S),
        _is_proposal(),
        given.input["request_id"].as_string() == trial.request_id,
    )
    # A later one was ignored: another proposer was faster.
    query = query.order_by(given.number).limit(1)
    found = connection.execute(query).scalar()
    return None if found is None else msgspec.convert(found, StoredProposal)


def count_proposals(connection: sa.Connection, experiment_id: int) -> tuple[int, int, str | None]:
    """Return how many trials were proposed, how many of them as fallbacks, and the last reason."""
    given = tables.search_inputs.c
    of_search = given.experiment_id == experiment_id, _is_proposal()
    query = sa.select(sa.func.count()).where(*of_search)
    fallbacks = (*of_search, given.input["is_fallback"].as_boolean().is_(True))
    last = sa.select(given.input).where(*fallbacks).order_by(given.number.desc()).limit(1)
    found = connection.execute(last).scalar()
    number = connection.execute(query).scalar_one()
    return (
        number,
        connection.execute(sa.select(sa.func.count()).where(*fallbacks)).scalar_one(),
        None if found is None else found["why"],
    )


def _is_proposal() -> sa.ColumnElement[bool]:
    is_proposal: sa.ColumnElement[bool] = (
        tables.search_inputs.c.input["type"].as_string() == "proposed"
    )
    return is_proposal


_MOMENT_S = 60.0

MAX_RUNG_ENTRIES = 1000
_MOST_FRONTS = 100
# A view is made again after so many times the seconds of making it, however many inputs come.
_REST = 20


class ShownArrival(msgspec.Struct, array_like=True):
    """The rung when a trial arrived."""

    order: int
    rank: int
    num_kept: int
    cutoff: Any


class ShownEntry(msgspec.Struct, array_like=True):
    """A trial at a rung; views stored by earlier versions have no `arrival`."""

    trial_id: int
    metric: Any
    decision: str
    arrival: ShownArrival | None = None


class ShownRung(msgspec.Struct, array_like=True):
    """A rung: all entries by decision, and some of them in their order, first and last included."""

    length: int
    num_by_decision: dict[str, int]
    entries: list[ShownEntry]


Points: TypeAlias = list[tuple[str, Losses]]
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
        # By experiment: the number of inputs that the search had, and its front.
        self._fronts: dict[int, tuple[int, list[tuple[int, Losses]]]] = {}
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def read(self, experiment_id: int) -> Brackets:
        """Return the rungs; for a large live search the result may be some seconds old."""
        found = self._find(experiment_id)
        if found is not None:
            return found
        # Lock per experiment: concurrent readers wait for a single computation.
        with self._locks[experiment_id]:
            found = self._find(experiment_id)
            return self._make(experiment_id) if found is None else found

    def front(self, experiment_id: int) -> list[tuple[int, Losses]]:
        """Return the trials that no other dominates, by their ids, with all losses."""

        def look(transaction: Transaction) -> tuple[int, Points]:
            search = self._searches.peek(transaction, experiment_id)
            number = _num_inputs(transaction.connection, experiment_id)
            return number, [] if search is None else search.points()

        with self._locks[experiment_id]:
            with self._database.read() as connection:
                num_inputs = _num_inputs(connection, experiment_id)
                known = self._fronts.get(experiment_id)
                if known is not None and known[0] == num_inputs:
                    return known[1]
                if not (is_loaded := self._searches.is_loaded(experiment_id)):
                    search = load_search(connection, experiment_id).search
                    points = [] if search is None else search.points()
            if is_loaded:
                num_inputs, points = self._database.write(look).result()
            found = pareto_front(points)
            with self._database.read() as connection:
                ids = _trial_ids(connection, experiment_id, [request_id for request_id, _ in found])
            front = [(ids[request_id], losses) for request_id, losses in found]
            if len(self._fronts) >= _MOST_FRONTS:
                self._fronts.clear()
            self._fronts[experiment_id] = num_inputs, front
            return front

    def _find(self, experiment_id: int) -> Brackets | None:
        with self._database.read() as connection:
            num_inputs = _num_inputs(connection, experiment_id)
            made = self._made.get(experiment_id)
            if made is not None and made.num_inputs == num_inputs:
                return made.brackets
            stored = connection.execute(
                sa.select(tables.search_views).where(
                    tables.search_views.c.experiment_id == experiment_id
                )
            ).first()
        # Stored view first: pages do not refresh after the end of a search, so a view
        # some seconds old would stay.
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
            # Searches change only in the writer thread, so the view is computed there.
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
    """Store the final rungs of a search, if the search is loaded and has rungs."""
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


def _num_inputs(connection: sa.Connection, experiment_id: int) -> int:
    inputs = tables.search_inputs.c
    newest = sa.select(sa.func.max(inputs.number)).where(inputs.experiment_id == experiment_id)
    found: int | None = connection.execute(newest).scalar()
    return 0 if found is None else found + 1


def _read_view(connection: sa.Connection, experiment_id: int, search: Search | None) -> Brackets:
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
                _shown_arrival(entry.arrival),
            )
            for entry in entries
        ],
    )


def _shown_arrival(arrival: Arrival | None) -> ShownArrival | None:
    if arrival is None:
        return None
    cutoff = None if arrival.cutoff is None else encode_float(arrival.cutoff)
    return ShownArrival(arrival.order, arrival.rank, arrival.num_kept, cutoff)


def _trial_ids(
    connection: sa.Connection, experiment_id: int, request_ids: list[str]
) -> dict[str, int]:
    trials = tables.trials.c
    found: dict[str, int] = {}
    for start in range(0, len(request_ids), 500):
        query = sa.select(trials.request_id, trials.id).where(
            trials.experiment_id == experiment_id,
            trials.request_id.in_(request_ids[start : start + 500]),
        )
        found |= {row.request_id: row.id for row in connection.execute(query).all()}
    return found


def _store_view(
    connection: sa.Connection, experiment_id: int, brackets: Brackets, num_inputs: int
) -> None:
    views = tables.search_views
    if connection.execute(
        sa.select(tables.experiments.c.id).where(tables.experiments.c.id == experiment_id)
    ).first():
        connection.execute(sa.delete(views).where(views.c.experiment_id == experiment_id))
        view = msgspec.json.encode(brackets)
        values = {"experiment_id": experiment_id, "num_inputs": num_inputs, "view": view}
        connection.execute(sa.insert(views).values(values))
