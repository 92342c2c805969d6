"""Routes of trials: details, metrics, logs."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from sqlalchemy import Connection, select

from paceline.master.api._reading import ReadingRoute
from paceline.master.api._route_helpers import (
    MAX_PAGE,
    Cursor,
    Limit,
    MasterOf,
    checkpoint_page,
    experiment_row,
    position,
    trial_row,
    write,
)
from paceline.master.store import (
    LogFilter,
    Order,
    StoredLine,
    Transaction,
    encode_cursor,
    merge_lines,
    read_environment,
    read_rows,
    tables,
    tagged,
    time_shares,
    trial_views,
)
from paceline.messages import resources, times

router = APIRouter(tags=["trials"], route_class=ReadingRoute)

TrialId = Annotated[int, Path(ge=1, le=2**62)]
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


@router.get("/trials/{trial_id}")
def read_trial(trial_id: TrialId, master: MasterOf) -> resources.Trial:
    """Read one trial with its attempts and metric summaries."""
    with master.database.read() as connection:
        return trial_views(connection, [trial_row(connection, trial_id)], has_details=True)[0]


@router.get("/trials/{trial_id}/time")
def read_trial_time(trial_id: TrialId, master: MasterOf) -> times.TrialTime:
    """Read what the time of a trial went to."""
    with master.database.read() as connection:
        shares, until = time_shares(connection, trial_row(connection, trial_id))
    return times.TrialTime(
        **shares.seconds(), total_s=shares.total_s, goodput=shares.goodput, until=until
    )


@router.get("/trials/{trial_id}/environments")
def list_environments(trial_id: TrialId, master: MasterOf) -> list[resources.AttemptEnvironment]:
    """Read what the attempts of a trial ran in, the earliest first."""
    attempts = tables.attempts.c
    with master.database.read() as connection:
        trial = trial_row(connection, trial_id)
        source = experiment_row(connection, trial.experiment_id).source
        query = select(attempts.number, attempts.environment).where(attempts.trial_id == trial_id)
        found = []
        for row in connection.execute(query.order_by(attempts.number)):
            environment = read_environment(connection, row.environment)
            own = None if environment is None else environment.pop("source", None)
            found.append(
                resources.AttemptEnvironment(
                    number=row.number, environment=environment, source=source or own
                )
            )
    return found


@router.post("/trials/{trial_id}/kill")
async def kill_trial(trial_id: TrialId, master: MasterOf) -> resources.Trial:
    """End a trial at once."""
    await write(master, lambda transaction: master.commands.kill_trial(transaction, trial_id))
    return await asyncio.to_thread(read_trial, trial_id, master)


@router.post("/trials/{trial_id}/continue", status_code=201)
async def continue_trial(
    trial_id: TrialId, request: resources.ContinueTrial, master: MasterOf
) -> resources.Experiment:
    """Create a `single` experiment that starts from the trial's latest checkpoint."""
    from paceline.master.api._experiment_routes import read_experiment

    def job(transaction: Transaction) -> int:
        return master.commands.continue_trial(
            transaction, trial_id, request.config, activate=request.activate
        )

    experiment_id = await write(master, job)
    return await asyncio.to_thread(read_experiment, experiment_id, master)


@router.get("/trials/{trial_id}/metrics")
def list_metrics(
    trial_id: TrialId,
    master: MasterOf,
    group: str = "validation",
    limit: Limit = MAX_PAGE,
    cursor: Cursor = None,
) -> resources.Page[resources.MetricRow]:
    """List the rows of one metric group in step order; superseded rows are left out."""
    after = position(cursor, [0])[0] if cursor is not None else -1
    with master.database.read() as connection:
        trial_row(connection, trial_id)
        rows = read_rows(connection, trial_id, group, after_step=after, limit=limit + 1)
    more = encode_cursor(rows[limit - 1].step) if len(rows) > limit else None
    items = [
        resources.MetricRow(
            group=group,
            steps_completed=row.step,
            attempt=row.attempt,
            time=row.time,
            metrics=tagged(row.metrics),
        )
        for row in rows[:limit]
    ]
    return resources.Page(items=items, next_cursor=more)


@router.get("/trials/{trial_id}/checkpoints")
def list_trial_checkpoints(
    trial_id: TrialId, master: MasterOf, limit: Limit = MAX_PAGE, cursor: Cursor = None
) -> resources.Page[resources.Checkpoint]:
    """List a trial's checkpoints, the latest first."""
    checkpoints = tables.checkpoints.c
    keys = (checkpoints.steps_completed, checkpoints.created_at, checkpoints.uuid)
    with master.database.read() as connection:
        trial_row(connection, trial_id)
        query = select(tables.checkpoints).where(checkpoints.trial_id == trial_id)
        order = Order(keys, is_descending=True)
        return checkpoint_page(connection, query, order, "a trial's checkpoints", cursor, limit)


@router.get("/trials/{trial_id}/logs")
def list_trial_logs(
    trial_id: TrialId,
    master: MasterOf,
    only: Only,
    after: After = -1,
    limit: LineLimit = 1000,
    tail: Tail = None,
) -> resources.LogPage:
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
    return resources.LogPage(
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
) -> resources.LogPage:
    """List lines of all trials of an experiment in order of time."""
    read: list[int] = []
    with master.database.read() as connection:
        experiment_row(connection, experiment_id)
        spans = _ends(connection, experiment_id) if tail else _begins(connection, experiment_id)
        spans = _noted(spans, read)
        lines = merge_lines(master.logs, spans, newest_first=tail is not None, only=only)
        chosen = list(islice(lines, tail or limit))
    if tail is not None:
        chosen.reverse()
    return resources.LogPage(
        items=[log_view(trial_id, line) for trial_id, line in chosen],
        num_damaged=sum(map(master.logs.num_damaged, read)),
    )


def _noted(spans: Iterator[tuple[int, float]], read: list[int]) -> Iterator[tuple[int, float]]:
    """Yield spans, and note the trials whose lines are read."""
    for trial_id, time in spans:
        read.append(trial_id)
        yield trial_id, time


def _begins(connection: Connection, experiment_id: int) -> Iterator[tuple[int, float]]:
    """Return the experiment's trials with the time of their first attempt, in that order."""
    attempts = tables.attempts.c
    query = (
        select(attempts.trial_id, attempts.created_at)
        .where(attempts.experiment_id == experiment_id, attempts.number == 1)
        .order_by(attempts.created_at, attempts.trial_id)
    )
    return ((trial_id, time) for trial_id, time in connection.execute(query))


def _ends(connection: Connection, experiment_id: int) -> Iterator[tuple[int, float]]:
    """Return the experiment's trials with the time of their end, the latest first."""
    trials = tables.trials
    query = (
        select(trials.c.id, trials.c.ended_at)
        .where(trials.c.experiment_id == experiment_id, trials.c.num_attempts > 0)
        .order_by(trials.c.ended_at.desc().nulls_first(), trials.c.id.desc())
    )
    rows = connection.execute(query)
    return ((trial_id, inf if time is None else time) for trial_id, time in rows)


def log_view(trial_id: int, line: StoredLine) -> resources.LogLine:
    """Return a line as the API shows it."""
    return resources.LogLine(
        id=line.id,
        trial_id=trial_id,
        attempt=line.attempt,
        time=line.time,
        rank=line.rank,
        stream=line.stream,
        level=line.level,
        text=line.text,
    )
