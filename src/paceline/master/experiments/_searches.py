"""The searches of the experiments: an append-only input log, snapshots, and a cache."""

import json
import time

from sqlalchemy import Connection, delete, func, insert, select

from paceline import faults
from paceline.config import ExperimentConfig, Searcher, searcher_section, validate_config
from paceline.master.store import Transaction, tables
from paceline.search import (
    Input,
    Operation,
    Progressed,
    Search,
    input_from_json,
    message_to_json,
)

_SNAPSHOT_INPUTS = 100

faults.register("master.search.applied")


class Searches:
    """Apply inputs to searches; state = newest snapshot + the inputs after it.

    Used in the writer thread only.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, tuple[Search, int, int]] = {}

    def apply(self, transaction: Transaction, experiment_id: int, given: Input) -> list[Operation]:
        """Apply one input and store it with the operations that follow from it."""
        connection = transaction.connection
        transaction.after_rollback(lambda: self.forget(experiment_id))
        search, num_inputs, num_in_snapshot = self._load(connection, experiment_id)
        operations = search.apply(given)
        connection.execute(
            insert(tables.search_inputs).values(
                experiment_id=experiment_id,
                number=num_inputs,
                time=time.time(),
                input=json.loads(message_to_json(given)),
                operations=[json.loads(message_to_json(operation)) for operation in operations],
            )
        )
        faults.reach("master.search.applied")
        num_inputs += 1
        # Growing intervals keep the cost per input constant, however long the search is.
        if num_inputs - num_in_snapshot >= max(_SNAPSHOT_INPUTS, num_in_snapshot // 2):
            self._store_snapshot(connection, experiment_id, search, num_inputs)
            num_in_snapshot = num_inputs
        self._loaded[experiment_id] = (search, num_inputs, num_in_snapshot)
        return operations

    def note_progress(self, transaction: Transaction, experiment_id: int, told: Progressed) -> None:
        """Tell a search how far a trial is; this decides nothing and is not stored."""
        transaction.after_rollback(lambda: self.forget(experiment_id))
        self._load(transaction.connection, experiment_id)[0].apply(told)

    def peek(self, connection: Connection, experiment_id: int) -> Search:
        """Return the search as it stands; it must not be changed."""
        return self._load(connection, experiment_id)[0]

    def forget(self, experiment_id: int) -> None:
        """Drop an ended search from the cache."""
        self._loaded.pop(experiment_id, None)

    def _load(self, connection: Connection, experiment_id: int) -> tuple[Search, int, int]:
        loaded = self._loaded.get(experiment_id)
        if loaded is None:
            loaded = self._loaded[experiment_id] = load_search(connection, experiment_id)
        return loaded

    @staticmethod
    def _store_snapshot(
        connection: Connection, experiment_id: int, search: Search, num_inputs: int
    ) -> None:
        snapshots = tables.search_snapshots
        connection.execute(delete(snapshots).where(snapshots.c.experiment_id == experiment_id))
        connection.execute(
            insert(snapshots).values(
                experiment_id=experiment_id, num_inputs=num_inputs, snapshot=search.snapshot()
            )
        )


def load_search(connection: Connection, experiment_id: int) -> tuple[Search, int, int]:
    """Return a search from the database, the number of its inputs and of those in its snapshot."""
    experiments, inputs = tables.experiments, tables.search_inputs
    row = connection.execute(
        select(experiments.c.config, experiments.c.seed).where(experiments.c.id == experiment_id)
    ).one()
    config = validate_config(row.config)
    snapshot = connection.execute(
        select(tables.search_snapshots).where(
            tables.search_snapshots.c.experiment_id == experiment_id
        )
    ).first()
    if snapshot is None:
        search, num_in_snapshot = new_search(config, row.seed), 0
    else:
        search = Search.restore(config.search_config(), config.hyperparameters, snapshot.snapshot)
        num_in_snapshot = snapshot.num_inputs
    for stored in connection.execute(
        select(inputs.c.input)
        .where(inputs.c.experiment_id == experiment_id, inputs.c.number >= num_in_snapshot)
        .order_by(inputs.c.number)
    ).scalars():
        search.apply(input_from_json(json.dumps(stored)))
    num_inputs = connection.execute(
        select(func.count()).where(inputs.c.experiment_id == experiment_id)
    ).scalar_one()
    return search, num_inputs, num_in_snapshot


def missing_methods(connection: Connection) -> list[tuple[int, str]]:
    """Return the experiments that go on whose search method is not installed, with its name."""
    experiments = tables.experiments
    name = experiments.c.config["searcher"]["name"].as_string()
    query = select(experiments.c.id, name).where(
        experiments.c.ended_at.is_(None), experiments.c.external_id.is_(None)
    )
    rows = connection.execute(query.order_by(experiments.c.id))
    return [(id_, name) for id_, name in rows if searcher_section(name) is Searcher]


def new_search(config: ExperimentConfig, seed: int) -> Search:
    """Return a search that has not started."""
    return Search(config.search_config(), config.hyperparameters, seed)
