"""The searches of the experiments: an append-only input log, snapshots, and a cache."""

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    String,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)

from paceline import faults
from paceline.config import MissingSearcher
from paceline.master.store import Transaction, config_of, tables
from paceline.search import (
    Input,
    Operation,
    Progressed,
    Search,
    SearchMethodError,
    input_from_json,
    message_to_json,
)

logger = logging.getLogger(__name__)

_SNAPSHOT_INPUTS = 100

faults.register("master.search.applied")


@dataclass(slots=True)
class LoadedSearch:
    """A search and how many inputs it has; without its method, what happens is kept for later."""

    search: Search | None
    num_inputs: int
    num_in_snapshot: int


class Searches:
    """Apply inputs to searches; state = newest snapshot + the inputs after it.

    The method of a search can be missing, as it may come from a package. Inputs are stored without
    operations then, and `catch_up` lets the search decide once the method is back.

    Used in the writer thread only.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, LoadedSearch] = {}

    def apply(self, transaction: Transaction, experiment_id: int, given: Input) -> list[Operation]:
        """Apply one input and store it with the operations that follow from it.

        Raises:
            SearchMethodError: The search's method fails.
        """
        loaded = self._load(transaction, experiment_id)
        operations = None if loaded.search is None else loaded.search.apply(given)
        transaction.connection.execute(
            insert(tables.search_inputs).values(
                experiment_id=experiment_id,
                number=loaded.num_inputs,
                time=time.time(),
                input=json.loads(message_to_json(given)),
                operations=_as_json(operations),
            )
        )
        # A decision that was carried out must not be taken again, maybe in another way.
        transaction.force()
        faults.reach("master.search.applied")
        loaded.num_inputs += 1
        # Growing intervals keep the cost per input constant, however long the search is.
        num_fresh = loaded.num_inputs - loaded.num_in_snapshot
        if num_fresh >= max(_SNAPSHOT_INPUTS, loaded.num_in_snapshot // 2):
            self._store_snapshot(transaction.connection, experiment_id, loaded)
        return operations or []

    def catch_up(
        self, transaction: Transaction, experiment_id: int
    ) -> list[tuple[Input, list[Operation]]]:
        """Apply the inputs that came while the search's method was missing.

        Raises:
            SearchMethodError: The search's method fails.
        """
        loaded = self._load(transaction, experiment_id)
        if loaded.search is None:
            return []
        inputs, decided = tables.search_inputs, []
        waiting = select(inputs.c.number, inputs.c.input).where(
            inputs.c.experiment_id == experiment_id, _is_undecided()
        )
        for number, stored in list(transaction.connection.execute(waiting.order_by("number"))):
            given = input_from_json(json.dumps(stored))
            operations = loaded.search.apply(given)
            decided.append((given, operations))
            transaction.connection.execute(
                update(inputs)
                .where(inputs.c.experiment_id == experiment_id, inputs.c.number == number)
                .values(operations=_as_json(operations))
            )
        return decided

    def check(self, transaction: Transaction, experiment_id: int) -> None:
        """Store and restore a search that has just started, so that it does not fail at it later.

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

    def note_progress(self, transaction: Transaction, experiment_id: int, told: Progressed) -> None:
        """Tell a search how far a trial is; this decides nothing and is not stored."""
        search = self.peek(transaction, experiment_id)
        if search is not None:
            search.apply(told)

    def peek(self, transaction: Transaction, experiment_id: int) -> Search | None:
        """Return the search as it stands, None if its method is missing; it must not be changed."""
        return self._load(transaction, experiment_id).search

    def is_loaded(self, experiment_id: int) -> bool:
        """Tell whether a search is at hand; may be asked from any thread."""
        return experiment_id in self._loaded

    def forget(self, experiment_id: int) -> None:
        """Drop an ended search from the cache."""
        self._loaded.pop(experiment_id, None)

    def _load(self, transaction: Transaction, experiment_id: int) -> LoadedSearch:
        transaction.after_rollback(lambda: self.forget(experiment_id))
        loaded = self._loaded.get(experiment_id)
        if loaded is None:
            loaded = load_search(transaction.connection, experiment_id)
            self._loaded[experiment_id] = loaded
        return loaded

    @staticmethod
    def _store_snapshot(connection: Connection, experiment_id: int, loaded: LoadedSearch) -> None:
        if loaded.search is None:
            return
        snapshots = tables.search_snapshots
        connection.execute(delete(snapshots).where(snapshots.c.experiment_id == experiment_id))
        connection.execute(
            insert(snapshots).values(
                experiment_id=experiment_id,
                num_inputs=loaded.num_inputs,
                snapshot=loaded.search.snapshot(),
            )
        )
        loaded.num_in_snapshot = loaded.num_inputs


def load_search(connection: Connection, experiment_id: int) -> LoadedSearch:
    """Return a search from the database."""
    inputs = tables.search_inputs
    row = _row(connection, experiment_id)
    snapshots = tables.search_snapshots
    snapshot = connection.execute(
        select(snapshots).where(snapshots.c.experiment_id == experiment_id)
    ).first()
    num_in_snapshot = 0 if snapshot is None else snapshot.num_inputs
    num_inputs = connection.execute(
        select(func.count()).where(inputs.c.experiment_id == experiment_id)
    ).scalar_one()
    decided = connection.execute(
        select(inputs.c.input)
        .where(
            inputs.c.experiment_id == experiment_id,
            inputs.c.number >= num_in_snapshot,
            ~_is_undecided(),
        )
        .order_by(inputs.c.number)
    ).scalars()
    search = None
    try:
        search = _restored(row, None if snapshot is None else snapshot.snapshot)
        for stored in decided:
            search.apply(input_from_json(json.dumps(stored)))
    except SearchMethodError as error:
        if num_inputs == 0:
            raise
        # An error in code that worked before is that of another version: all is kept until one
        # that works is back. A method that is not installed was told of when the master started.
        if not isinstance(config_of(row).searcher, MissingSearcher):
            logger.warning("The search of experiment %d waits: %s", experiment_id, error)
        search = None
    return LoadedSearch(search, num_inputs, num_in_snapshot)


def _row(connection: Connection, experiment_id: int) -> Row[Any]:
    experiments = tables.experiments
    return connection.execute(select(experiments).where(experiments.c.id == experiment_id)).one()


def _restored(row: Row[Any], snapshot: dict[str, Any] | None) -> Search:
    config = config_of(row)
    if snapshot is None:
        return Search(config.search_config(), config.hyperparameters, row.seed)
    return Search.restore(config.search_config(), config.hyperparameters, snapshot)


def missing_methods(connection: Connection) -> list[tuple[int, str]]:
    """Return the experiments that go on whose search method is missing, with its name."""
    experiments = tables.experiments
    rows = connection.execute(select(experiments).where(*_is_going_on()).order_by("id"))
    searchers = [(row.id, config_of(row).searcher) for row in rows]
    return [(id_, one.name) for id_, one in searchers if isinstance(one, MissingSearcher)]


def undecided_searches(connection: Connection) -> list[int]:
    """Return the experiments that go on whose searches have inputs to catch up with."""
    experiments, inputs = tables.experiments, tables.search_inputs
    query = (
        select(experiments.c.id)
        .join(inputs, inputs.c.experiment_id == experiments.c.id)
        .where(*_is_going_on(), _is_undecided())
    )
    return list(connection.execute(query.distinct().order_by(experiments.c.id)).scalars())


def _is_going_on() -> tuple[ColumnElement[bool], ...]:
    experiments = tables.experiments
    return experiments.c.ended_at.is_(None), experiments.c.external_id.is_(None)


def _is_undecided() -> ColumnElement[bool]:
    return cast(tables.search_inputs.c.operations, String) == "null"


def _as_json(operations: list[Operation] | None) -> Any:
    if operations is None:
        return None
    return [json.loads(message_to_json(operation)) for operation in operations]
