"""Routes of logs: the output of a trial, and of all trials of an experiment."""

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Annotated, Literal

from fastapi import Depends, Path, Query
from sqlalchemy import Connection, select

from paceline.master.api._api_router import ApiRouter
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, TrialId, experiment_row, trial_row
from paceline.master.store import LogFilter, StoredLine, merge_lines, tables
from paceline.messages.logs import LogLine, LogPage

router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

Level = Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_MAX_LINES = 10_000
LineLimit = Annotated[int, Query(ge=1, le=_MAX_LINES)]
After = Annotated[int, Query(ge=-1, le=2**62, description="Lines beyond this id.")]
Tail = Annotated[int | None, Query(ge=1, le=_MAX_LINES, description="The last so many lines.")]


async def _log_filter(
    rank: int | None = None,
    level: Annotated[Level | None, Query(description="The lowest to list.")] = None,
    stream: str | None = None,
    search: str | None = None,
    since: Annotated[float | None, Query(description="Seconds since 1970, included.")] = None,
    until: Annotated[float | None, Query(description="Seconds since 1970, included.")] = None,
) -> LogFilter:
    return LogFilter(rank, level, stream, search, since, until)


Only = Annotated[LogFilter, Depends(_log_filter)]


@router.get("/trials/{trial_id}/logs")
def list_trial_logs(
    trial_id: TrialId,
    master: MasterOf,
    only: Only,
    after: After = -1,
    limit: LineLimit = 1000,
    tail: Tail = None,
) -> LogPage:
    """List lines of a trial's output, oldest first."""
    with master.database.read() as connection:
        trial_row(connection, trial_id)
    if tail is not None:
        lines = master.logs.tail(trial_id, tail, only=only)
        more = None
    else:
        lines = master.logs.read(trial_id, after=after, limit=limit + 1, only=only)
        more = str(lines[limit - 1].id) if len(lines) > limit else None
        lines = lines[:limit]
    return LogPage(
        items=[log_view(trial_id, line) for line in lines],
        next_cursor=more,
        num_damaged=master.logs.num_damaged(trial_id),
    )


@router.get("/experiments/{experiment_id}/logs")
def list_experiment_logs(
    experiment_id: Annotated[int, Path(ge=1, le=2**62)],
    master: MasterOf,
    only: Only,
    limit: LineLimit = 1000,
    tail: Tail = None,
) -> LogPage:
    """List lines of all trials of an experiment in order of time."""
    read: list[int] = []
    with master.database.read() as connection:
        experiment_row(connection, experiment_id)
        spans = (
            _log_ends(connection, experiment_id) if tail else _log_begins(connection, experiment_id)
        )
        spans = _noted_logs(spans, read)
        lines = merge_lines(master.logs, spans, newest_first=tail is not None, only=only)
        chosen = list(islice(lines, tail or limit))
    if tail is not None:
        chosen.reverse()
    return LogPage(
        items=[log_view(trial_id, line) for trial_id, line in chosen],
        num_damaged=sum(map(master.logs.num_damaged, read)),
    )


def _noted_logs(spans: Iterator[tuple[int, float]], read: list[int]) -> Iterator[tuple[int, float]]:
    """Yield spans, and note the trials whose lines are read."""
    for trial_id, time in spans:
        read.append(trial_id)
        yield trial_id, time


def _log_begins(connection: Connection, experiment_id: int) -> Iterator[tuple[int, float]]:
    """Return the experiment's trials with the time of their first attempt, in that order."""
    attempts = tables.attempts.c
    query = (
        select(attempts.trial_id, attempts.created_at)
        .where(attempts.experiment_id == experiment_id, attempts.number == 1)
        .order_by(attempts.created_at, attempts.trial_id)
    )
    return ((trial_id, time) for trial_id, time in connection.execute(query))


def _log_ends(connection: Connection, experiment_id: int) -> Iterator[tuple[int, float]]:
    """Return the experiment's trials with the time of their end, the latest first."""
    trials = tables.trials
    query = (
        select(trials.c.id, trials.c.ended_at)
        .where(trials.c.experiment_id == experiment_id, trials.c.num_attempts > 0)
        .order_by(trials.c.ended_at.desc().nulls_first(), trials.c.id.desc())
    )
    rows = connection.execute(query)
    return ((trial_id, inf if time is None else time) for trial_id, time in rows)


def log_view(trial_id: int, line: StoredLine) -> LogLine:
    """Return a line as the API shows it."""
    return LogLine(
        id=line.id,
        trial_id=trial_id,
        attempt=line.attempt,
        time=line.time,
        rank=line.rank,
        stream=line.stream,
        level=line.level,
        text=line.text,
    )
