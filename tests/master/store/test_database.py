import json
import os
import resource
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from sqlalchemy import func, insert, select

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import (
    Database,
    DatabaseLostError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    Transaction,
)


def put(key: str, value: str = "") -> Callable[[Transaction], str]:
    def job(transaction: Transaction) -> str:
        transaction.connection.execute(insert(tables.meta).values(key=key, value=value))
        return key

    return job


def keys(database: Database) -> set[str]:
    with database.read() as connection:
        found = set(connection.execute(select(tables.meta.c.key)).scalars())
    return found - {"schema_version"}


@pytest.fixture
def hold_writer(database: Database) -> Callable[[], threading.Event]:
    """Return a function that keeps the writer busy until its event is set, so that jobs queue."""

    def hold() -> threading.Event:
        is_held, may_go = threading.Event(), threading.Event()

        def wait(_transaction: Transaction) -> None:
            is_held.set()
            may_go.wait(60)

        database.write(wait)
        is_held.wait(60)
        return may_go

    return hold


def test_a_job_is_stored_when_its_future_is_done(database: Database) -> None:
    assert database.write(put("a")).result() == "a"
    assert keys(database) == {"a"}


def test_what_was_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    first = Database(tmp_path / "db")
    first.write(put("a")).result()
    first.close()
    second = Database(tmp_path / "db")
    assert keys(second) == {"a"}
    second.close()


def test_jobs_that_wait_are_committed_together(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    commits: list[bool] = []
    may_go = hold_writer()
    database.on_commit(commits.append)
    futures = [database.write(put(str(number))) for number in range(20)]
    may_go.set()
    assert [future.result() for future in futures] == [str(number) for number in range(20)]
    assert len(commits) <= 2
    assert keys(database) == {str(number) for number in range(20)}


def test_urgent_jobs_go_first_and_each_kind_in_order(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    order: list[str] = []
    may_go = hold_writer()
    futures = [
        database.write(lambda _, name=name: order.append(name), is_urgent=name.startswith("u"))
        for name in ("a", "u1", "b", "u2")
    ]
    may_go.set()
    for future in futures:
        future.result()
    assert order == ["u1", "u2", "a", "b"]


def test_a_job_that_is_given_up_while_its_commit_fails_does_not_end_the_writer(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    may_go = hold_writer()
    given_up = database.write(put("a"))
    # As a request does whose sender leaves at this moment.
    given_up.done = lambda: not given_up.cancel()  # type: ignore[method-assign]
    assert database.write(put("d")).cancel()
    other = database.write(put("b"))
    database._broken = DatabaseUnavailableError("The disk is away.")
    may_go.set()
    with pytest.raises(DatabaseUnavailableError, match="is away"):
        other.result()
    database._broken = None
    assert database.write(put("c")).result() == "c"


def test_all_is_stored_and_forced_without_a_descriptor_that_is_left(database: Database) -> None:
    def job(transaction: Transaction, number: int) -> None:
        put(str(number))(transaction)
        transaction.force()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest_free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free.fileno() + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                open(os.devnull)  # noqa: SIM115 - it cannot be opened
            futures = [database.write(partial(job, number=number)) for number in range(40)]
            for future in futures:
                future.result()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert keys(database) == {str(number) for number in range(40)}


def test_a_failing_job_takes_back_only_itself(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    done: list[str] = []

    def fail(transaction: Transaction) -> None:
        put("lost")(transaction)
        transaction.after_rollback(lambda: done.append("rolled back"))
        transaction.after_commit(lambda: done.append("committed"))
        raise ValueError("no good")

    may_go = hold_writer()
    before = database.write(put("before"))
    failing = database.write(fail)
    after = database.write(put("after"))
    may_go.set()
    with pytest.raises(ValueError, match="no good"):
        failing.result()
    assert (before.result(), after.result()) == ("before", "after")
    assert keys(database) == {"before", "after"}
    assert done == ["rolled back"]


def test_a_job_that_breaks_a_constraint_fails_alone(database: Database) -> None:
    database.write(put("a")).result()
    failing, after = database.write(put("a")), database.write(put("b"))
    with pytest.raises(Exception, match="UNIQUE"):
        failing.result()
    after.result()
    assert keys(database) == {"a", "b"}


def test_when_the_commit_fails_every_job_of_it_fails_and_the_next_one_works(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    """A deferred constraint is checked at the commit only."""
    rolled_back: list[str] = []

    def orphan(transaction: Transaction) -> None:
        transaction.connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        transaction.connection.execute(
            insert(tables.search_inputs).values(
                experiment_id=999, number=0, time=0.0, input={}, operations=[]
            )
        )
        transaction.after_rollback(lambda: rolled_back.append("orphan"))

    def innocent(transaction: Transaction) -> None:
        put("innocent")(transaction)
        transaction.after_rollback(lambda: rolled_back.append("innocent"))

    may_go = hold_writer()
    futures = [database.write(innocent), database.write(orphan)]
    may_go.set()
    for future in futures:
        with pytest.raises(Exception, match="FOREIGN KEY"):
            future.result()
    assert rolled_back == ["innocent", "orphan"]
    assert keys(database) == set()
    database.write(put("next")).result()
    assert keys(database) == {"next"}


def test_an_action_after_the_commit_sees_it_and_its_error_harms_nobody(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[set[str]] = []

    def job(transaction: Transaction) -> str:
        put("a")(transaction)
        transaction.after_commit(lambda: seen.append(keys(database)))
        transaction.after_commit(lambda: json.loads("{"))
        transaction.after_commit(lambda: seen.append(keys(database)))
        return "done"

    assert database.write(job).result() == "done"
    assert seen == [{"a"}, {"a"}]
    assert "An action after a transaction failed" in caplog.text


def test_a_canceled_job_is_not_run(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    may_go = hold_writer()
    canceled, other = database.write(put("canceled")), database.write(put("other"))
    assert canceled.cancel()
    may_go.set()
    other.result()
    assert keys(database) == {"other"}


def test_listeners_hear_whether_there_were_events(database: Database) -> None:
    heard: list[bool] = []
    database.on_commit(heard.append)
    database.write(put("a")).result()
    database.write(lambda transaction: transaction.emit("progress", 1, None, x=1)).result()
    database.write(put("b")).result()
    database.close()
    assert heard == [False, True, False]


def test_an_event_keeps_nulls_and_texts_and_refuses_numbers_that_json_lacks(
    database: Database,
) -> None:
    told = {"a": None, "b": "null é \ud800", "c": [1, 0.1, 1e300, True], "d": {"e": ("f",)}}
    database.write(lambda transaction: transaction.emit("progress", 1, None, **told)).result()
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            database.write(lambda t, n=number: t.emit("progress", 1, None, x=n)).result()
    with database.read() as connection:
        [row] = connection.execute(select(tables.events)).all()
    assert row.data == told | {"d": {"e": ["f"]}}
    assert (row.kind, row.experiment_id, row.trial_id) == ("progress", 1, None)


def test_event_ids_are_not_used_again_after_old_events_are_deleted(database: Database) -> None:
    def emit(transaction: Transaction) -> None:
        transaction.emit("progress", 1)

    def newest(transaction: Transaction) -> int:
        found: int = transaction.connection.execute(select(func.max(tables.events.c.id))).scalar()
        return found

    database.write(emit).result()
    first = database.write(newest).result()
    database.write(lambda t: t.connection.execute(tables.events.delete())).result()
    database.write(emit).result()
    assert database.write(newest).result() == first + 1


def test_a_reader_sees_one_state_while_others_write(database: Database) -> None:
    with database.read() as first, database.read() as second:
        count = select(func.count()).select_from(tables.meta)
        assert first.execute(count).scalar() == 1
        database.write(put("a")).result()
        assert first.execute(count).scalar() == 1
        assert second.execute(count).scalar() == 2
    with database.read() as later:
        assert later.execute(count).scalar() == 2


def test_readers_work_while_a_job_is_running(
    database: Database, hold_writer: Callable[[], threading.Event]
) -> None:
    may_go = hold_writer()
    assert keys(database) == set()
    may_go.set()


def test_close_finishes_what_was_queued(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    futures = [database.write(put(str(number))) for number in range(200)]
    database.close()
    assert [future.result(timeout=0) for future in futures] == [str(n) for n in range(200)]


def test_the_file_is_private(tmp_path: Path, database: Database) -> None:
    assert stat.S_IMODE((tmp_path / "master.sqlite").stat().st_mode) == 0o600


def test_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "db"
    Database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("update meta set value = '999' where key = 'schema_version'")
    connection.close()
    with pytest.raises(
        DatabaseVersionError,
        match=rf"version from \d+ to {tables.SCHEMA_VERSION}, but has 999.*Hint",
    ):
        Database(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("select value from meta").fetchall() == [("999",)]
    connection.close()


@pytest.mark.parametrize(
    "content", [b"this is a text\n" * 500, b"SQLite format 3\0" + b"\xff" * 5000, b"short"]
)
def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "db"
    path.write_bytes(content)
    with pytest.raises(DatabaseVersionError, match=r"db' must be a Paceline database.*Hint"):
        Database(path)
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table notes (text)")
    connection.close()
    with pytest.raises(DatabaseVersionError, match="must be a Paceline database") as refusal:
        Database(path)
    # What refused it is still known by the error's traceback, so that nothing else closes it.
    assert refusal.tb
    assert str(path) not in [file.path for file in psutil.Process().open_files()]


@pytest.mark.parametrize("statement", [None, "PRAGMA journal_mode=WAL"])
def test_a_file_from_a_crash_before_the_first_table_becomes_a_database(
    tmp_path: Path, statement: str | None
) -> None:
    path = tmp_path / "db"
    path.touch()
    if statement is not None:
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.close()
    database = Database(path)
    database.write(put("a")).result()
    assert keys(database) == {"a"}
    database.close()


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
@pytest.mark.parametrize("by", ["deleted", "replaced"])
def test_a_file_that_is_lost_is_noticed_and_nothing_more_is_stored(
    tmp_path: Path, by: str, end: str
) -> None:
    """SQLite itself would go on in a file that nobody finds, or make an empty one."""
    database = Database(tmp_path / "master.sqlite")
    path = tmp_path / f"master.sqlite{end}"
    try:
        database.write(put("kept")).result()
        assert keys(database) == {"kept"}
        if by == "replaced":
            shutil.copy(path, tmp_path / "other")
            (tmp_path / "other").replace(path)
        else:
            path.unlink()
        with pytest.raises(DatabaseLostError, match=f"'{path}' was deleted or replaced"):
            database.write(put("lost")).result()
        assert isinstance(database.failure, DatabaseLostError)
        with ThreadPoolExecutor(60) as pool:
            # More readers than connections that were open before.
            found = [pool.submit(keys, database) for _ in range(60)]
        errors = {type(each.exception()) for each in found}
        assert errors <= {type(None), DatabaseLostError}
        assert all(each.result() == {"kept"} for each in found if each.exception() is None)
    finally:
        database.close()
    assert (tmp_path / "master.sqlite").exists() == ((by, end) != ("deleted", ""))


def test_a_lost_file_is_noticed_without_a_change_to_store(
    tmp_path: Path, database: Database
) -> None:
    (tmp_path / "master.sqlite").unlink()
    while database.failure is None:
        time.sleep(0.05)
    assert isinstance(database.failure, DatabaseLostError)
