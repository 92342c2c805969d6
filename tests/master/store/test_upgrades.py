"""Upgrades, by an artificial step after the first release, and refusals of what came before it."""

import logging
import sqlite3
import stat
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy import Connection, select

from paceline._cluster.master.home_directory import Home, HomeInUseError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store import upgrades as _upgrades
from paceline._cluster.master.store.database import (
    Database,
    DatabaseDamagedError,
    DatabaseVersionError,
    copy_of_version,
)
from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.backup_directories import BackupError
from paceline._cluster.master.upkeep.check import fix
from paceline._cluster.master.upkeep.restore import restore_copy

STORED = Path(__file__).parents[2] / "stored"
FIRST = tables.FIRST_SCHEMA_VERSION
NEWEST = tables.SCHEMA_VERSION
MUST_HAVE = f"must have a version from {FIRST} to {NEWEST}"


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def versions(path: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(path)) as connection:
        query = "select value from meta where key = 'schema_version'"
        return connection.execute(query).fetchall()


def columns(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[1] for row in connection.execute("pragma table_info(pools)")]


def read(path: Path, what: Callable[[Connection], Any]) -> Any:
    database = Database(path)
    try:
        with database.read() as connection:
            return what(connection)
    finally:
        database.close()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a database of the current version with a pool."""
    path = tmp_path / "master.sqlite"
    database = Database(path)
    row = sa.insert(tables.pools).values(name="big", policy="fifo", labels=[])
    database.write(lambda transaction: transaction.connection.execute(row)).result()
    database.close()
    return path


def add_column(operations: Operations) -> None:
    column = sa.Column("notes", sa.Text(), nullable=False, server_default="none")
    operations.add_column("pools", column)


@pytest.fixture
def next_version(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `old` was made, have the next version of Paceline add a column to the pools."""
    monkeypatch.setattr(tables, "SCHEMA_VERSION", NEWEST + 1)
    monkeypatch.setattr(_upgrades, "STEPS", (*_upgrades.STEPS, add_column))


def test_each_version_since_the_first_release_has_its_step() -> None:
    assert len(_upgrades.STEPS) == NEWEST - FIRST


def schema(path: Path) -> dict[str, tuple[Any, ...]]:
    """Return columns, keys and indexes of each table."""
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        inspector = sa.inspect(engine)
        return {
            name: (
                [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(name)],
                inspector.get_pk_constraint(name)["constrained_columns"],
                sorted((i["name"], i["column_names"]) for i in inspector.get_indexes(name)),
            )
            for name in inspector.get_table_names()
        }
    finally:
        engine.dispose()


def test_the_database_of_the_first_release_gets_the_tables_of_a_new_one(tmp_path: Path) -> None:
    with tarfile.open(STORED / "home_13.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    [stored] = tmp_path.rglob("master.sqlite")
    Database(stored).close()
    Database(tmp_path / "new.sqlite").close()
    assert schema(stored) == schema(tmp_path / "new.sqlite")


@pytest.mark.usefixtures("next_version")
def test_an_upgraded_database_keeps_what_it_holds_and_gets_the_new_column(old: Path) -> None:
    def look(connection: Connection) -> tuple[str, str]:
        row = connection.execute(select(tables.pools, sa.text("notes"))).one()
        return row.name, row.notes

    # The second start upgrades no more: the column would be there twice.
    assert read(old, look) == read(old, look) == ("big", "none")
    assert versions(old) == [(str(NEWEST + 1),)]


@pytest.mark.usefixtures("next_version")
def test_an_earlier_database_is_copied_first(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Database(old).close()
    copy = copy_of_version(old, NEWEST)
    assert str(copy) in caplog.text
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert versions(copy) == [(str(NEWEST),)]
    assert "notes" not in columns(copy)


def test_an_upgrade_that_fails_leaves_the_database_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operations: Operations) -> None:
        add_column(operations)
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tables, "SCHEMA_VERSION", NEWEST + 1)
        patch.setattr(_upgrades, "STEPS", (*_upgrades.STEPS, fail))
        with pytest.raises(OSError, match="disk is full"):
            Database(old)
    assert versions(old) == [(str(NEWEST),)]
    assert "notes" not in columns(old)
    Database(old).close()


@pytest.mark.usefixtures("next_version")
def test_the_copy_of_before_an_upgrade_leads_back(old: Path) -> None:
    before = content(old)
    Database(old).close()
    upgraded = content(old)
    assert upgraded != before
    copy = copy_of_version(old, NEWEST)
    moved_to, _ = restore_copy(copy)
    assert content(old) == before
    assert not copy.exists()
    assert content(moved_to / "master.sqlite") == upgraded


@pytest.mark.parametrize("version", [1, 9, 12])
@pytest.mark.parametrize("has_log", [False, True])
def test_a_home_of_before_the_first_release_is_refused_as_it_is(
    version: int, has_log: bool, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with tarfile.open(STORED / "unreleased_databases.tar.xz") as archive:
        archive.extract(f"{version}.sqlite", home, filter="data")
    path = (home / f"{version}.sqlite").rename(home / "master.sqlite")
    if has_log:
        (home / "master.sqlite-wal").touch()
    before = path.read_bytes()
    names = {one.name for one in home.iterdir()}
    problem = f"{MUST_HAVE}, but has {version}. Nothing was changed. Hint: start"
    with pytest.raises(DatabaseVersionError, match=problem):
        Database(path)
    with pytest.raises(DatabaseVersionError, match=problem):
        Home(home).prepare(set_aside=True)
    backup = Backup(home, tmp_path / "backups")
    with backup.hold(), pytest.raises(DatabaseVersionError, match=f"{NEWEST}, but has {version}"):
        backup.make()
    [found] = fix(home).findings
    assert found.problem.startswith(f"must have version {NEWEST} to be checked, but has {version}")
    assert found.fix is None
    copy = copy_of_version(path, version)
    copy.write_bytes(before)
    with pytest.raises(DatabaseVersionError, match=problem):
        restore_copy(copy)
    assert path.read_bytes() == copy.read_bytes() == before
    made = {one.name for one in home.iterdir()} - names
    assert made <= {copy.name, "master.lock", "master.sqlite-shm", "master.sqlite-wal"}


def test_such_a_database_is_not_opened_for_writing(old: Path) -> None:
    with closing(sqlite3.connect(old)) as other:
        with other:
            other.execute("update meta set value = '12' where key = 'schema_version'")
        # A writer would wait for this one, and then say that the database is locked.
        other.execute("begin immediate")
        with pytest.raises(DatabaseVersionError, match=f"{MUST_HAVE}, but has 12"):
            Database(old)


def test_version_0_is_no_earlier_version(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("update meta set value = '0' where key = 'schema_version'")
    with pytest.raises(DatabaseVersionError, match=f"{MUST_HAVE}, but has 0"):
        Database(old)


def test_a_newer_database_is_refused_as_it_is_with_the_way_back(tmp_path: Path) -> None:
    path = tmp_path / "master.sqlite"
    Database(path).close()
    newer = NEWEST + 1
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"update meta set value = '{newer}' where key = 'schema_version'")
    before = path.read_bytes()
    problem = f"{MUST_HAVE}, but has {newer}. Nothing was changed."
    with pytest.raises(DatabaseVersionError, match=f"{problem} Hint: start the Paceline version"):
        Database(path)
    for version in (1, NEWEST, newer):
        copy_of_version(path, version).touch()
    kept = copy_of_version(path, NEWEST)
    with pytest.raises(DatabaseVersionError, match=f"`paceline restore {kept}`.*--set-aside"):
        Database(path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("master.sqlite-*"))


def test_only_such_a_copy_is_put_in_the_place_of_a_database_and_only_without_a_master(
    tmp_path: Path,
) -> None:
    path = tmp_path / "master.sqlite"
    Database(path).close()
    copy = copy_of_version(path, NEWEST)
    copy.write_bytes(path.read_bytes()[:5000])
    for wrong, error in ((path, BackupError), (copy, DatabaseDamagedError)):
        before = path.read_bytes()
        with pytest.raises(error):
            restore_copy(wrong)
        assert path.read_bytes() == before
    with Home(tmp_path).hold(), pytest.raises(HomeInUseError):
        restore_copy(copy)


def test_files_stored_before_they_were_counted_are_counted_like_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "master.sqlite"
    Database(path).close()
    added = {"attempts": ["num_gpus", "spent"], "quotas": ["media_bytes"]}
    added["usage"] = ["gpu_s", "training_s", "lost_s", "known_s"]
    added |= {"users": ["oidc_issuer", "oidc_subject"], "pools": ["interactive_first"]}
    insert = "INSERT INTO run_files VALUES (1, ?, 7, 'd', ?, 'text/plain', 0.0)"
    with closing(sqlite3.connect(path)) as connection, connection:
        for number in (1, 2, 3):
            connection.execute(f"DROP TRIGGER count_run_files_{number}")
        # A watched column goes after its trigger.
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'recorded%'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        for table, columns in added.items():
            for column in columns:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("UPDATE meta SET value = '20' WHERE key = 'schema_version'")
        connection.execute(insert, ("a", 100))
    Database(path).close()
    Database(tmp_path / "new.sqlite").close()
    assert schema(path) == schema(tmp_path / "new.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(insert, ("b", 20))
        connection.execute(insert, ("c", 3))
        connection.execute("UPDATE run_files SET size = 5 WHERE path = 'c'")
        connection.execute("DELETE FROM run_files WHERE path = 'b'")
        found = connection.execute(
            "SELECT experiment_id, number, num_bytes FROM counts WHERE kind = 'run_files'"
        )
        assert sorted(found) == [(0, 2, 105), (7, 2, 105)]
