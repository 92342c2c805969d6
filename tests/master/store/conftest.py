"""Databases and log files on disk."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.trial_logs import LogStore


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Return an open, new database."""
    opened = Database(tmp_path / "master.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def logs(tmp_path: Path) -> LogStore:
    """Return an empty log store."""
    return LogStore(tmp_path / "logs")


@pytest.fixture
def add_trial(database: Database) -> Callable[..., int]:
    """Return a function that stores a trial whose attempts resumed from the given steps."""

    def add(*resumed_steps: int) -> int:
        def job(transaction: Transaction) -> int:
            connection, now = transaction.connection, time.time()
            experiment = connection.execute(
                insert(tables.experiments).values(
                    name="stored", state="ACTIVE", config={}, warnings=[], seed=0, created_at=now
                )
            ).inserted_primary_key[0]
            trial_id: int = connection.execute(
                insert(tables.trials).values(
                    experiment_id=experiment, request_id=str(experiment), state="ACTIVE",
                    hparams={}, seed=0, created_at=now,
                )
            ).inserted_primary_key[0]  # fmt: skip
            for number, steps in enumerate(resumed_steps, 1):
                connection.execute(
                    insert(tables.attempts).values(
                        trial_id=trial_id, experiment_id=experiment, number=number, state="RUNNING",
                        slots=[0], created_at=now, started_at=now, resumed_steps=steps,
                    )
                )  # fmt: skip
            return trial_id

        return database.write(job).result()

    return add
