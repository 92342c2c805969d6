"""Backups of a home and homes restored from them."""

import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from paceline._cluster.master.home_directory import Home, LostDatabaseError
from paceline._cluster.master.store import user_tables
from paceline._cluster.master.store.database import Database, DatabaseVersionError, Transaction
from paceline._cluster.master.upkeep import backup as following
from paceline._cluster.master.upkeep import restore as restoring
from paceline._cluster.master.upkeep.backup import Backup, BackupResult, follow_home
from paceline._cluster.master.upkeep.backup_directories import (
    BackupError,
    find_backup,
    whole_backups,
)
from paceline._cluster.master.upkeep.restore import restore

DieAt = Callable[[str, Callable[[], object]], None]


def make(home: Path, to: Path, *, checkpoints: bool = False) -> BackupResult:
    backup = Backup(home, to, checkpoints=checkpoints)
    with backup.hold():
        return backup.make()


def rows_of(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "master.sqlite")) as connection:
        return list(connection.iterdump())


def contents(home: Path) -> dict[str, bytes]:
    """Return the files of a home that a backup holds, apart from the database."""
    files = (path for path in home.rglob("*") if path.is_file())
    own = ("master.", "token", "attempts/newest")
    return {
        name: path.read_bytes()
        for path in files
        if not (name := path.relative_to(home).as_posix()).startswith(own)
        and path.suffix != ".index"
    }


def test_a_restored_home_has_all_that_was_backed_up_but_no_secret(
    home: Path, tmp_path: Path
) -> None:
    written = {"environment.secrets", "attempt_key", "oidc.yaml", "notify.yaml"}
    for name in written:
        (home / name).write_text("KEY=1")
    made = make(home, tmp_path / "backups", checkpoints=True)
    secret = {*written, "token"}
    assert set(made.content.left_out) == {f"{name} (a secret)" for name in secret}

    other = tmp_path / "other"
    assert restore(tmp_path / "backups", other).damaged == []
    assert contents(other) == {
        name: data for name, data in contents(home).items() if name not in secret
    }
    moved = [row.replace(str(home), "HOME") for row in rows_of(home)]
    assert [row.replace(str(other), "HOME") for row in rows_of(other)] == moved
    Home(other).prepare()
    assert Home(other).token
    assert Home(other).cluster_id == Home(home).cluster_id
    log = other / "logs/trial-1/attempt-1.jsonl"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_checkpoints_of_a_restored_home_are_found_in_it(home: Path, tmp_path: Path) -> None:
    make(home, tmp_path / "backups", checkpoints=True)
    restore(tmp_path / "backups", tmp_path / "other")
    with closing(sqlite3.connect(tmp_path / "other/master.sqlite")) as connection:
        rows = connection.execute("SELECT uuid, storage FROM checkpoints").fetchall()
    assert rows
    assert all((Path(storage) / uuid / "manifest.json").exists() for uuid, storage in rows)
    assert {storage for _, storage in rows} == {str(tmp_path / "other/checkpoints")}

    # A home that has kept its checkpoints takes the rest back; what is gone is no start.
    kept = tmp_path / "other"
    for path in kept.iterdir():
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    gone = rows[0][0]
    shutil.rmtree(kept / "checkpoints" / gone)
    make(home, tmp_path / "without")
    assert restore(tmp_path / "without", kept).num_lost_checkpoints == 1
    with closing(sqlite3.connect(kept / "master.sqlite")) as connection:
        query = "SELECT uuid FROM checkpoints WHERE state = 'DELETED'"
        assert connection.execute(query).fetchall() == [(gone,)]


def test_a_second_backup_copies_only_what_has_changed(home: Path, tmp_path: Path) -> None:
    first = make(home, tmp_path / "backups")
    assert first.content.left_out[-1] == "14 checkpoints (see `--checkpoints`)"
    log = home / "logs/trial-1/attempt-1.jsonl"
    whole_lines = log.read_bytes()
    # The line that a master is just writing is not whole.
    log.write_bytes(whole_lines + b"[7, 1.0, nul")
    second = make(home, tmp_path / "backups")
    assert second.num_copied == 1
    assert (second.path / "logs/trial-1/attempt-1.jsonl").read_bytes() == whole_lines
    for name in ("master.sqlite", "logs/trial-2/attempt-1.jsonl"):
        assert os.path.samefile(first.path / name, second.path / name)
    third = make(home, tmp_path / "backups")
    assert third.num_copied == 0
    assert whole_backups(tmp_path / "backups") == [first.path, second.path, third.path]

    backup = Backup(home, tmp_path / "backups")
    backup.keep(2)
    assert whole_backups(tmp_path / "backups") == [second.path, third.path]
    assert restore(third.path, tmp_path / "other").damaged == []


def add_user(transaction: Transaction, *, number: int) -> None:
    values = {"name": f"name {number}", "password_hash": "x" * 4000, "changed_at": 0.0}
    transaction.connection.execute(insert(user_tables.users).values(**values))


def test_a_backup_of_a_home_at_work_holds_all_that_was_acknowledged(tmp_path: Path) -> None:
    home = tmp_path / "home"
    Home(home).prepare()
    database = Database(home / "master.sqlite")
    acknowledged = 0
    enough = threading.Event()

    def fill() -> None:
        nonlocal acknowledged
        while not enough.is_set():
            database.write(partial(add_user, number=acknowledged)).result()
            acknowledged += 1

    writer = threading.Thread(target=fill)
    writer.start()
    try:
        for _ in range(3):
            while acknowledged < 20:
                time.sleep(0.01)
            before = acknowledged
            made = make(home, tmp_path / "backups")
            with closing(sqlite3.connect(made.path / "master.sqlite")) as connection:
                names = [name for (name,) in connection.execute("SELECT name FROM users")]
            assert before <= len(names)
            assert set(names) == {f"name {number}" for number in range(len(names))}
    finally:
        enough.set()
        writer.join()
        database.close()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("backup.database_copied", marks=pytest.mark.slow),
        "backup.between_files:3",
        pytest.param("backup.before_content", marks=pytest.mark.slow),
        "storage.before_rename",
    ],
)
def test_a_backup_that_is_killed_is_never_taken_for_whole(
    point: str, home: Path, tmp_path: Path, die_at: DieAt
) -> None:
    to = tmp_path / "backups"
    die_at(point, lambda: make(home, to))
    with pytest.raises(BackupError, match="has none"):
        find_backup(to)
    first = make(home, to)
    (home / "logs/trial-1/attempt-1.jsonl").unlink()
    for name in ("logs/trial-2/attempt-1.jsonl", "logs/trial-3/attempt-1.jsonl", "cluster_id"):
        os.utime(home / name)
    die_at(point, lambda: make(home, to))
    assert find_backup(to) == first.path
    assert restore(to, tmp_path / "other").damaged == []
    assert make(home, to).path != first.path
    assert [path.name for path in to.iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_restore_that_is_killed_is_no_home_until_it_is_made_again(
    home: Path, tmp_path: Path, die_at: DieAt
) -> None:
    make(home, tmp_path / "backups")
    other = tmp_path / "other"
    die_at("restore.before_database", lambda: restore(tmp_path / "backups", other))
    with pytest.raises(LostDatabaseError, match="was cut off"):
        Home(other).prepare()
    assert restore(tmp_path / "backups", other).damaged == []
    Home(other).prepare()
    assert rows_of(other)


def test_a_restore_takes_an_empty_home_only(home: Path, tmp_path: Path) -> None:
    make(home, tmp_path / "backups")
    with pytest.raises(BackupError, match="must be empty"):
        restore(tmp_path / "backups", home)


def test_damage_in_a_backup_is_named(home: Path, tmp_path: Path) -> None:
    made = make(home, tmp_path / "backups")
    log, code = "logs/trial-1/attempt-1.jsonl", next((home / "contexts").iterdir()).name
    for name in (log, f"contexts/{code}"):
        path = made.path / name
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    (made.path / "logs/trial-2/attempt-1.jsonl").unlink()
    assert restore(made.path, tmp_path / "other").damaged == [
        f"contexts/{code} was altered (other content of the same size)",
        f"{log} was altered (other content of the same size)",
        "logs/trial-2/attempt-1.jsonl is missing",
    ]
    database = made.path / "master.sqlite"
    database.chmod(0o600)
    data = bytearray(database.read_bytes())
    data[4096:12288] = b"?" * 8192
    database.write_bytes(data)
    with pytest.raises(DatabaseVersionError, match="cannot be read"):
        restore(made.path, tmp_path / "third")
    with pytest.raises(LostDatabaseError, match="was cut off"):
        Home(tmp_path / "third").prepare()


def test_a_damaged_database_is_not_backed_up(home: Path, tmp_path: Path) -> None:
    first = make(home, tmp_path / "backups")
    with (home / "master.sqlite").open("r+b") as file:
        file.seek(8192)
        file.write(b"?" * 8192)
    with pytest.raises(DatabaseVersionError):
        make(home, tmp_path / "backups")
    assert whole_backups(tmp_path / "backups") == [first.path]


def test_what_cannot_be_backed_up_or_restored_is_refused_by_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackupError, match="outside the home"):
        Backup(home, home / "backups")
    with pytest.raises(BackupError, match=r"has no master\.sqlite"):
        Backup(tmp_path / "no home", tmp_path / "backups")
    (tmp_path / "file").touch()
    for to in (tmp_path / "file", tmp_path / "file" / "backups"):
        with pytest.raises(BackupError, match="must be a directory, but '.*file' is a file"):
            make(home, to)
    with pytest.raises(BackupError, match="must exist to be restored"):
        restore(tmp_path / "none", tmp_path / "other")
    made = make(home, tmp_path / "backups")
    shutil.copytree(home, tmp_path / "another")
    with pytest.raises(BackupError, match="backups of one home"):
        make(tmp_path / "another", tmp_path / "backups")
    backup = Backup(home, tmp_path / "backups")
    with backup.hold(), pytest.raises(BackupError, match="One backup at a time"):
        make(home, tmp_path / "backups")
    with monkeypatch.context() as patch:
        patch.setattr(restoring.tables, "SCHEMA_VERSION", made.content.schema_version - 1)
        with pytest.raises(BackupError, match="must have a database of version"):
            restore(made.path, tmp_path / "other")
    content = made.path / "backup.json"
    content.chmod(0o600)
    for text, match in (
        (content.read_text().replace('"version":1', '"version":9'), "format version 1"),
        (content.read_text().replace('"cluster_id"', '"../cluster_id"'), "outside"),
        ("{", "cannot be read"),
    ):
        content.write_text(text)
        with pytest.raises(BackupError, match=match):
            restore(made.path, tmp_path / "other")


def test_following_makes_a_backup_after_each_change_in_the_place_of_the_one_before(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_REST", 0)
    to = tmp_path / "backups"
    stop = threading.Event()
    errors: list[Exception] = []
    backup = Backup(home, to)
    first = make(home, to)
    with backup.hold():
        found: list[Any] = []
        for result in follow_home(backup, home, 0.0, stop, errors.append):
            found.append(result.path)
            assert whole_backups(to) == [first.path, result.path]
            if len(found) == 3:
                stop.set()
            os.utime(home / "master.sqlite")
    assert len({path.stat().st_ino for path in whole_backups(to)}) == 2
    assert errors == []


def test_an_attempt_that_ran_ends_in_a_restored_home(home: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(home / "master.sqlite")) as connection, connection:
        connection.execute("UPDATE attempts SET state = 'RUNNING' WHERE id IN (1, 2)")
        connection.execute("UPDATE attempts SET state = 'PENDING' WHERE id = 3")
    journal = home / "attempts/1/run/journal/attempt-1/rank-0/000000000000.journal"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"one\ntw")
    for name in ("started", "attempt.json", "runner.lock", "context/train.py"):
        (home / "attempts/1" / name).parent.mkdir(exist_ok=True)
        (home / "attempts/1" / name).touch()
    make(home, tmp_path / "backups")
    other = tmp_path / "other"
    restore(tmp_path / "backups", other)
    kept = [path.relative_to(other).as_posix() for path in (other / "attempts").rglob("*")]
    assert sorted(name for name in kept if (other / name).is_file()) == [
        "attempts/1/run/journal/attempt-1/rank-0/000000000000.journal",
        "attempts/1/started",
        "attempts/2/started",
    ]
    assert (other / journal.relative_to(home)).read_bytes() == b"one\n"
