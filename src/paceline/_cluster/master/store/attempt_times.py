"""Time of attempts by use: training, validation, checkpoints and waiting."""

import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from paceline._base.journal_records import AttemptTimes, TimeShares, TimeSpent, divide_time
from paceline._cluster.master.store import tables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


# Events of the records kept for a later session to resume from;
# of the other records only the newest stays.
_KEPT = ("start", "checkpoint")


def add_time_mark(
    connection: sa.Connection, attempt_id: int, generation: int, record: TimeSpent
) -> None:
    """Store a record of the chief of an attempt."""
    marks = tables.time_marks
    of_session = (marks.c.attempt_id == attempt_id) & (marks.c.generation == generation)
    newest = connection.execute(
        sa.select(marks.c.number, marks.c.event)
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
        connection.execute(sa.update(marks).where(is_newest).values(**values))
        return
    number = 0 if newest is None else newest.number + 1
    key = {"attempt_id": attempt_id, "generation": generation, "number": number}
    connection.execute(sa.insert(marks).values(**key, **values))


def time_shares(connection: sa.Connection, trial: sa.Row[Any]) -> tuple[TimeShares, float]:
    """Return the shares of a trial's time, and the end of the measured span: its end or now."""
    attempts = tables.attempts
    rows = connection.execute(
        sa.select(attempts).where(attempts.c.trial_id == trial.id).order_by(attempts.c.number)
    ).all()
    until = time.time() if trial.ended_at is None else trial.ended_at
    sessions = _attempt_time_records(connection, trial.id)
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


def attempt_spent(
    connection: sa.Connection, attempt: sa.Row[Any], end: float
) -> dict[str, float] | None:
    """Return the seconds of kept and of lost training of an attempt that ends; None if unknown.

    What it did after its last checkpoint is lost, unless its training came to an end.
    """
    sessions = _attempt_time_records(connection, attempt.trial_id, attempt.id).get(attempt.id)
    if not sessions:
        return None
    last = sessions[-1]
    times = [AttemptTimes(created_at=attempt.created_at, ended_at=end, sessions=sessions)]
    if last[-1].event != "end":
        kept = [one for one in last if one.event in _KEPT][-1:] or last[:1]
        resumed = msgspec.structs.replace(kept[0], time=end, event="start")
        times.append(AttemptTimes(created_at=end, ended_at=end, sessions=[[resumed]]))
    shares = divide_time(attempt.created_at, end, times)
    return {"training_s": shares.training_s, "lost_s": shares.lost_s}


def _attempt_time_records(
    connection: sa.Connection, trial_id: int, attempt_id: int | None = None
) -> dict[int, list[list[TimeSpent]]]:
    """Return the records of each attempt, or of a single one, by generation."""
    marks, attempts = tables.time_marks, tables.attempts
    wanted = attempts.c.trial_id == trial_id
    if attempt_id is not None:
        wanted = marks.c.attempt_id == attempt_id
    rows = connection.execute(
        sa.select(marks)
        .join(attempts, attempts.c.id == marks.c.attempt_id)
        .where(wanted)
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
