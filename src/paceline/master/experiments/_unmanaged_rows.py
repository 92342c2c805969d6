"""Rows of runs made without a master."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, Table, insert, select, update

from paceline.master.store import new_id, tables
from paceline.messages.runs import RunBatch, RunMark, RunReply
from paceline.messages.states import AttemptState


def experiment_of_run(connection: Connection, run_id: str) -> Row[Any] | None:
    """Return the experiment that shows a run, None if there is none."""
    experiments = tables.experiments
    return connection.execute(
        select(experiments).where(experiments.c.external_id == run_id)
    ).first()


def trial_of_run(connection: Connection, experiment_id: int) -> Row[Any]:
    """Return the trial of such an experiment."""
    trials = tables.trials
    return connection.execute(select(trials).where(trials.c.experiment_id == experiment_id)).one()


def attempts_of_run(connection: Connection, trial_id: int) -> list[Row[Any]]:
    """Return a trial's attempts, the earliest first."""
    attempts = tables.attempts
    query = select(attempts).where(attempts.c.trial_id == trial_id).order_by(attempts.c.number)
    return list(connection.execute(query))


def insert_row(connection: Connection, table: Table, **values: Any) -> int:
    """Insert a row and return its id."""
    row_id = new_id(connection, table)
    connection.execute(insert(table).values(id=row_id, **values))
    return row_id


def update_experiment(connection: Connection, experiment_id: int, **values: Any) -> None:
    """Change the row of an experiment."""
    experiments = tables.experiments
    connection.execute(
        update(experiments).where(experiments.c.id == experiment_id).values(**values)
    )


def update_attempt(connection: Connection, attempt_id: int, **values: Any) -> None:
    """Change the row of an attempt."""
    attempts = tables.attempts
    connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(**values))


def reopen_attempt(connection: Connection, attempt: Row[Any]) -> None:
    """Let an attempt run on that was taken for ended, and of which there is news.

    It looked dead: its lock cannot be seen from another machine, for example. Or its chief has
    ended, and other ranks have more to say: its end stays told then.
    """
    reopened: dict[str, Any] = {} if attempt.outcome is not None else {"exit": None}
    update_attempt(
        connection, attempt.id, state=AttemptState.RUNNING.value, ended_at=None, **reopened
    )


def has_news_of_run(connection: Connection, attempt_id: int, batches: Iterable[RunBatch]) -> bool:
    """Tell whether batches have records of an attempt that are not stored yet."""
    marks = tables.journal_marks
    rows = connection.execute(
        select(marks.c.rank, marks.c.sequence).where(marks.c.attempt_id == attempt_id)
    )
    stored = {row.rank: row.sequence for row in rows}
    return any(batch.records[-1][0] > stored.get(batch.rank, -1) for batch in batches)


def reply_of_run(connection: Connection, experiment_id: int) -> RunReply:
    """Return what is stored of a run, which its reporter goes on from."""
    marks, attempts = tables.journal_marks, tables.attempts
    rows = connection.execute(
        select(attempts.c.run_attempt, marks.c.generation, marks.c.rank, marks.c.sequence)
        .join(attempts, attempts.c.id == marks.c.attempt_id)
        .where(attempts.c.experiment_id == experiment_id)
        .order_by(attempts.c.number, marks.c.rank)
    )
    return RunReply(
        experiment_id=experiment_id,
        trial_id=trial_of_run(connection, experiment_id).id,
        marks=[RunMark(*row) for row in rows],
    )


def move_unmanaged_checkpoints(
    connection: Connection, experiment_id: int, old: str, new: str
) -> None:
    """Note that checkpoints of one storage are in another one now."""
    checkpoints = tables.checkpoints
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.experiment_id == experiment_id, checkpoints.c.storage == old)
        .values(storage=new)
    )
