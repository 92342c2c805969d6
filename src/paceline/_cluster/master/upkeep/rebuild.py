"""Rebuild of a lost database from the records of its rows and the journals of runs."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._base.files import sync_directory
from paceline._base.journal_reading_and_writing import JournalVersionError
from paceline._base.run_directory import RunDirectory
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.home_directory import files_of, move_lost_files_aside
from paceline._cluster.master.searches.best_values import recompute_best
from paceline._cluster.master.searches.search_operations import SearchOperations
from paceline._cluster.master.searches.stored_searches import Searches
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.recovery_rows import (
    RECORDED,
    RecordedRow,
    forget_recorded,
    primary_key,
)
from paceline._cluster.master.store.row_ids_and_counts import raise_ids
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.master.store.upgrades import note_contexts
from paceline._cluster.master.upkeep.backup_directories import DATABASE, BackupError
from paceline._cluster.master.upkeep.recovery_records import (
    read_record,
    record_path,
    recorded_experiments,
)
from paceline._cluster.messages.runner_messages import RecordBatch
from paceline._cluster.runner.attempt_directory import newest_attempt
from paceline.search._search_messages import Input

_BATCH = 1000
_VERSIONS = 1_000_000


@dataclass(kw_only=True, slots=True)
class Rebuilt:
    """Result of a rebuild: counts, the old database's new place, and the losses by name."""

    num_experiments: int = 0
    num_trials: int = 0
    moved_to: Path | None = None
    lost: list[str] = field(default_factory=list)


def rebuild_database(home: Path) -> Rebuilt:
    """Make the database of a home again; for who holds the home.

    An old one is moved into ``set_aside``. The new one appears as a whole.

    Raises:
        BackupError: The home has no records.
    """
    experiments = recorded_experiments(home)
    if not experiments and not record_path(home, None).exists():
        raise BackupError(
            f"A home must have records to make its database from, but {str(home)!r} has none."
            " Hint: restore a backup, or start"
            " with `paceline up --set-aside`."
        )
    result = Rebuilt()
    part = home / f".{DATABASE}.rebuilt"
    for path in files_of(part):
        path.unlink()
    Database(part).close()
    with closing(sqlite3.connect(part)) as connection, connection:
        _load_into_database(connection, home, experiments, result)
    _finish_rebuild(part, home)
    with closing(sqlite3.connect(part)) as connection:
        # Journal merged into the database: only a single file can be replaced atomically.
        connection.execute("PRAGMA journal_mode=DELETE")
        for name in ("experiments", "trials"):
            (number,) = connection.execute(f"SELECT count(*) FROM {name}").fetchone()  # noqa: S608
            setattr(result, f"num_{name}", number)
    old = files_of(home / DATABASE)
    if old:
        result.moved_to = move_lost_files_aside(home, old)
    os.replace(part, home / DATABASE)
    sync_directory(home)
    return result


def _load_into_database(
    connection: sqlite3.Connection, home: Path, experiments: list[int], result: Rebuilt
) -> None:
    """Store the rows of all records; later lines of a row replace earlier lines."""
    columns = {
        table: {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        for table in RECORDED
    }
    for experiment_id in (*experiments, None):
        path = record_path(home, experiment_id)
        if not path.exists():
            continue
        damaged = []
        for number, row in read_record(path):
            if row is None:
                damaged.append(str(number))
            else:
                store_rebuilt_row(connection, row, columns[row.table])
        if damaged:
            result.lost.append(f"{path.relative_to(home)}: damaged lines {', '.join(damaged)}")
    _drop_orphans(connection, result)
    connection.execute(
        "UPDATE trials SET num_attempts = (SELECT coalesce(max(number), 0) FROM attempts"
        " WHERE trial_id = trials.id)"
    )
    # Running runners accept no version older than their last one.
    connection.execute(
        "UPDATE attempts SET control_version = control_version + ? WHERE ended_at IS NULL",
        (_VERSIONS,),
    )
    # Clients hold ids of events as cursors, and ask for those after them.
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'events'")
    sequence = ("events", int(time.time() * 1000))
    connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", sequence)


def store_rebuilt_row(connection: sqlite3.Connection, row: RecordedRow, columns: set[str]) -> None:
    """Store a recorded row in place of the present row; columns no longer known are left out."""
    values = {name: value for name, value in (row.values or {}).items() if name in columns}
    names = ", ".join(f'"{name}"' for name in values)
    marks = ", ".join("?" * len(values))
    key = ", ".join(f'"{name}"' for name in primary_key(row.table))
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in values)
    # A change, and not another row in its place: counts follow it.
    connection.execute(
        f"INSERT INTO {row.table} ({names}) VALUES ({marks})"  # noqa: S608
        f" ON CONFLICT ({key}) DO UPDATE SET {changes}",
        tuple(values.values()),
    )


def _drop_orphans(connection: sqlite3.Connection, result: Rebuilt) -> None:
    """Delete rows with a lost parent row, and report them."""
    while orphans := connection.execute("PRAGMA foreign_key_check").fetchall():
        lost: dict[tuple[str, str], int] = {}
        # The rows of this table have no id.
        connection.execute("DELETE FROM run_files WHERE trial_id NOT IN (SELECT id FROM trials)")
        for table, row_id, parent, _ in orphans:
            if row_id is not None:
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row_id,))  # noqa: S608
            lost[table, parent] = lost.get((table, parent), 0) + 1
        result.lost += [
            f"{number} rows of {table!r}, as their row of {parent!r} is lost"
            for (table, parent), number in lost.items()
        ]


def _finish_rebuild(part: Path, home: Path) -> None:
    """Add the facts known only from the home's files, beyond the records."""
    database = Database(part)
    try:
        contexts = [path.name.split(".")[0] for path in (home / "contexts").glob("*.tar.gz")]
        database.write(lambda transaction: note_contexts(transaction, *contexts)).result()
        newest = {
            tables.experiments: max(recorded_experiments(home), default=0),
            tables.trials: _newest(home / "logs", "trial-"),
            tables.attempts: max(_newest(home / "attempts", ""), newest_attempt(home / "attempts")),
        }
        database.write(lambda transaction: raise_ids(transaction.connection, newest)).result()
        database.write(lambda transaction: _rebuild_from_journals(transaction, home)).result()
        database.write(_recompute_best).result()
        # The next master writes the records anew.
        database.write(forget_recorded).result()
    finally:
        database.close()


def _newest(directory: Path, prefix: str) -> int:
    names = (path.name.split(".")[0].removeprefix(prefix) for path in directory.glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


class _RecordedInputs(SearchOperations):
    """Search operations ignoring inputs, because recorded inputs were already applied."""

    def apply_input(
        self,
        transaction: Transaction,
        experiment_id: int,
        given: Input,
        row: sa.Row[Any] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> bool:
        """Do nothing: the input is recorded."""
        return True

    def update_progress(
        self, transaction: Transaction, experiment_id: int, row: sa.Row[Any] | None = None
    ) -> bool:
        """Do nothing: the next report tells it."""
        return True


class _JudgedBefore(StateChanges):
    """State changes for records already judged by the search, without new inputs."""

    def __init__(self, logs: LogStore) -> None:
        searches = Searches()
        super().__init__(searches, logs)
        self.search_operations = _RecordedInputs(self, searches)

    def note(
        self, transaction: Transaction, trial_id: int, attempt: int, level: str, text: str
    ) -> None:
        """Write nothing: the log already has the line."""


def _rebuild_from_journals(transaction: Transaction, home: Path) -> None:
    """Apply the reports of running attempts up to the last input of their search.

    Later reports are sent by their runners, as to any master that lacks them.
    """
    attempts, connection = tables.attempts, transaction.connection
    ingest = RecordIngest(_JudgedBefore(LogStore(home / "logs")))
    running = connection.execute(sa.select(attempts).where(attempts.c.ended_at.is_(None))).all()
    for attempt in running:
        directory = home / "attempts" / str(attempt.id)
        if not directory.is_dir():
            if attempt.id <= newest_attempt(home / "attempts"):
                # Attempt started earlier, so ended by now: its trial must resume in another.
                directory.mkdir(mode=0o700, parents=True)
                (directory / "started").touch(mode=0o600)
            continue
        marks = tables.journal_marks
        judged = {
            (row.generation, row.rank): row.sequence
            for row in connection.execute(sa.select(marks).where(marks.c.attempt_id == attempt.id))
        }
        connection.execute(sa.delete(marks).where(marks.c.attempt_id == attempt.id))
        for batch in _batches_for_rebuild(directory / "run", judged):
            ingest.store(transaction, attempt.id, [batch])


def _batches_for_rebuild(run: Path, judged: dict[tuple[int, int], int]) -> Iterator[RecordBatch]:
    directory = RunDirectory(run)
    for key in directory.journal_keys():
        last = judged.get((key.generation, key.rank), -1)
        reader = directory.reader(key)
        while last >= 0:
            try:
                entries = [entry for entry in reader.read(_BATCH) if entry.sequence <= last]
                records = [(entry.sequence, entry.decode()) for entry in entries]
            except (JournalVersionError, msgspec.DecodeError, OSError):
                break  # its runner sends the rest, and reports lost records
            if not records:
                break
            yield RecordBatch(key.generation, key.rank, records)


def _recompute_best(transaction: Transaction) -> None:
    """Recompute the values derived from metrics."""
    trials, experiments = tables.trials, tables.experiments
    managed = sa.select(experiments.c.id).where(experiments.c.external_id.is_(None))
    query = sa.select(trials).where(trials.c.experiment_id.in_(managed))
    running = sa.select(tables.attempts.c.trial_id).where(tables.attempts.c.ended_at.is_(None))
    first = sa.select(trials.c.id).group_by(trials.c.experiment_id)
    concerned = trials.c.id.in_(running) | trials.c.id.in_(first)
    rows: list[sa.Row[Any]] = list(transaction.connection.execute(query.where(concerned)))
    changes = StateChanges(Searches(), LogStore(Path(os.devnull)))
    for trial in rows:
        recompute_best(changes, transaction, trial)
