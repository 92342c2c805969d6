"""Checks of a home, and its database made again from what is beside it."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from paceline._base.journal_reading_and_writing import frame_line
from paceline._base.journal_records import encode_record
from paceline._cluster.master.home_directory import Home, HomeInUseError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.recovery_rows import begin_records
from paceline._cluster.master.upkeep import check as _check
from paceline._cluster.master.upkeep.backup_directories import BackupError
from paceline._cluster.master.upkeep.check import check, fix
from paceline._cluster.master.upkeep.check_files import Finding
from paceline._cluster.master.upkeep.recovery_records import (
    record_path,
    recorded_experiments,
    write_some,
)
from paceline.journal import MetricsReported

DieAt = Callable[[str, Callable[[], object]], None]
RECORDED = (
    "experiments", "trials", "attempts", "search_inputs", "checkpoints", "users", "tokens",
    "series", "chunks", "time_marks", "journal_marks", "counts", "metric_names",
)  # fmt: skip


def record(home: Path, change: Callable[[Database], object] = lambda _: None) -> None:
    """Bring a home's database up to date, change it, and its records with it."""
    database = Database(home / "master.sqlite")
    try:
        begin_records(database)
        change(database)
        while write_some(database, home):
            pass
    finally:
        database.close()


@pytest.fixture
def recorded(home: Path) -> Path:
    """Return a home with records, as of a master that has stopped."""
    Home(home).prepare()
    record(home)
    return home


def rows(home: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(home / "master.sqlite")) as connection:
        found = {
            name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr) for name in RECORDED
        }
    # A count of 0 is what is left of a state that rows were in.
    return found | {"counts": [row for row in found["counts"] if row[-2]]}


def problems(findings: list[Finding]) -> dict[str, str]:
    return {finding.where: finding.problem for finding in findings}


def lose(home: Path) -> None:
    for path in home.glob("master.sqlite*"):
        path.unlink()


def flip(path: Path, position: int) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def test_a_lost_database_is_made_again_with_the_same_rows(recorded: Path) -> None:
    assert check(recorded).findings == []
    before = rows(recorded)
    assert all(before[name] for name in ("experiments", "trials", "series", "search_inputs"))
    lose(recorded)
    assert problems(check(recorded).findings) == {"master.sqlite": "is missing"}
    (found,) = fix(recorded).findings
    assert found.fix == "it was made from the records, with 3 experiments and 8 trials"
    # The paused trial's control is new for its runner.
    assert rows(recorded) == before
    assert check(recorded).findings == []
    # It is a home like any other: nothing in it is unknown, and no id is given twice.
    Home(recorded).prepare()
    with closing(sqlite3.connect(recorded / "master.sqlite")) as connection:
        found_ids = dict(connection.execute("SELECT key, value FROM meta WHERE key LIKE 'last%'"))
    assert found_ids == {
        "last_id_of_experiments": "3", "last_id_of_trials": "8", "last_id_of_attempts": "8"
    }  # fmt: skip
    record(recorded)
    assert check(recorded).findings == []


def test_a_damaged_database_is_kept_and_made_again(recorded: Path) -> None:
    before = rows(recorded)
    for page in range(1, 12):
        flip(recorded / "master.sqlite", page * 4096)
    damaged = (recorded / "master.sqlite").read_bytes()
    (found,) = check(recorded).findings
    assert found.problem.startswith("is damaged (")
    (found,) = fix(recorded).findings
    assert found.fix is not None
    assert rows(recorded) == before
    (kept,) = (recorded / "set_aside").glob("*/master.sqlite")
    assert kept.read_bytes() == damaged
    assert f"; the old one is in '{kept.parent}'" in found.fix


def test_only_what_was_left_of_a_deleted_database_is_said_to_be_kept(recorded: Path) -> None:
    lose(recorded)
    (recorded / "master.sqlite-wal").touch()
    (found,) = fix(recorded).findings
    assert found.fix is not None
    (kept,) = (recorded / "set_aside").iterdir()
    assert found.fix.endswith(f"8 trials; what was left of the old one is in '{kept}'")
    assert [path.name for path in kept.iterdir()] == ["master.sqlite-wal"]


def test_changed_rows_reach_the_record_also_if_the_master_is_killed_meanwhile(
    recorded: Path, die_at: DieAt
) -> None:
    def change(database: Database) -> None:
        trials, experiments = tables.trials, tables.experiments
        for statement in (
            update(trials).where(trials.c.id == 8).values(state="CANCELED"),
            update(experiments).where(experiments.c.id == 1).values(notes="# new"),
            update(trials).where(trials.c.id == 1).values(status="not recorded"),
        ):
            database.write(
                lambda transaction, one=statement: transaction.connection.execute(one)
            ).result()

    size = record_path(recorded, 2).stat().st_size
    die_at("recorder.written", lambda: record(recorded, change))
    record(recorded)
    assert record_path(recorded, 2).stat().st_size == size
    assert check(recorded).findings == []
    lose(recorded)
    fix(recorded)
    found = rows(recorded)
    assert [row[2] for row in found["trials"] if row[0] == 8 or "CANCELED" in row]
    assert any("# new" in row for row in found["experiments"])


def test_the_record_of_a_deleted_experiment_goes_and_that_of_a_new_one_is_new(
    recorded: Path,
) -> None:
    def remove(database: Database) -> None:
        def job(transaction: Any) -> None:
            connection = transaction.connection
            connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
            series = "series_id IN (SELECT id FROM series WHERE trial_id = 8)"
            connection.exec_driver_sql(f"DELETE FROM chunks WHERE {series}")
            for name in ("journal_marks", "time_marks"):
                connection.exec_driver_sql(f"DELETE FROM {name} WHERE attempt_id = 8")
            connection.exec_driver_sql("DELETE FROM series WHERE trial_id = 8")
            for table in ("attempts", "checkpoints", "search_inputs", "events", "trials"):
                connection.exec_driver_sql(f"DELETE FROM {table} WHERE experiment_id = 3")
            connection.execute(delete(tables.experiments).where(tables.experiments.c.id == 3))

        database.write(job).result()

    assert recorded_experiments(recorded) == [1, 2, 3]
    record(recorded, remove)
    assert recorded_experiments(recorded) == [1, 2]
    # A record of another home's experiment must not be mixed with that of a new one.
    shutil.copy(record_path(recorded, 1), record_path(recorded, 4))

    def add(database: Database) -> None:
        database.write(
            lambda transaction: transaction.connection.exec_driver_sql(
                "INSERT INTO experiments (id, name, state, config, warnings, seed, created_at,"
                " progress, retention_done) VALUES (4, 'new', 'ACTIVE', '{}', '[]', 1, 0, 0, 0)"
            )
        ).result()

    record(recorded, add)
    assert len(record_path(recorded, 4).read_bytes().splitlines()) == 1


def test_what_differs_is_named_and_mended(recorded: Path) -> None:
    with closing(sqlite3.connect(recorded / "master.sqlite")) as connection, connection:
        gone, torn, altered = [
            uuid
            for (uuid,) in connection.execute(
                "SELECT uuid FROM checkpoints WHERE state != 'DELETED' ORDER BY uuid LIMIT 3"
            )
        ]
        # Damage does not tell anybody.
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'rec%'"
        triggers = connection.execute(query).fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("UPDATE trials SET hparams = '{}' WHERE id = 2")
        connection.execute("UPDATE series SET value_bytes = steps WHERE id = 1")
        connection.execute("DELETE FROM search_inputs WHERE experiment_id = 1 AND number = 1")
        (before,) = connection.execute("SELECT steps FROM series WHERE id = 1").fetchone()
        for _, statement in triggers:
            connection.execute(statement)
    shutil.rmtree(recorded / "checkpoints" / gone)
    (recorded / "checkpoints" / torn / "state").unlink()
    flip(recorded / "checkpoints" / altered / "state", 0)
    (context,) = (recorded / "contexts").iterdir()
    context.unlink()
    log = recorded / "logs/trial-1/attempt-1.jsonl"
    flip(log, 0)
    shutil.copytree(recorded / "checkpoints" / altered, recorded / "checkpoints/unknown")
    found = problems(check(recorded).findings)
    trials = {where.split()[1]: where for where in found if where.startswith("checkpoint ")}
    assert found[trials[gone]].startswith("is gone from")
    assert found[trials[torn]] == "is damaged: state is missing"
    assert "was altered" in found[trials[altered]]
    assert found[trials["unknown"]] == "is not known to the database"
    assert found["trial 2"] == "is not in the database as it is in the record"
    assert found["a piece of metrics (series 1) of experiment 1"].startswith("is not in")
    assert found["input 1 of the search of experiment 1"].endswith("not in the database")
    assert "experiments 1, 2, 3 cannot start trials" in found[f"contexts/{context.name}"]
    assert found["logs/trial-1/attempt-1.jsonl"].startswith("has 1 damaged line")
    assert len(found) == 9

    mended = {one.where: one.fix for one in fix(recorded).findings}
    assert {where for where, done in mended.items() if done is not None} == {
        "trial 2", "a piece of metrics (series 1) of experiment 1", trials[gone],
        "input 1 of the search of experiment 1",
    }  # fmt: skip
    assert set(mended) == set(found)
    with closing(sqlite3.connect(recorded / "master.sqlite")) as connection:
        (hparams,) = connection.execute("SELECT hparams FROM trials WHERE id = 2").fetchone()
        (values,) = connection.execute("SELECT value_bytes FROM series WHERE id = 1").fetchone()
        query = "SELECT state FROM checkpoints WHERE uuid = ?"
        assert connection.execute(query, (gone,)).fetchone() == ("DELETED",)
    assert hparams != "{}"
    assert values != before
    assert list((recorded / "set_aside").glob("*/master.before-fix.sqlite"))


def test_damaged_and_lost_records_are_written_anew(recorded: Path) -> None:
    whole = record_path(recorded, 1).read_bytes()
    flip(record_path(recorded, 1), len(whole) // 2)
    record_path(recorded, 2).unlink()
    record_path(recorded, None).write_bytes(b"0 damaged\n")
    assert problems(check(recorded).findings) == {
        "records/experiment-1.jsonl": "has 1 damaged line",
        "records/experiment-2.jsonl": "is missing",
        "records/accounts.jsonl": "has 1 damaged line",
    }
    assert [one.fix for one in fix(recorded).findings] == ["the record was written anew"] * 3
    assert check(recorded).findings == []


def test_a_damaged_record_gives_what_its_other_lines_hold(recorded: Path) -> None:
    path = record_path(recorded, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    # This trial's line is damaged wherever it is.
    trial = [n for n, line in enumerate(lines) if b'"table":"trials","row":{"id":4,' in line]
    path.write_bytes(
        b"".join(line[:-2] + b"?\n" if n in trial else line for n, line in enumerate(lines))
    )
    lose(recorded)
    (found,) = [one for one in fix(recorded).findings if one.where == "master.sqlite"]
    assert found.fix is not None
    assert f"records/experiment-2.jsonl: damaged lines {trial[0] + 1}, {trial[1] + 1}" in found.fix
    assert "rows of 'attempts', as their row of 'trials' is lost" in found.fix
    assert [row[0] for row in rows(recorded)["trials"]] == [1, 2, 3, 5, 6, 7, 8]


def test_a_journal_with_damaged_and_missing_lines_is_named(recorded: Path) -> None:
    with closing(sqlite3.connect(recorded / "master.sqlite")) as connection, connection:
        connection.execute("UPDATE attempts SET state = 'RUNNING' WHERE id = 8")
    journal = recorded / "attempts/8/run/journal/a1.g0.r0/000000000000.journal"
    journal.parent.mkdir(parents=True)
    report = MetricsReported(time=0.0, group="training", steps_completed=1, metrics={})
    lines = [frame_line(number, encode_record(report)) for number in (0, 1, 4, 5)]
    journal.write_bytes(frame_line(-1, b"{}") + b"".join(lines) + b"cut off")
    flip(journal, len(journal.read_bytes()) - len(b"cut off") - len(lines[-1]) - 3)
    assert problems(check(recorded).findings) == {
        "attempts/8/run/journal/a1.g0.r0/000000000000.journal": (
            "has 1 damaged lines, and lacks 3 records"
        )
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(9)]
)
def test_a_flipped_bit_is_repaired_or_reported(seed: int, recorded: Path, tmp_path: Path) -> None:
    """In any file of a home; where nothing is reported, nothing that counts has changed."""
    rng = random.Random(seed)
    (recorded / "attempts/8/run/journal/a1.g0.r0").mkdir(parents=True)
    names = sorted(
        path.relative_to(recorded).as_posix()
        for path in recorded.rglob("*")
        if path.is_file() and path.stat().st_size
    )
    one_of_each = {}
    for name in names:
        kind = name.split("/")[0] + Path(name).suffix + Path(name).stem[:4]
        one_of_each.setdefault(kind, []).append(name)
    chosen = [rng.choice(names) for names in one_of_each.values()]
    before = rows(recorded)
    for name in [*chosen, *["master.sqlite"] * 6]:
        copy = tmp_path / "copy"
        shutil.copytree(recorded, copy)
        with closing(sqlite3.connect(copy / "master.sqlite")) as connection, connection:
            storage = str(copy / "checkpoints")
            connection.execute("UPDATE checkpoints SET storage = ?", (storage,))
        flip(copy / name, rng.randrange((copy / name).stat().st_size))
        found = check(copy).findings
        if name.split("/")[0] in ("records", "contexts"):
            assert found, name
        if name == "master.sqlite" and not found:
            kept = rows(copy)
            for table in ("series", "chunks", "search_inputs"):
                assert kept[table] == before[table]
        fix(copy)
        left = {one.kind for one in check(copy).findings}
        assert not left & {"database", "record"}, name
        shutil.rmtree(copy)


def test_a_home_that_is_served_is_checked_and_not_mended(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_check, "_SECOND_LOOK_S", 0.0)
    lose(recorded)
    with Home(recorded).hold():
        found = check(recorded)
        assert found.master_runs
        with pytest.raises(HomeInUseError):
            fix(recorded)


def test_a_home_without_records_is_not_made_up(home: Path) -> None:
    lose(home)
    (found,) = fix(home).findings
    assert (found.problem, found.fix) == ("is missing", None)
    assert not (home / "master.sqlite").exists()
    with pytest.raises(BackupError, match="must be a directory"):
        check(home / "nowhere")


def test_a_directory_that_is_no_home_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for command in (check, fix):
        with pytest.raises(BackupError, match="must have a database"):
            command(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
