"""Trials: details, checkpoints, metrics; series for charts and as CSV."""

import asyncio
import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, repeat
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
import numpy as np
import sqlalchemy as sa
from fastapi import Query, Response
from fastapi.responses import StreamingResponse
from numpy.typing import NDArray

from paceline._base.terminal_text import csv_cell, csv_text
from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.experiment_routes import ExperimentId
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.master import Master
from paceline._cluster.master.searches.stored_searches import proposal_of
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    config_of,
    encode_cursor,
    read_environment,
    trial_view,
)
from paceline._cluster.master.store.attempt_times import time_shares
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.list_pages import Order
from paceline._cluster.master.store.metric_rows import iter_points, read_rows
from paceline._cluster.master.store.metric_summaries import (
    metric_names,
    num_metric_names,
    read_x_axes,
)
from paceline._cluster.master.store.series_reader import (
    Selection,
    cut_curve,
    read_curves,
    sample_curve,
    smooth_at,
    tagged,
)
from paceline._cluster.master.store.series_writer import NO_AXES
from paceline._cluster.messages.experiment_models import (
    AttemptEnvironment,
    Checkpoint,
    ContinueTrial,
    Experiment,
    MetricName,
    MetricRow,
    Page,
    Trial,
    TrialTime,
)
from paceline._cluster.messages.search_and_metric_models import (
    RungArrival,
    SeriesReply,
    SeriesRequest,
    TrialDecisions,
    TrialProposal,
    TrialRung,
)

trial_router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

# Values in a page of metrics at most; a single row may exceed the limit.
_MAX_VALUES = 100_000


@trial_router.get("/trials/{trial_id}")
def read_trial(trial_id: models.TrialId, records: models.RecordsOf) -> Trial:
    """Read a trial with its attempts and metric summaries."""
    with records.database.read() as connection:
        return trial_view(connection, models.trial_row(connection, trial_id))


@trial_router.get("/trials/{trial_id}/time")
def read_trial_time(trial_id: models.TrialId, records: models.RecordsOf) -> TrialTime:
    """Read the time shares of a trial."""
    with records.database.read() as connection:
        shares, until = time_shares(connection, models.trial_row(connection, trial_id))
    return TrialTime(
        **shares.seconds(), total_s=shares.total_s, goodput=shares.goodput, until=until
    )


@trial_router.get("/trials/{trial_id}/decisions")
def read_trial_decisions(trial_id: models.TrialId, master: models.MasterOf) -> TrialDecisions:
    """Read the decisions of the search about a trial: who proposed it, where it was stopped."""
    with master.database.read() as connection:
        trial = models.trial_row(connection, trial_id)
        experiment = models.experiment_row(connection, trial.experiment_id)
        proposal = proposal_of(connection, trial)
    has_rungs = config_of(experiment).searcher.has_rungs
    brackets = master.search_views.read(trial.experiment_id) if has_rungs else []
    return TrialDecisions(
        proposal=None if proposal is None else TrialProposal(**msgspec.structs.asdict(proposal)),
        rungs=[
            TrialRung(
                bracket=number,
                length=rung.length,
                metric=entry.metric,
                decision=entry.decision,
                arrival=None
                if entry.arrival is None
                else RungArrival(**msgspec.structs.asdict(entry.arrival)),
            )
            for number, bracket in enumerate(brackets, start=1)
            for rung in bracket
            for entry in rung.entries
            if entry.trial_id == trial_id
        ],
    )


@trial_router.get("/trials/{trial_id}/environments")
def list_environments(
    trial_id: models.TrialId, records: models.RecordsOf
) -> list[AttemptEnvironment]:
    """Read the environments of a trial's attempts, the earliest attempt first."""
    attempts = tables.attempts.c
    with records.database.read() as connection:
        trial = models.trial_row(connection, trial_id)
        source = models.experiment_row(connection, trial.experiment_id).source
        query = sa.select(attempts.number, attempts.environment).where(
            attempts.trial_id == trial_id
        )
        found = []
        for row in connection.execute(query.order_by(attempts.number)).all():
            environment = read_environment(connection, row.environment)
            own = None if environment is None else environment.pop("source", None)
            found.append(
                AttemptEnvironment(number=row.number, environment=environment, source=source or own)
            )
    return found


@trial_router.post("/trials/{trial_id}/kill")
async def kill_trial(trial_id: models.TrialId, master: models.MasterOf) -> Trial:
    """End a trial at once."""
    await models.write_rows(
        master, lambda transaction: master.commands.kill_trial(transaction, trial_id)
    )
    return await asyncio.to_thread(read_trial, trial_id, master)


@trial_router.post("/trials/{trial_id}/stop")
async def stop_trial(trial_id: models.TrialId, master: models.MasterOf) -> Trial:
    """Let a trial store a checkpoint and end."""
    await models.write_rows(
        master, lambda transaction: master.commands.stop_trial(transaction, trial_id)
    )
    return await asyncio.to_thread(read_trial, trial_id, master)


@trial_router.post("/trials/{trial_id}/continue", status_code=201)
async def continue_trial(
    trial_id: models.TrialId,
    request: ContinueTrial,
    master: models.MasterOf,
    key: models.RequestKey,
) -> Experiment:
    """Create a `single` experiment starting from the trial's latest checkpoint."""
    from paceline._cluster.master.api.experiment_routes import code_of, read_experiment

    digest, source = code_of(master, request)

    def job(transaction: Transaction) -> int:
        return master.commands.continue_trial(
            transaction,
            trial_id,
            request.config,
            activate=request.activate,
            context_digest=digest,
            source=source,
        )

    experiment_id = await models.write_once(master, key, job)
    return await asyncio.to_thread(read_experiment, experiment_id, master)


@trial_router.get("/trials/{trial_id}/metrics")
def list_metrics(
    trial_id: models.TrialId,
    records: models.RecordsOf,
    group: str = "validation",
    limit: models.Limit = models.MAX_PAGE,
    cursor: models.Cursor = None,
) -> Page[MetricRow]:
    """List the rows of a metric group in step order; superseded rows are left out.

    A page ends earlier where rows have very many metrics.
    """
    after = models.position_in_rows(cursor, [0])[0] if cursor is not None else -1
    with records.database.read() as connection:
        models.trial_row(connection, trial_id)
        num_names = num_metric_names(connection, trial_id, group, at_most=_MAX_VALUES)
        limit = max(1, min(limit, _MAX_VALUES // max(1, num_names)))
        rows = read_rows(connection, trial_id, group, after_step=after, limit=limit + 1)

    def item(row: Any) -> MetricRow:
        return MetricRow(
            group=group, steps_completed=row.step, attempt=row.attempt, time=row.time,
            metrics=tagged(row.metrics),
        )  # fmt: skip

    return models.page_of_rows(rows, limit, item, "step")


@trial_router.get("/trials/{trial_id}/checkpoints")
def list_trial_checkpoints(
    trial_id: models.TrialId,
    records: models.RecordsOf,
    limit: models.Limit = models.MAX_PAGE,
    cursor: models.Cursor = None,
) -> Page[Checkpoint]:
    """List a trial's checkpoints, the latest first."""
    checkpoints = tables.checkpoints.c
    keys = (checkpoints.steps_completed, checkpoints.created_at, checkpoints.uuid)
    with records.database.read() as connection:
        models.trial_row(connection, trial_id)
        query = sa.select(tables.checkpoints).where(checkpoints.trial_id == trial_id)
        order = Order(keys, is_descending=True)
        return models.checkpoint_page(
            connection, query, order, "a trial's checkpoints", cursor, limit
        )


series_router = ApiRouter(tags=["trials"], route_class=ReadingRoute)


@series_router.post("/metric-series", response_model=SeriesReply)
def read_metric_series(request: SeriesRequest, master: models.MasterOf) -> Response:
    """Read points of many series, each down-sampled with all extremes kept.

    With `smoothing_steps` each point also has the moving average of the whole series up to it.
    """
    with master.database.read() as connection:
        found = _read_all_series(connection, request)
    # Straight to bytes: a model would look at each of a hundred thousand points.
    return Response(msgspec.json.encode({"series": found}), media_type="application/json")


@series_router.get("/experiments/{experiment_id}/metric-names")
def list_metric_names(
    experiment_id: ExperimentId,
    records: models.RecordsOf,
    limit: models.Limit = models.MAX_PAGE,
    cursor: models.Cursor = None,
) -> Page[MetricName]:
    """List the metrics reported by an experiment's trials so far, by group and name."""
    group, name = models.position_in_rows(cursor, ["", ""])
    with records.database.read() as connection:
        models.experiment_row(connection, experiment_id)
        names = metric_names(connection, experiment_id, after=(group, name), limit=limit + 1)
        # A run that chooses axes is the only trial of its experiment.
        first = sa.select(tables.trials.c.id).where(tables.trials.c.experiment_id == experiment_id)
        found = read_x_axes(connection, [connection.scalar(first.limit(1)) or 0])
    axes = next(iter(found.values()), NO_AXES)
    more = encode_cursor(*names[limit - 1]) if len(names) > limit else None
    items = [
        MetricName(group=group, name=name, x_axis=axes.of(group, name))
        for group, name in names[:limit]
    ]
    return Page(items=items, next_cursor=more)


def _read_all_series(connection: sa.Connection, request: SeriesRequest) -> list[dict[str, object]]:
    wanted = [
        (one, Selection(trial_id=0, group=one.group, key=one.name, after_step=one.after_step))
        for one in request.series
    ]
    trials: dict[Selection, dict[int, None]] = {}
    for one, selection in wanted:
        trials.setdefault(selection, {})[one.trial_id] = None
    found: dict[tuple[int, Selection], dict[str, object]] = {}
    for selection, ids in trials.items():
        answers = _read_series(connection, list(ids), selection, request)
        found |= {(trial_id, selection): next(answers) for trial_id in ids}
    return [
        {"trial_id": one.trial_id, "group": one.group, "name": one.name}
        | found[one.trial_id, selection]
        for one, selection in wanted
    ]


def _read_series(
    connection: sa.Connection, trial_ids: list[int], selection: Selection, request: SeriesRequest
) -> Iterator[dict[str, object]]:
    wholes = read_curves(connection, trial_ids, selection, x=request.x)
    # Average over the whole series, even if only a part is shown: earlier points count as well.
    everything: Iterable[Any] = repeat(None)
    if request.smoothing_steps is not None and (
        request.x != "batches" or selection.after_step >= 0
    ):
        everything = read_curves(connection, trial_ids, replace(selection, after_step=-1))
    for (whole, last_step), series in zip(wholes, everything, strict=False):
        curve = cut_curve(whole, request.x_min, request.x_max)
        shown = sample_curve(curve, request.max_points)
        smoothed = {}
        if request.smoothing_steps is not None:
            means = smooth_at(
                whole if series is None else series[0], shown.steps, request.smoothing_steps
            )
            smoothed["smoothed"] = _with_gaps(means)
        yield {
            "x": shown.x.tolist(),
            "y": _with_gaps(shown.y),
            "steps": shown.steps.tolist(),
            "num_points": len(curve.x),
            "num_gaps": int(np.count_nonzero(~np.isfinite(curve.y))),
            "last_step": last_step,
            "is_sampled": len(shown.x) < len(curve.x),
            **smoothed,
        }


def _with_gaps(values: NDArray[np.float64]) -> list[float | None]:
    is_finite = np.isfinite(values).tolist()
    return [
        value if finite else None for value, finite in zip(values.tolist(), is_finite, strict=True)
    ]


series_csv_router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

_ROWS_PER_READ = 16_384
_SERIES = re.compile("([0-9]+)/([^/]+)/(.+)", re.DOTALL)

SeriesNames = Annotated[
    list[str],
    Query(
        min_length=1,
        max_length=1000,
        description="Each is TRIAL/GROUP/NAME. Percent-encode group and name.",
    ),
]


@series_csv_router.get(
    "/metric-series.csv",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def export_metric_series(
    master: models.MasterOf, series: SeriesNames, x: str = "batches"
) -> StreamingResponse:
    """Export every point of the series as CSV, in step order, the series in the given order.

    The columns are `series`, `x`, `value`, and `batches` unless that is `x`. With "time" as `x`
    they are in seconds since the epoch. If `x` is a metric, a step at which it was not reported
    has an empty cell.
    """
    selections = [(name, _csv_selection(name)) for name in series]
    with master.database.read() as connection:
        for _, selection in selections:
            models.trial_row(connection, selection.trial_id)
    return StreamingResponse(
        _csv_lines(master, selections, x),
        media_type="text/csv",
        headers={"Content-Disposition": "attachment", "Cache-Control": "no-store"},
    )


def _csv_selection(name: str) -> Selection:
    found = _SERIES.fullmatch(name)
    if found is None:
        raise models.ApiError(
            422,
            "invalid_request",
            f"`series` must be TRIAL/GROUP/NAME, but got {name!r}. Hint: 3/validation/loss.",
        )
    trial, group, key = found.groups()
    return Selection(trial_id=int(trial), group=unquote(group), key=unquote(key))


def _csv_lines(master: Master, selections: list[tuple[str, Selection]], x: str) -> Iterator[bytes]:
    batches = [] if x == "batches" else ["batches"]
    yield _encoded([["series", csv_text(x), "value", *batches]])
    for name, selection in selections:
        after: int | None = -1
        # No read stays open while the client takes its time: it would hold old pages on disk.
        while after is not None:
            with master.database.read() as connection:
                points = _csv_points(connection, replace(selection, after_step=after), x)
                read = list(islice(points, _ROWS_PER_READ))
            after = read[-1][0] if len(read) == _ROWS_PER_READ else None
            yield _encoded(
                [name, csv_cell(along), csv_cell(value), *([step] if batches else [])]
                for step, along, value in read
            )


def _csv_points(
    connection: sa.Connection, selection: Selection, x: str
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (step, place on the x axis, value)."""
    points = iter_points(connection, selection)
    if x == "batches":
        yield from ((step, step, value) for step, _, value in points)
    elif x == "time":
        yield from points
    else:
        others = iter_points(connection, replace(selection, key=x))
        other = next(others, None)
        for step, _, value in points:
            while other is not None and other[0] < step:
                other = next(others, None)
            yield step, other[2] if other is not None and other[0] == step else None, value


def _encoded(rows: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")
