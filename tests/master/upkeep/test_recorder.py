"""Records that a master makes beside its database."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, event, func, insert, select, update

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import JournalKey, RunInfo
from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.recovery_rows import ALL, note_experiment
from paceline._cluster.master.upkeep.rebuild import rebuild_database
from paceline._cluster.master.upkeep.recovery_records import read_record, record_path, write_some
from paceline.journal import MetricsReported, RunDirectory


def test_experiments_that_are_recorded_whole_come_some_at_a_time(tmp_path: Path) -> None:
    """So that a rest follows each part, and requests are answered meanwhile."""
    (tmp_path / "records").mkdir()
    database = Database(tmp_path / "master.sqlite")

    def num_left() -> int:
        query = select(func.count()).where(tables.unrecorded.c.kind == ALL)
        with database.read() as connection:
            return int(connection.execute(query).scalar_one())

    try:
        for number in range(1, 51):
            database.write(lambda t, n=number: note_experiment(t.connection, n)).result()
        left = [num_left()]
        while write_some(database, tmp_path):
            left.append(num_left())
        assert left == [50, 30, 10, 0]
    finally:
        database.close()


def test_inputs_of_a_moment_are_read_together_and_recorded_once_in_their_order(
    make_master: Any,
) -> None:
    master = make_master(1)
    master.create(searcher={"name": "random", "metric": "loss", "max_trials": 2})
    database, home = master.core.database, master.home.path
    while write_some(database, home):
        pass
    inputs = tables.search_inputs
    new = [
        {"experiment_id": 1, "number": number, "time": 1.0, "input": {"n": number},
         "operations": []}
        for number in range(1000, 1400)
    ]  # fmt: skip

    def add(transaction: Transaction) -> None:
        transaction.connection.execute(insert(inputs), new)
        changed = update(inputs).where(inputs.c.number == 1000).values(input={"n": -1})
        transaction.connection.execute(changed)

    database.write(add).result()
    asked: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        while write_some(database, home):
            pass
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len([one for one in asked if "search_inputs" in one]) == 1
    rows = [row for _, row in read_record(record_path(home, 1))]
    recorded = [row.values for row in rows if row.table == "search_inputs"][-len(new) :]
    assert [row["number"] for row in recorded] == list(range(1000, 1400))
    assert [json.loads(row["input"])["n"] for row in recorded] == [-1, *range(1001, 1400)]


def test_pools_nodes_and_drained_slots_are_rebuilt_as_they_were(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare()
    database = Database(home.database_path)
    facts = {"name": "box", "key": "k", "version": "1", "protocol": 1}
    node = {"id": 4, "name": "box", "key": "k", "session": 7, "facts": facts, "is_draining": True,
            "registered_at": 1.0, "seen_at": 2.0, "has_left": True}  # fmt: skip
    pools = [{"name": name, "policy": "priority", "max_slots": 3, "labels": {"gpu": "a"},
              "backfill": True, "half_life_hours": 12.5, "silent_after_s": 60.0,
              "unused_after_s": 1.5, "pause_after_s": None, "best_priority": 7,
              "interactive_first": "09:00-18:00",
              "open_to": ["ada", "@lab"], "own_runners": True}
             for name in ("big", "gone")]  # fmt: skip
    quota = {"user": "eve", "project_id": 0, "weight": 2.0, "max_slots": 3, "slot_hours": 1.5,
             "checkpoint_bytes": None, "media_bytes": None, "revision": 4}  # fmt: skip
    reservation = {"id": 1, "node": "box", "user": "eve", "begins_at": 1.0, "ends_at": 2.0}
    slots = [{"node_id": 0, "slot": 1}, {"node_id": 4, "slot": 0}, {"node_id": 4, "slot": 2}]
    token = {"id": 3, "name": "box", "scope": "runner", "digest": "d", "created_at": 1.0,
             "expires_at": None, "revoked_at": None, "node": "box", "pool": "big",
             "user": "eve"}  # fmt: skip
    rule = {"kind": "policy", "parent": "1", "name": "cost", "content": {"rule": {"required": []}},
            "created_at": 1.0, "changed_at": 2.0, "experiment_id": None,
            "project_id": 1}  # fmt: skip
    wanted = {
        tables.documents: [rule],
        user_tables.tokens: [token],
        tables.nodes: [node | {"token_id": 3}],
        tables.pools: pools[:1],
        tables.drained_slots: slots[:2],
        user_tables.quotas: [quota],
        user_tables.reservations: [reservation],
    }

    def change(transaction: Transaction) -> None:
        connection = transaction.connection
        connection.execute(insert(user_tables.tokens).values(**token))
        connection.execute(insert(tables.nodes).values(**node, token_id=3))
        connection.execute(insert(tables.pools), pools)
        connection.execute(insert(tables.drained_slots), slots)
        connection.execute(insert(user_tables.quotas).values(**quota))
        for name in ("cost", "gone"):
            connection.execute(insert(tables.documents).values(**rule | {"name": name}))
        connection.execute(insert(tables.documents).values(**rule | {"kind": "notes"}))
        connection.execute(insert(user_tables.reservations).values(**reservation))

    def delete_some(transaction: Transaction) -> None:
        connection = transaction.connection
        connection.execute(delete(tables.pools).where(tables.pools.c.name == "gone"))
        connection.execute(delete(tables.drained_slots).where(tables.drained_slots.c.slot == 2))
        connection.execute(delete(tables.documents).where(tables.documents.c.name == "gone"))

    try:
        for job in (change, delete_some):
            database.write(job).result()
            while write_some(database, tmp_path):
                pass
    finally:
        database.close()
    rebuild_database(tmp_path)
    database = Database(home.database_path)
    try:
        with database.read() as connection:
            for table, rows in wanted.items():
                found = connection.execute(select(table)).mappings()
                assert [dict(row) for row in found] == rows
    finally:
        database.close()


def test_what_a_search_has_judged_is_not_judged_again(make_master: Any) -> None:
    """The journal of an attempt that runs is read anew up to the last input of its search."""
    master = make_master(1)
    master.create(
        searcher={"name": "adaptive_asha", "metric": "loss", "max_trials": 4, "max_length": 16,
                  "sampler": "random"},
    )  # fmt: skip
    master.schedule()
    while write_some(master.core.database, master.home.path):
        pass
    records = [
        MetricsReported(time=float(step), group="validation", steps_completed=step,
                        metrics={"loss": 1.0 / step})
        for step in (1, 4)
    ]  # fmt: skip
    info = RunInfo(run_id="trial-1", name="x", created=0.0, checkpoint_storage="/nowhere")
    run = RunDirectory.create(master.home.attempts_path / "1" / "run", info)
    with closing(JournalWriter(run.journal_path(JournalKey(1, 0, 0)))) as journal:
        for record in records:
            journal.append(record)
    master.report(1, 0, *(("validation", one.steps_completed, one.metrics) for one in records))

    def inputs() -> list[Any]:
        database = sqlite3.connect(master.home.database_path)
        with closing(database):
            return database.execute(
                "SELECT number, input, operations FROM search_inputs"
            ).fetchall()

    while write_some(master.core.database, master.home.path):
        pass
    before = inputs()
    assert len(before) >= 2
    for path in master.home.path.glob("master.sqlite*"):
        path.rename(path.with_name(f"old-{path.name}"))
    rebuild_database(master.home.path)
    assert inputs() == before
    with closing(sqlite3.connect(master.home.database_path)) as database:
        told = database.execute("SELECT count(*) FROM events WHERE kind = 'progress'").fetchone()
    assert told == (0,), "a rebuild loads no search, whose method may be missing"
