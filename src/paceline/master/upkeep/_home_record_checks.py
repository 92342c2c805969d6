"""Comparison of the database with the records beside it."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from sqlalchemy import Connection, select

from paceline.master.store import (
    LASTING,
    OF_ATTEMPTS,
    RecordedRow,
    are_records_begun,
    encode_row,
    primary_key,
    rows_of_experiment,
    tables,
)
from paceline.master.upkeep._check_findings import Finding, Report
from paceline.master.upkeep._recovery_records import read_record, record_path, recorded_experiments

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

# What the record of users and tokens has besides those of experiments.
_ACCOUNTS = (tables.users, tables.tokens)

Key = tuple[str, tuple[Any, ...]]


def check_records(home: Path, connection: Connection, report: Report) -> list[int | None]:
    """Compare what the database holds of each experiment with its record.

    Experiments of which something is yet to be recorded are left out.

    Returns:
        The experiments whose record is damaged or lacks something.
    """
    unrecorded = tables.unrecorded.c
    waiting = set(connection.execute(select(unrecorded.experiment_id).distinct()).scalars())
    ids = list(connection.execute(select(tables.experiments.c.id).order_by("id")).scalars())
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
    home: Path, connection: Connection, experiment_id: int, report: Report
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
        # Which rows the lines held is not known.
        report(_damaged(name, num_damaged))
        return True
    num_lacking = 0
    stored: set[Key] = set()
    for row in rows_of_experiment(connection, experiment_id):
        if row.table not in _COMPARED or key_of_record(row) in stored:
            continue
        stored.add(key_of_record(row))
        known = recorded.get(key_of_record(row))
        if known is None:
            num_lacking += 1
        elif known != _digest(row, is_over=is_over):
            where = _named(*key_of_record(row), experiment_id)
            report(Finding(kind="database", where=where, problem=_OTHER))
    if num_lacking:
        report(Finding(kind="record", where=name, problem=f"lacks {num_lacking} rows"))
    for table, key in recorded.keys() - stored:
        where = _named(table, key, experiment_id)
        report(Finding(kind="database", where=where, problem=_MISSING))
    return num_lacking > 0


def _accounts_problem(path: Path, connection: Connection) -> str | None:
    try:
        num_damaged = sum(row is None for _, row in read_record(path))
    except FileNotFoundError:
        has_any = any(connection.execute(select(one).limit(1)).first() for one in _ACCOUNTS)
        return "is missing" if has_any else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _damaged("", num_damaged).problem if num_damaged else None


def _damaged(name: str, num_damaged: int) -> Finding:
    lines = "1 damaged line" if num_damaged == 1 else f"{num_damaged} damaged lines"
    return Finding(kind="record", where=name, problem=f"has {lines}")


def _is_over(connection: Connection, experiment_id: int) -> bool:
    """Tell whether no attempt of an experiment is at work."""
    attempts = tables.attempts.c
    query = select(attempts.id).where(
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
            recorded[key_of_record(row)] = _digest(row, is_over=is_over)
    return recorded, num_damaged


_OTHER = "is not in the database as it is in the record"
_MISSING = "is in the record and not in the database"


def rows_to_mend(home: Path, connection: Connection, experiment_id: int) -> Iterator[RecordedRow]:
    """Yield the newest recorded rows that the database has in another way, or not at all."""
    wanted: dict[Key, RecordedRow] = {}
    is_over = _is_over(connection, experiment_id)
    for _, row in read_record(record_path(home, experiment_id)):
        if row is not None and row.table in _COMPARED:
            wanted[key_of_record(row)] = row
    for row in rows_of_experiment(connection, experiment_id):
        known = wanted.get(key_of_record(row))
        if known is not None and _digest(known, is_over=is_over) == _digest(row, is_over=is_over):
            del wanted[key_of_record(row)]
    yield from wanted.values()


def mend_recorded_row(connection: sqlite3.Connection, row: RecordedRow) -> None:
    """Give a row of the database the compared values of its record, or make it."""
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


def key_of_record(row: RecordedRow) -> Key:
    """Return what tells a row from others."""
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
