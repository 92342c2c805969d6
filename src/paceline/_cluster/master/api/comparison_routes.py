"""What comparisons of many trials read: trials of any experiments, metric names, groups."""

from collections import Counter
from itertools import chain
from typing import Annotated

import msgspec
import numpy as np
from fastapi import Query, Response
from sqlalchemy import Connection, distinct, func, select

from paceline._cluster.master.api.list_routes import QueryText, list_condition
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import ApiError, Limit, MasterOf, RecordsOf
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.experiment_list import (
    LISTED_TRIAL_COLUMNS,
    ExperimentQuery,
    encode_experiments,
    encode_trials,
    matching_ids,
    matching_trials,
    rows_of,
)
from paceline._cluster.master.store.group_curves import CurvePart, part_of, spread_of
from paceline._cluster.master.store.metric_series import Curve, Selection, read_curves, smooth_at
from paceline._cluster.master.store.query_language import QueryError, matching_trials_of
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids
from paceline._cluster.master.store.series_writer import XAxes, read_x_axes
from paceline._cluster.messages.experiment_models import (
    CountedName,
    GroupedName,
    GroupsReply,
    GroupsRequest,
    MetricNamesRequest,
    TrialSet,
)
from paceline._cluster.messages.states import TrialState

comparison_router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

Ids = Annotated[list[Annotated[int, Query(ge=1, le=2**62)]], Query(max_length=1000)]

_MOST_AXES = 16


@comparison_router.get("/trials", response_model=TrialSet)
def list_all_trials(
    records: RecordsOf,
    limit: Limit = 1000,
    trial: Annotated[Ids | None, Query(description="Only these trials.")] = None,
    experiment: Annotated[Ids | None, Query(description="Only of these experiments.")] = None,
    search: Annotated[
        str | None,
        Query(description="In the experiment's name, description or labels, or its id."),
    ] = None,
    where: Annotated[
        list[str] | None,
        Query(
            max_length=100,
            description="Conditions as in the list of experiments, on each trial itself.",
        ),
    ] = None,
    query: QueryText = None,
    label: Annotated[
        list[str] | None,
        Query(max_length=100, description="The experiment has all of these labels."),
    ] = None,
    state: Annotated[list[TrialState] | None, Query()] = None,
) -> Response:
    """List trials of any experiments, the newest first.

    Those of archived experiments are left out, unless trials or experiments are named.
    """
    trials = tables.trials.c
    conditions = []
    if trial is not None:
        conditions.append(trials.id.in_(trial))
    if experiment is not None:
        conditions.append(trials.experiment_id.in_(experiment))
    if state:
        conditions.append(trials.state.in_([one.value for one in state]))
    is_named = trial is not None or experiment is not None
    with records.database.read() as connection:
        try:
            wanted = ExperimentQuery(
                search=search, labels=label or (), is_archived=None if is_named else False
            )
            conditions.append(trials.experiment_id.in_(matching_ids(wanted)))
            if query:
                conditions.append(trials.id.in_(matching_trials_of(connection, query)))
            if where:
                met = matching_trials([list_condition(text) for text in where])
                conditions.append(trials.id.in_(met))
        except QueryError as error:
            raise ApiError(400, "invalid_query", str(error)) from error
        except ValueError as error:
            raise ApiError(422, "invalid_request", str(error)) from error
        found = select(*LISTED_TRIAL_COLUMNS).where(*conditions).order_by(trials.id.desc())
        rows = connection.execute(found.limit(limit)).all()
        total = len(rows)
        if total == limit:
            total = connection.execute(
                select(func.count(trials.id)).where(*conditions)
            ).scalar_one()
        items = encode_trials(connection, rows, records.encodings)
        listed = rows_of(connection, {row.experiment_id for row in rows})
        experiments = encode_experiments(connection, listed, records.encodings, is_brief=True)
    body = b'{"items":[%b],"total":%d,"experiments":[%b]}'
    content = body % (b",".join(items), total, b",".join(experiments))
    return Response(content, media_type="application/json")


@comparison_router.post("/metric-names")
def count_metric_names(request: MetricNamesRequest, master: MasterOf) -> list[CountedName]:
    """List the numeric metrics of some trials by group and name, with how many trials have each."""
    series = tables.series.c
    query = (
        select(series.group, series.key, func.count(distinct(series.trial_id)))
        .where(series.trial_id.in_(many_ids()), series.min.is_not(None))
        .group_by(series.group, series.key)
        .order_by(series.group, series.key)
    )
    with master.database.read() as connection:
        rows = connection.execute(query, ids_parameter(request.trial_ids)).all()
        alike: dict[bytes, tuple[XAxes, list[int]]] = {}
        for trial_id, axes in read_x_axes(connection, request.trial_ids).items():
            alike.setdefault(msgspec.json.encode(axes), (axes, []))[1].append(trial_id)
        wanted: Counter[tuple[str, str, str | None]] = Counter()
        # Runs of one kind of script choose alike.
        for axes, ids in list(alike.values())[:_MOST_AXES]:
            for group, name, count in connection.execute(query, ids_parameter(ids)):
                wanted[group, name, axes.of(group, name)] += count
    totals = {(group, name): n for group, name, n in rows}
    agreed = {
        (group, name): x for (group, name, x), n in wanted.items() if totals[group, name] == n
    }
    return [
        CountedName(group=group, name=name, num_trials=n, x_axis=agreed.get((group, name)))
        for group, name, n in rows
    ]


@comparison_router.post("/metric-groups", response_model=GroupsReply)
def read_metric_groups(request: GroupsRequest, master: MasterOf) -> Response:
    """Read metrics of groups of trials: the mean of each group and its spread, with extremes."""
    with master.database.read() as connection:
        found = [_read_groups(connection, metric, request) for metric in request.metrics]
    return Response(msgspec.json.encode({"metrics": found}), media_type="application/json")


def _read_groups(
    connection: Connection, metric: GroupedName, request: GroupsRequest
) -> dict[str, list[dict[str, object]]]:
    trial_ids = list(dict.fromkeys(chain.from_iterable(request.groups)))
    wanted = Selection(trial_id=0, group=metric.group, key=metric.name)
    curves = read_curves(connection, trial_ids, wanted, x=request.x)
    parts = {
        trial_id: _part_for(curve, request)
        for trial_id, (curve, _) in zip(trial_ids, curves, strict=True)
    }
    groups: list[dict[str, object]] = []
    for group in request.groups:
        members = [parts[trial_id] for trial_id in dict.fromkeys(group)]
        one = spread_of(members, request.max_points, request.quantile)
        names = ("x", "means", "deviations", "lows", "highs", "counts")
        lists = {name: getattr(one, name).tolist() for name in names}
        groups.append({**lists, "num_trials": one.num_curves})
    return {"groups": groups}


def _part_for(curve: Curve, request: GroupsRequest) -> CurvePart:
    if request.x == "time" and len(curve.x):
        curve = Curve(curve.x - curve.x[0], curve.y, curve.steps)
    smoothed = curve.y
    if request.smoothing_steps is not None:
        order = np.argsort(curve.steps, kind="stable")
        whole = Curve(curve.x[order], curve.y[order], curve.steps[order])
        smoothed = smooth_at(whole, curve.steps, request.smoothing_steps)
    return part_of(curve, smoothed, request.max_points, request.x_min, request.x_max)
