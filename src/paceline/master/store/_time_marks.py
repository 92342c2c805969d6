"""What attempts have spent their time on, and what came of a trial's whole time."""

import time
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from paceline.journal import AttemptTimes, TimeShares, TimeSpent, divide_time
from paceline.master.store import _tables as tables

# What a later session may go on from is kept; the newest of the others replaces the one before.
_KEPT = ("start", "checkpoint")


def add_time_mark(
    connection: Connection, attempt_id: int, generation: int, record: TimeSpent
) -> None:
    """Store a record of the chief of an attempt."""
    marks = tables.time_marks
    of_session = (marks.c.attempt_id == attempt_id) & (marks.c.generation == generation)
    newest = connection.execute(
        select(marks.c.number, marks.c.event)
        .where(of_session)
        .order_by(marks.c.number.desc())
        .limit(1)
    ).first()
    values = {
        "time": record.time,
        "event": record.event,
        "steps_completed": record.steps_completed,
        "seconds": record.seconds,
    }
    if newest is not None and newest.event not in _KEPT:
        is_newest = of_session & (marks.c.number == newest.number)
        connection.execute(update(marks).where(is_newest).values(**values))
        return
    number = 0 if newest is None else newest.number + 1
    key = {"attempt_id": attempt_id, "generation": generation, "number": number}
    connection.execute(insert(marks).values(**key, **values))


def time_shares(connection: Connection, trial: Row[Any]) -> tuple[TimeShares, float]:
    """Return what a trial's time went to, and until when: its end, or now."""
    attempts = tables.attempts
    rows = connection.execute(
        select(attempts).where(attempts.c.trial_id == trial.id).order_by(attempts.c.number)
    ).all()
    until = time.time() if trial.ended_at is None else trial.ended_at
    sessions = _time_records_of_attempts(connection, trial.id)
    divided = divide_time(
        trial.created_at,
        until,
        [
            AttemptTimes(
                created_at=row.created_at,
                ended_at=row.ended_at,
                sessions=sessions.get(row.id, []),
            )
            for row in rows
        ],
    )
    return divided, until


def _time_records_of_attempts(
    connection: Connection, trial_id: int
) -> dict[int, list[list[TimeSpent]]]:
    """Return the records of each attempt by generation."""
    marks, attempts = tables.time_marks, tables.attempts
    rows = connection.execute(
        select(marks)
        .join(attempts, attempts.c.id == marks.c.attempt_id)
        .where(attempts.c.trial_id == trial_id)
        .order_by(marks.c.attempt_id, marks.c.generation, marks.c.number)
    )
    sessions: dict[int, list[list[TimeSpent]]] = {}
    for (attempt_id, _), group in groupby(rows, lambda row: (row.attempt_id, row.generation)):
        records = [
            TimeSpent(
                time=row.time,
                event=row.event,
                steps_completed=row.steps_completed,
                seconds=row.seconds,
            )
            for row in group
        ]
        sessions.setdefault(attempt_id, []).append(records)
    return sessions
