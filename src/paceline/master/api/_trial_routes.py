"""Routes of trials: details, metrics, checkpoints."""

import asyncio

from sqlalchemy import select

from paceline.master.api._api_router import ApiRouter
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import (
    MAX_PAGE,
    Cursor,
    Limit,
    MasterOf,
    RecordsOf,
    RequestKey,
    TrialId,
    checkpoint_page,
    experiment_row,
    position_in_rows,
    trial_row,
    write_once,
    write_rows,
)
from paceline.master.store import (
    Order,
    Transaction,
    encode_cursor,
    num_metric_names,
    read_environment,
    read_rows,
    tables,
    tagged,
    time_shares,
    trial_view,
)
from paceline.messages.base import Page
from paceline.messages.checkpoints import Checkpoint
from paceline.messages.experiments import ContinueTrial, Experiment
from paceline.messages.metrics import MetricRow
from paceline.messages.trials import AttemptEnvironment, Trial, TrialTime

router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

# Of a page of metrics; one row may have more.
_MAX_VALUES = 100_000


@router.get("/trials/{trial_id}")
def read_trial(trial_id: TrialId, records: RecordsOf) -> Trial:
    """Read one trial with its attempts and metric summaries."""
    with records.database.read() as connection:
        return trial_view(connection, trial_row(connection, trial_id))


@router.get("/trials/{trial_id}/time")
def read_trial_time(trial_id: TrialId, records: RecordsOf) -> TrialTime:
    """Read what the time of a trial went to."""
    with records.database.read() as connection:
        shares, until = time_shares(connection, trial_row(connection, trial_id))
    return TrialTime(
        **shares.seconds(), total_s=shares.total_s, goodput=shares.goodput, until=until
    )


@router.get("/trials/{trial_id}/environments")
def list_environments(trial_id: TrialId, records: RecordsOf) -> list[AttemptEnvironment]:
    """Read what the attempts of a trial ran in, the earliest first."""
    attempts = tables.attempts.c
    with records.database.read() as connection:
        trial = trial_row(connection, trial_id)
        source = experiment_row(connection, trial.experiment_id).source
        query = select(attempts.number, attempts.environment).where(attempts.trial_id == trial_id)
        found = []
        for row in connection.execute(query.order_by(attempts.number)).all():
            environment = read_environment(connection, row.environment)
            own = None if environment is None else environment.pop("source", None)
            found.append(
                AttemptEnvironment(number=row.number, environment=environment, source=source or own)
            )
    return found


@router.post("/trials/{trial_id}/kill")
async def kill_trial(trial_id: TrialId, master: MasterOf) -> Trial:
    """End a trial at once."""
    await write_rows(master, lambda transaction: master.commands.kill_trial(transaction, trial_id))
    return await asyncio.to_thread(read_trial, trial_id, master)


@router.post("/trials/{trial_id}/continue", status_code=201)
async def continue_trial(
    trial_id: TrialId, request: ContinueTrial, master: MasterOf, key: RequestKey
) -> Experiment:
    """Create a `single` experiment that starts from the trial's latest checkpoint."""
    from paceline.master.api._experiment_routes import read_experiment

    def job(transaction: Transaction) -> int:
        return master.commands.continue_trial(
            transaction, trial_id, request.config, activate=request.activate
        )

    experiment_id = await write_once(master, key, job)
    return await asyncio.to_thread(read_experiment, experiment_id, master)


@router.get("/trials/{trial_id}/metrics")
def list_metrics(
    trial_id: TrialId,
    records: RecordsOf,
    group: str = "validation",
    limit: Limit = MAX_PAGE,
    cursor: Cursor = None,
) -> Page[MetricRow]:
    """List the rows of one metric group in step order; superseded rows are left out.

    A page ends earlier where rows have very many metrics.
    """
    after = position_in_rows(cursor, [0])[0] if cursor is not None else -1
    with records.database.read() as connection:
        trial_row(connection, trial_id)
        num_names = num_metric_names(connection, trial_id, group, at_most=_MAX_VALUES)
        limit = max(1, min(limit, _MAX_VALUES // max(1, num_names)))
        rows = read_rows(connection, trial_id, group, after_step=after, limit=limit + 1)
    more = encode_cursor(rows[limit - 1].step) if len(rows) > limit else None
    items = [
        MetricRow(
            group=group,
            steps_completed=row.step,
            attempt=row.attempt,
            time=row.time,
            metrics=tagged(row.metrics),
        )
        for row in rows[:limit]
    ]
    return Page(items=items, next_cursor=more)


@router.get("/trials/{trial_id}/checkpoints")
def list_trial_checkpoints(
    trial_id: TrialId, records: RecordsOf, limit: Limit = MAX_PAGE, cursor: Cursor = None
) -> Page[Checkpoint]:
    """List a trial's checkpoints, the latest first."""
    checkpoints = tables.checkpoints.c
    keys = (checkpoints.steps_completed, checkpoints.created_at, checkpoints.uuid)
    with records.database.read() as connection:
        trial_row(connection, trial_id)
        query = select(tables.checkpoints).where(checkpoints.trial_id == trial_id)
        order = Order(keys, is_descending=True)
        return checkpoint_page(connection, query, order, "a trial's checkpoints", cursor, limit)
