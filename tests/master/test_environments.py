"""Environments of attempts and the source of experiments, through the API."""

import sqlite3
from contextlib import closing
from typing import Any

from sqlalchemy import func, select

from paceline._cluster.master.store import tables
from paceline._cluster.master.upkeep.check import check
from paceline._cluster.master.upkeep.rebuild import rebuild_database
from paceline._cluster.master.upkeep.recovery_records import read_record, record_path, write_some
from paceline.client import Client

SINGLE = {"name": "single", "metric": "loss"}
ENVIRONMENT = {"paceline": "1.0", "packages": {"torch": "2.13.0"}, "host": {"name": "box"}}


def begin(master: Any, attempt_id: int, rank: int = 0, **changed: Any) -> None:
    record = {
        "type": "attempt_started", "time": 1.0, "attempt": 0, "generation": 0, "rank": rank,
        "world_size": 1, "pid": 1, "host": "box", "resumed_from": None, "steps_completed": 0,
    } | changed  # fmt: skip
    batch = {"generation": 0, "rank": rank, "records": [[0, record]]}
    reply = master.attempt(attempt_id, "records", batches=[batch])
    assert reply.status_code == 200, reply.text


def num_stored(master: Any) -> int:
    with master.core.database.read() as connection:
        query = select(func.count()).select_from(tables.environments)
        return int(connection.execute(query).scalar_one())


def environments(master: Any, trial_id: int) -> Any:
    return master.http.get(f"/trials/{trial_id}/environments").json()


def test_equal_environments_are_stored_once_and_go_with_the_last_attempt(master: Any) -> None:
    ids = [master.create(searcher=SINGLE, hyperparameters={}) for _ in range(2)]
    master.schedule()
    for attempt_id in (1, 2):
        begin(master, attempt_id, environment=ENVIRONMENT)
        begin(master, attempt_id, rank=1)
    assert num_stored(master) == 1
    for trial_id in (1, 2):
        [found] = environments(master, trial_id)
        assert found == {"number": 1, "environment": ENVIRONMENT, "source": None}
    for number, experiment_id in enumerate(ids):
        master.http.post(f"/experiments/{experiment_id}/kill")
        end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0}
        master.attempt(number + 1, "end", **end)
        master.schedule()
        assert master.http.delete(f"/experiments/{experiment_id}").status_code in (200, 204)
        assert num_stored(master) == 1 - number


def test_the_source_goes_with_the_experiment_and_its_forks(master: Any) -> None:
    source = {"commit": "a" * 40, "branch": "trunk", "num_diff_bytes": 9, "diff": "-lr = 1\n"}
    config = {"name": "one", "entrypoint": "true", "searcher": SINGLE, "hyperparameters": {}}
    body = {"config": config, "source": source}
    experiment_id = master.http.post("/experiments", json=body).json()["id"]
    config["name"] = "fork"
    reply = master.http.post(f"/experiments/{experiment_id}/fork", json={"config": config})
    assert reply.status_code == 201, reply.text
    master.schedule()
    for trial_id in (1, 2):
        [found] = environments(master, trial_id)
        assert found["environment"] is None
        assert found["source"] == source | {"num_untracked_files": 0}
    with Client(f"http://127.0.0.1:{master.port}", master.home.token) as client:
        [one] = client.get_trial(1).environments()
        assert one.source is not None
        assert one.source["commit"] == "a" * 40


def test_a_run_without_a_master_tells_its_own_source(master: Any) -> None:
    info = {"run_id": "r1", "name": "run", "created": 1.0, "checkpoint_storage": "/c"}
    reply = master.http.put("/runs/r1", json={"info": info, "path": "/p"})
    assert reply.status_code == 200, reply.text
    started = {
        "type": "attempt_started", "time": 1.0, "attempt": 0, "generation": 0, "rank": 0,
        "world_size": 1, "pid": 1, "host": "box", "resumed_from": None, "steps_completed": 0,
        "environment": ENVIRONMENT | {"source": {"commit": "b"}},
    }  # fmt: skip
    batch = {"attempt": 0, "generation": 0, "rank": 0, "records": [[0, started]]}
    reply = master.http.post("/runs/r1/records", json={"batches": [batch], "is_alive": True})
    assert reply.status_code == 200, reply.text
    [found] = environments(master, 1)
    assert (found["environment"], found["source"]) == (ENVIRONMENT, {"commit": "b"})


def test_a_database_that_is_rebuilt_has_the_environments_of_ended_attempts(
    make_master: Any,
) -> None:
    """The record of an experiment has each one once, whichever attempt ends first."""
    master = make_master(4)
    grid = {"name": "grid", "metric": "loss"}
    rates = {"type": "categorical", "vals": [1, 2, 3]}
    experiments = [
        master.create(searcher=grid, hyperparameters={"rate": rates}),
        master.create(searcher=SINGLE, hyperparameters={}),
    ]
    master.schedule()
    other = ENVIRONMENT | {"host": {"name": "bench"}}
    for attempt_id, environment in enumerate([ENVIRONMENT, ENVIRONMENT, other, ENVIRONMENT], 1):
        begin(master, attempt_id, environment=environment)
    for time, attempt_id in enumerate((2, 1, 3, 4)):
        end = {"reason": "exited", "code": 1, "signal": None, "time": 10.0 + time}
        master.attempt(attempt_id, "end", **end)
        while write_some(master.core.database, master.home.path):
            pass
    lines = [
        sum(row is not None and row.table == "environments" for _, row in read_record(path))
        for path in (record_path(master.home.path, one) for one in experiments)
    ]
    assert lines == [2, 1]
    assert check(master.home.path).findings == []
    for path in master.home.path.glob("master.sqlite*"):
        path.rename(path.with_name(f"old-{path.name}"))
    rebuild_database(master.home.path)
    query = (
        "SELECT environment FROM attempts WHERE environment IN (SELECT digest FROM environments)"
    )
    with closing(sqlite3.connect(master.home.database_path)) as connection:
        found = connection.execute(f"{query} ORDER BY id").fetchall()
    assert len(found) == 4
    assert len(set(found)) == 2
    assert found[2] not in (found[0], found[1], found[3])
