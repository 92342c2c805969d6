"""Records beside the database: writing, reading, and comparison with the database."""

import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
import xxhash

from paceline import faults
from paceline._base.files import regular_opener
from paceline._base.journal_reading_and_writing import frame_line
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database, DatabaseLostError, Transaction
from paceline._cluster.master.store.recovery_rows import (
    ALL,
    GONE,
    LASTING,
    NEW,
    OF_ATTEMPTS,
    RecordedRow,
    are_records_begun,
    begin_records,
    change_rows,
    decode_row,
    encode_row,
    experiment_rows,
    lasting_rows,
    marks_of_running,
    primary_key,
)
from paceline._cluster.master.upkeep.check_files import Finding, Report

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 * 1024


def whole_lines(path: Path) -> int:
    """Return how many bytes of a file are whole lines."""
    with open(path, "rb", opener=regular_opener) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


RECORDS = "records"
_ACCOUNTS_NAME = "accounts.jsonl"


def record_path(home: Path, experiment_id: int | None) -> Path:
    """Return the record file of an experiment, or of users and tokens for None."""
    name = _ACCOUNTS_NAME if experiment_id is None else f"experiment-{experiment_id}.jsonl"
    return home / RECORDS / name


def recorded_experiments(home: Path) -> list[int]:
    """Return the experiments with a record, in order of their numbers."""
    names = (path.stem.removeprefix("experiment-") for path in (home / RECORDS).glob("exp*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_record(path: Path) -> Iterator[tuple[int, RecordedRow | None]]:
    """Yield the number of each line, from 1, and its row; None for a damaged line.

    A last line without its end is incomplete, and is left out.
    """
    with open(path, "rb", opener=regular_opener) as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, _parse_record(line[:-1])


def _parse_record(line: bytes) -> RecordedRow | None:
    checksum, _, body = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(body):
            return None
        return decode_row(body.partition(b" ")[2])
    except (ValueError, KeyError, TypeError, msgspec.DecodeError):
        return None


def append_recovery_rows(
    path: Path, number: int, rows: Iterable[RecordedRow], *, anew: bool
) -> None:
    """Add rows to a record; `number` orders the changes.

    A line torn by a crash is removed first.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # A torn line at the end is cut off, or it would spoil the next row.
    end = whole_lines(path) if path.exists() and not anew else 0
    with os.fdopen(regular_opener(str(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC), "r+b") as file:
        file.truncate(end)
        file.seek(end)
        for row in rows:
            file.write(frame_line(number, encode_row(row)))


faults.register("recorder.written")

# Changes are gathered for so long: most rows change more than once in a moment.
_GATHER_S = 0.25
_RETRY_S = 10.0
_MAX_CHANGES = 1000
# Rows of an experiment that are recorded whole, as after an upgrade, come at a time; the thread
# then rests so many times as long as that took, and leaves the interpreter to requests.
_MAX_WHOLE = 20
_REST = 4.0


class Recorder:
    """Thread writing changed rows to the records, after their transactions.

    The database holds the rows yet to be written, so that a kill loses none. A full
    disk holds up only the records.

    Args:
        database: The database.
        home: The home of the record.
    """

    def __init__(self, database: Database, home: Path) -> None:
        self._database = database
        self._home = home
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Start the thread; in a home of an earlier version, all rows are recorded first."""
        begin_records(self._database)
        self._database.on_commit(lambda _: self._changed.set())
        # Rows may wait from before the start.
        self._changed.set()
        self._thread.start()

    def close(self) -> None:
        """Write the remaining changes and stop."""
        self._closing.set()
        self._changed.set()
        self._thread.join()

    def flush(self) -> None:
        """Write all pending changes.

        Raises:
            OSError: It cannot be written.
        """
        began, last = time.monotonic(), 0
        while last := write_some(self._database, self._home, last):
            if not self._is_long():
                continue
            # Most of the time belongs to the writer of the database.
            if self._closing.wait(_REST * (time.monotonic() - began)):
                return
            began = time.monotonic()

    def _is_long(self) -> bool:
        """Return whether much work is left; the next master can continue the work."""
        query = sa.select(tables.unrecorded.c.id).where(tables.unrecorded.c.kind == ALL).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).first() is not None

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if not self._closing.wait(_GATHER_S):
                self._changed.clear()
            try:
                self.flush()
            except DatabaseLostError:
                return
            except Exception:
                logger.exception("The records cannot be written; they are tried again.")
                self._changed.set()
                self._closing.wait(_RETRY_S)
            # Lost database: its stored changes are recorded already, and nothing more can follow.
            if self._closing.is_set() or isinstance(self._database.failure, DatabaseLostError):
                return


def write_some(database: Database, home: Path, after: int = 0) -> int:
    """Write the oldest pending changes.

    Args:
        database: The database.
        home: The home of the record.
        after: The last change that was written.

    Returns:
        The last change that is written now, 0 if there was none.

    Raises:
        DatabaseLostError: The file of the database is lost, and no connection to it is left.
        OSError: They cannot be written.
    """
    with database.read() as connection:
        unrecorded = tables.unrecorded
        query = sa.select(unrecorded).where(unrecorded.c.id > after).order_by(unrecorded.c.id)
        query = query.limit(_MAX_CHANGES)
        changes = _first_changes(connection.execute(query).all())
        if not changes:
            return 0
        by_experiment: dict[int | None, list[sa.Row[Any]]] = {}
        for change in changes:
            by_experiment.setdefault(change.experiment_id, []).append(change)
        for experiment_id, own in by_experiment.items():
            _write_records(connection, home, experiment_id, own)
    faults.reach("recorder.written")
    last: int = changes[-1].id
    # Lost database: its pending rows are never read again, so removal may fail.
    with suppress(DatabaseLostError):
        database.write(lambda t: _forget_records(t, last)).result()
    return last


def _first_changes(changes: Sequence[sa.Row[Any]]) -> Sequence[sa.Row[Any]]:
    """Return as many of the oldest changes as are a moment's work."""
    whole = [place for place, change in enumerate(changes) if change.kind == ALL]
    return changes[: whole[_MAX_WHOLE]] if len(whole) > _MAX_WHOLE else changes


def _write_records(
    connection: sa.Connection, home: Path, experiment_id: int | None, changes: list[sa.Row[Any]]
) -> None:
    path = record_path(home, experiment_id)
    if any(change.kind == GONE for change in changes):
        path.unlink(missing_ok=True)
        return
    kinds = {change.kind for change in changes}
    # All rows anew take the place of a record, in a file that is whole or not there.
    if ALL in kinds:
        part = path.with_name(f".{path.name}.part")
        append_recovery_rows(part, changes[-1].id, _rows_to_recover(connection, changes), anew=True)
        part.replace(path)
        if path.stat().st_size == 0:
            path.unlink()  # there is nobody yet
    else:
        append_recovery_rows(
            path, changes[-1].id, _rows_to_recover(connection, changes), anew=NEW in kinds
        )


def _rows_to_recover(
    connection: sa.Connection, changes: list[sa.Row[Any]]
) -> Iterator[RecordedRow]:
    # All rows of an experiment include those that changed one by one.
    wanted = [change for change in changes if change.kind == ALL] or changes
    # Each once, in the order in which they changed first.
    once = dict.fromkeys((change.kind, change.row_id) for change in wanted)
    has_inputs = any(kind in (ALL, "search_inputs") for kind, _ in once)
    for kind, some in groupby(once, key=itemgetter(0)):
        ids = [row_id for _, row_id in some]
        if kind in LASTING:
            # One statement for all: reports of a moment are many inputs of a search.
            yield from lasting_rows(connection, kind, ids)
        else:
            for row_id in ids:
                yield from change_rows(connection, kind, row_id)
    # Journal marks of running attempts, recorded with inputs: a rebuild must not judge records
    # again when reading the journals anew.
    if has_inputs and changes[0].experiment_id is not None:
        yield from marks_of_running(connection, changes[0].experiment_id)


def _forget_records(transaction: Transaction, last: int) -> None:
    unrecorded = tables.unrecorded
    transaction.connection.execute(sa.delete(unrecorded).where(unrecorded.c.id <= last))


# Other columns change without a word to the record.
_COMPARED = {
    **LASTING,
    "series": (
        "trial_id", "attempt", "group", "key", "num_points", "num_numbers", "sum", "first_step",
        "last_step", "kind", "steps", "times", "value_bytes",
    ),
    "chunks": ("series_id", "first_step", "last_step", "kind", "steps", "times", "value_bytes"),
    "time_marks": ("time", "event", "steps_completed", "seconds"),
    "environments": ("content",),
}  # fmt: skip
# A later attempt of a trial changes these when it starts; they are recorded when it ends.
_EXTREMES = ("min", "max", "last")

# Tables recorded for users and tokens only, besides the tables of experiments.
_ACCOUNTS = (user_tables.users, user_tables.tokens)

Key = tuple[str, tuple[Any, ...]]


def check_records(home: Path, connection: sa.Connection, report: Report) -> list[int | None]:
    """Compare each experiment's rows in the database with its record.

    Experiments with rows yet to be recorded are left out.

    Returns:
        The experiments whose record is damaged or lacks something.
    """
    unrecorded = tables.unrecorded.c
    waiting = set(connection.execute(sa.select(unrecorded.experiment_id).distinct()).scalars())
    ids = list(connection.execute(sa.select(tables.experiments.c.id).order_by("id")).scalars())
    wrong: list[int | None] = []
    if not are_records_begun(connection):
        return []  # the next master records all anew
    accounts = record_path(home, None)
    if (problem := _accounts_problem(accounts, connection)) is not None:
        report(Finding(kind="record", where=accounts.relative_to(home).as_posix(), problem=problem))
        wrong.append(None)
    for experiment_id in ids:
        if experiment_id not in waiting and _check_experiment_records(
            home, connection, experiment_id, report
        ):
            wrong.append(experiment_id)
    for experiment_id in sorted(set(recorded_experiments(home)) - set(ids) - waiting):
        name = record_path(home, experiment_id).relative_to(home)
        problem = "is the record of an experiment that the database does not know"
        report(Finding(kind="record", where=str(name), problem=problem))
    return wrong


def _check_experiment_records(
    home: Path, connection: sa.Connection, experiment_id: int, report: Report
) -> bool:
    path = record_path(home, experiment_id)
    name = path.relative_to(home).as_posix()
    is_over = _is_over(connection, experiment_id)
    try:
        recorded, num_damaged = _read_records(path, is_over=is_over)
    except FileNotFoundError:
        report(Finding(kind="record", where=name, problem="is missing"))
        return True
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        report(Finding(kind="record", where=name, problem=problem, hint="move it away"))
        return True
    if num_damaged:
        # Damaged lines hide their rows, so a comparison would be meaningless.
        report(_damaged(name, num_damaged))
        return True
    num_lacking = 0
    stored: set[Key] = set()
    for row in experiment_rows(connection, experiment_id):
        if row.table not in _COMPARED or record_key(row) in stored:
            continue
        stored.add(record_key(row))
        known = recorded.get(record_key(row))
        if known is None:
            num_lacking += 1
        elif known != _digest(row, is_over=is_over):
            where = _named(*record_key(row), experiment_id)
            report(Finding(kind="database", where=where, problem=_OTHER))
    if num_lacking:
        report(Finding(kind="record", where=name, problem=f"lacks {num_lacking} rows"))
    for table, key in recorded.keys() - stored:
        where = _named(table, key, experiment_id)
        report(Finding(kind="database", where=where, problem=_MISSING))
    return num_lacking > 0


def _accounts_problem(path: Path, connection: sa.Connection) -> str | None:
    try:
        num_damaged = sum(row is None for _, row in read_record(path))
    except FileNotFoundError:
        has_any = any(connection.execute(sa.select(one).limit(1)).first() for one in _ACCOUNTS)
        return "is missing" if has_any else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _damaged("", num_damaged).problem if num_damaged else None


def _damaged(name: str, num_damaged: int) -> Finding:
    lines = "1 damaged line" if num_damaged == 1 else f"{num_damaged} damaged lines"
    return Finding(kind="record", where=name, problem=f"has {lines}")


def _is_over(connection: sa.Connection, experiment_id: int) -> bool:
    """Return whether no attempt of an experiment is at work."""
    attempts = tables.attempts.c
    query = sa.select(attempts.id).where(
        attempts.experiment_id == experiment_id, attempts.ended_at.is_(None)
    )
    return connection.execute(query.limit(1)).first() is None


def _read_records(path: Path, *, is_over: bool) -> tuple[dict[Key, int], int]:
    """Return a digest of the newest values of each recorded row, and how many lines are damaged."""
    recorded: dict[Key, int] = {}
    num_damaged = 0
    for _, row in read_record(path):
        if row is None:
            num_damaged += 1
        elif row.table in _COMPARED:
            recorded[record_key(row)] = _digest(row, is_over=is_over)
    return recorded, num_damaged


_OTHER = "is not in the database as it is in the record"
_MISSING = "is in the record and not in the database"


def rows_to_mend(
    home: Path, connection: sa.Connection, experiment_id: int
) -> Iterator[RecordedRow]:
    """Yield the newest recorded rows differing from the database or missing there."""
    wanted: dict[Key, RecordedRow] = {}
    is_over = _is_over(connection, experiment_id)
    for _, row in read_record(record_path(home, experiment_id)):
        if row is not None and row.table in _COMPARED:
            wanted[record_key(row)] = row
    for row in experiment_rows(connection, experiment_id):
        known = wanted.get(record_key(row))
        if known is not None and _digest(known, is_over=is_over) == _digest(row, is_over=is_over):
            del wanted[record_key(row)]
    yield from wanted.values()


def mend_recorded_row(connection: sqlite3.Connection, row: RecordedRow) -> None:
    """Update a database row from its record, or insert the missing row."""
    assert row.values is not None
    present = {found[1] for found in connection.execute(f"PRAGMA table_info({row.table})")}
    key = primary_key(row.table)
    condition = " AND ".join(f'"{name}" = ?' for name in key)
    keys = tuple(row.values[name] for name in key)
    mended = (*_COMPARED[row.table], *_EXTREMES * (row.table == "series"))
    names = [name for name in mended if name in row.values and name in present]
    changes = ", ".join(f'"{name}" = ?' for name in names)
    changed = connection.execute(
        f"UPDATE {row.table} SET {changes} WHERE {condition}",  # noqa: S608
        (*(row.values[name] for name in names), *keys),
    )
    if changed.rowcount == 0:
        values = {name: value for name, value in row.values.items() if name in present}
        columns = ", ".join(f'"{name}"' for name in values)
        marks = ", ".join("?" * len(values))
        connection.execute(
            f"INSERT INTO {row.table} ({columns}) VALUES ({marks})",  # noqa: S608
            tuple(values.values()),
        )


def record_key(row: RecordedRow) -> Key:
    """Return the identifying key of a recorded row: its table and primary key."""
    assert row.values is not None
    return row.table, tuple(row.values[name] for name in primary_key(row.table))


def _named(table: str, key: tuple[Any, ...], experiment_id: int) -> str:
    """Return the name of a row for people."""
    if table in OF_ATTEMPTS:
        return f"a piece of metrics ({table} {key[0]}) of experiment {experiment_id}"
    if table == "search_inputs":
        return f"input {key[1]} of the search of experiment {key[0]}"
    return f"{table.removesuffix('s')} {key[0]}"


def _digest(row: RecordedRow, *, is_over: bool) -> int:
    assert row.values is not None
    names = (*_COMPARED[row.table], *_EXTREMES * (is_over and row.table == "series"))
    values = {name: row.values.get(name) for name in names}
    return xxhash.xxh3_128_intdigest(encode_row(RecordedRow(row.table, values)))
