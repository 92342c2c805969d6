"""Databases of earlier versions; `version_N.sql` is a dump of one that version N wrote."""

import logging
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, select, text

from paceline._cluster.master.authentication import Tokens
from paceline._cluster.master.home_directory import Home, HomeInUseError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store import upgrades as _upgrades
from paceline._cluster.master.store.database import (
    Database,
    DatabaseDamagedError,
    DatabaseVersionError,
    copy_of_version,
)
from paceline._cluster.master.store.messages_from_rows import attempt_views, slots_by_node
from paceline._cluster.master.store.metric_rows_and_times import add_time_mark, read_series
from paceline._cluster.master.store.row_ids_and_counts import (
    ATTEMPTS,
    CHECKPOINTS,
    EXPERIMENTS,
    POINTS,
    TRIALS,
    number_by_state,
)
from paceline._cluster.master.store.series_writer import metric_names
from paceline._cluster.master.upkeep.backup_snapshots import BackupError
from paceline._cluster.master.upkeep.home_restore import restore_copy
from paceline._cluster.messages.master_models import TokenScope
from paceline.journal import TimeSpent


def load(path: Path, version: int) -> Path:
    """Make a database of a version with one experiment, two trials and a metric."""
    dump = Path(__file__).with_name(f"version_{version}.sql").read_text()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a database of version 1."""
    return load(tmp_path / "master.sqlite", 1)


def read(path: Path, what: Callable[[Connection], Any]) -> Any:
    database = Database(path)
    try:
        with database.read() as connection:
            return what(connection)
    finally:
        database.close()


def test_an_earlier_database_keeps_what_it_holds_and_gets_the_new_columns(old: Path) -> None:
    def look(connection: Connection) -> None:
        row = connection.execute(select(tables.experiments)).one()
        assert (row.name, row.description, row.labels) == (
            "first version", "Which rate?", ["digits", "cpu"]
        )  # fmt: skip
        assert (row.notes, row.is_archived, row.forked_from) == ("", False, None)
        assert read_series(connection, 1, "validation", "loss") == [(1, 0.25)]
        assert connection.execute(select(tables.trials)).all()[1].id == 2

    read(old, look)
    read(old, look)


def test_a_database_of_version_2_keeps_what_it_holds_and_counts_no_loss(tmp_path: Path) -> None:
    def look(connection: Connection) -> None:
        row = connection.execute(select(tables.experiments)).one()
        assert (row.name, row.notes, row.num_records_lost) == ("second version", "# Notes", 0)
        trials = connection.execute(select(tables.trials)).all()
        assert [(trial.id, trial.num_records_lost) for trial in trials] == [(1, 0), (2, 0)]

    read(load(tmp_path / "master.sqlite", 2), look)


def test_a_database_of_version_3_keeps_what_it_holds_and_can_take_times(tmp_path: Path) -> None:
    path = load(tmp_path / "master.sqlite", 3)
    database = Database(path)
    record = TimeSpent(time=1.0, event="start", steps_completed=0, seconds={"data_wait": 0.5})
    database.write(lambda t: add_time_mark(t.connection, 1, 0, record)).result()
    database.close()

    def look(connection: Connection) -> None:
        row = connection.execute(select(tables.experiments)).one()
        assert (row.name, row.notes, row.num_records_lost) == ("third version", "# Notes", 2)
        mark = connection.execute(select(tables.time_marks)).one()
        assert (mark.attempt_id, mark.event, mark.seconds) == (1, "start", {"data_wait": 0.5})

    read(path, look)


def test_a_database_of_version_4_keeps_what_it_holds_and_has_no_metadata(tmp_path: Path) -> None:
    def look(connection: Connection) -> None:
        assert connection.execute(select(tables.experiments)).one().name == "fourth version"
        trials = connection.execute(select(tables.trials)).all()
        assert [(trial.id, trial.metadata, trial.alerts) for trial in trials] == [
            (1, None, None), (2, None, None),
        ]  # fmt: skip

    read(load(tmp_path / "master.sqlite", 4), look)


def test_a_database_of_version_5_keeps_what_it_holds(tmp_path: Path) -> None:
    def look(connection: Connection) -> None:
        assert connection.execute(select(tables.experiments)).one().name == "fifth version"
        trial = connection.execute(select(tables.trials)).first()
        assert trial is not None
        assert (trial.metadata, trial.alerts[0]["title"]) == ({"git": "abc"}, "loss")
        assert connection.execute(select(tables.time_marks)).one().seconds == {"data_wait": 0.5}
        for kind, table in (
            (EXPERIMENTS, tables.experiments), (TRIALS, tables.trials),
            (ATTEMPTS, tables.attempts), (CHECKPOINTS, tables.checkpoints),
        ):  # fmt: skip
            states = Counter(connection.execute(select(table.c.state)).scalars())
            assert number_by_state(connection, kind) == states
        num_points = sum(connection.execute(select(tables.series.c.num_points)).scalars())
        assert number_by_state(connection, POINTS) == {"": num_points}
        names = connection.execute(select(tables.series.c.group, tables.series.c.key)).all()
        assert metric_names(connection, 1) == sorted({(name.group, name.key) for name in names})

    read(load(tmp_path / "master.sqlite", 5), look)


def test_a_database_of_version_6_gets_the_kinds_of_its_errors(tmp_path: Path) -> None:
    def look(connection: Connection) -> None:
        trials = connection.execute(select(tables.trials)).all()
        assert [(trial.state, trial.error_kind, trial.retries) for trial in trials] == [
            ("ERROR", "user", 2), ("ERROR", "permanent", 0), ("ACTIVE", None, 0),
        ]  # fmt: skip
        # Their records have to tell it as well.
        query = select(tables.unrecorded.c.row_id).where(tables.unrecorded.c.kind == "trials")
        newest = list(connection.execute(query.order_by(tables.unrecorded.c.id)).scalars())
        assert newest[-2:] == [1, 2]

    read(load(tmp_path / "master.sqlite", 6), look)


def test_a_database_of_version_7_gets_nodes_and_its_attempts_ran_on_the_masters_machine(
    tmp_path: Path,
) -> None:
    def look(connection: Connection) -> None:
        assert connection.execute(select(tables.nodes)).all() == []
        attempts = connection.execute(select(tables.attempts)).all()
        assert {attempt.node_id for attempt in attempts} == {None}
        trials = connection.execute(select(tables.trials)).all()
        assert [trial.error_kind for trial in trials] == ["user", "permanent", None]

    read(load(tmp_path / "master.sqlite", 7), look)


def test_a_database_of_version_8_keeps_its_nodes_and_its_attempts_ran_on_one_each(
    tmp_path: Path,
) -> None:
    def look(connection: Connection) -> None:
        assert [node.name for node in connection.execute(select(tables.nodes))] == ["box"]
        attempts = connection.execute(select(tables.attempts).order_by(tables.attempts.c.id)).all()
        assert {attempt.members for attempt in attempts} == {None}
        held = [slots_by_node(attempt) for attempt in attempts]
        assert held == [{0: [0]}, {0: [1]}, {0: [0]}, {1: [0]}]
        experiments = connection.execute(select(tables.experiments)).all()
        assert {(one.priority, one.weight, one.queue_place) for one in experiments} == {
            (None, None, None)
        }
        for table in (tables.pools, tables.drained_slots):
            assert connection.execute(select(table)).all() == []
        found = attempt_views(connection, 1)
        assert [[node.name for node in one.nodes] for one in found] == [["local"]] * 2 + [["box"]]

    read(load(tmp_path / "master.sqlite", 8), look)


def test_a_database_of_version_9_keeps_its_pools_and_tells_of_no_restarts(tmp_path: Path) -> None:
    def look(connection: Connection) -> None:
        assert [pool.name for pool in connection.execute(select(tables.pools))] == ["big"]
        found = attempt_views(connection, 1)
        assert [(one.restarts, one.last_restart_cause) for one in found] == [(0, None)] * 3

    read(load(tmp_path / "master.sqlite", 9), look)


def test_a_database_of_version_10_keeps_restarts_and_its_nodes_have_not_left(
    tmp_path: Path,
) -> None:
    def look(connection: Connection) -> None:
        [node] = connection.execute(select(tables.nodes)).all()
        assert (node.name, node.seen_at, node.has_left) == ("box", None, False)
        causes = [one.last_restart_cause for one in attempt_views(connection, 1)]
        assert causes == [None, None, "worker 1 was ended by SIGKILL"]

    read(load(tmp_path / "master.sqlite", 10), look)


def test_a_database_of_version_11_keeps_its_tokens_which_are_for_any_node_and_pool(
    tmp_path: Path,
) -> None:
    path = load(tmp_path / "master.sqlite", 11)

    def look(connection: Connection) -> None:
        found = connection.execute(select(tables.tokens).order_by(tables.tokens.c.id)).all()
        assert [(one.name, one.scope, one.node, one.pool) for one in found] == [
            ("box", "runner", None, None), ("ci", "submit", None, None),
        ]  # fmt: skip
        [node] = connection.execute(select(tables.nodes)).all()
        assert (node.name, node.token_id, node.has_left) == ("box", 1, True)

    read(path, look)
    database = Database(path)
    try:
        tokens = Tokens(database)
        made, _ = tokens.create("barn", TokenScope.RUNNER, None, node="barn", pool="gpu").result()
        assert Tokens(database).list() == tokens.list()
        assert Tokens(database).get(made.id) == made
        assert (made.node, made.pool) == ("barn", "gpu")
    finally:
        database.close()


@pytest.mark.parametrize("version", range(1, tables.SCHEMA_VERSION))
def test_an_earlier_database_gets_the_tables_of_a_new_one(tmp_path: Path, version: int) -> None:
    def differences(connection: Connection) -> list[Any]:
        # One index is of an expression, which cannot be compared but by its text.
        options = {"include_object": lambda _, name, *__: name != "ix_experiments_name"}
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, tables.metadata)

    def texts(connection: Connection) -> dict[str, str]:
        query = "SELECT name, sql FROM sqlite_master WHERE type IN ('trigger', 'index')"
        return {row.name: row.sql for row in connection.execute(text(query))}

    old = load(tmp_path / "master.sqlite", version)
    new = tmp_path / "new.sqlite"
    assert read(old, differences) == read(new, differences) == []
    assert read(old, texts) == read(new, texts)


def test_an_earlier_database_is_copied_first(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Database(old).close()
    copy = old.with_name("master.version-1.sqlite")
    assert str(copy) in caplog.text
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("select value from meta").fetchall() == [("1",)]
        assert connection.execute("select count(*) from trials").fetchall() == [(2,)]


def test_an_upgrade_that_fails_leaves_the_database_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operations: Any) -> None:
        _upgrades._to_version_2(operations)
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(_upgrades, "_STEPS", (fail,))
        with pytest.raises(OSError, match="disk is full"):
            Database(old)
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("select value from meta").fetchall() == [("1",)]
        columns = [row[1] for row in connection.execute("pragma table_info(experiments)")]
    assert "notes" not in columns
    Database(old).close()


def test_version_0_is_no_earlier_version(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("update meta set value = '0'")
    with pytest.raises(
        DatabaseVersionError, match=f"must have version {tables.SCHEMA_VERSION}, but has 0"
    ):
        Database(old)


def test_a_newer_database_is_refused_as_it_is_with_the_way_back(tmp_path: Path) -> None:
    path = tmp_path / "master.sqlite"
    Database(path).close()
    newer = tables.SCHEMA_VERSION + 1
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"update meta set value = '{newer}' where key = 'schema_version'")
    before = path.read_bytes()
    problem = f"must have version {tables.SCHEMA_VERSION}, but has {newer}. Nothing was changed."
    with pytest.raises(DatabaseVersionError, match=f"{problem} Hint: start the Paceline version"):
        Database(path)
    for version in (1, tables.SCHEMA_VERSION, newer):
        copy_of_version(path, version).touch()
    kept = copy_of_version(path, tables.SCHEMA_VERSION)
    with pytest.raises(DatabaseVersionError, match=f"`paceline restore {kept}`.*--set-aside"):
        Database(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", range(1, tables.SCHEMA_VERSION))
def test_the_copy_of_before_an_upgrade_leads_back(tmp_path: Path, version: int) -> None:
    path = load(tmp_path / "master.sqlite", version)

    def content() -> list[str]:
        with closing(sqlite3.connect(path)) as connection:
            return list(connection.iterdump())

    before = content()
    Database(path).close()
    upgraded = content()
    assert upgraded != before
    moved_to, _ = restore_copy(copy_of_version(path, version))
    assert content() == before
    assert not copy_of_version(path, version).exists()
    path = moved_to / "master.sqlite"
    assert content() == upgraded


def test_only_such_a_copy_is_put_in_the_place_of_a_database_and_only_without_a_master(
    tmp_path: Path,
) -> None:
    path = tmp_path / "master.sqlite"
    Database(path).close()
    copy = copy_of_version(path, 1)
    copy.write_bytes(path.read_bytes()[:5000])
    for wrong, error in ((path, BackupError), (copy, DatabaseDamagedError)):
        before = path.read_bytes()
        with pytest.raises(error):
            restore_copy(wrong)
        assert path.read_bytes() == before
    with Home(tmp_path).hold(), pytest.raises(HomeInUseError):
        restore_copy(copy)
