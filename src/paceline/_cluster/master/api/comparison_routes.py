"""Comparisons of many trials: trials of any experiments, metric names, groups, saved views."""

import time
from collections import Counter
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
import sqlalchemy as sa
from fastapi import Path, Query, Response

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.list_routes import QueryText, list_condition
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.api_models_from_rows import LISTED_TRIAL_COLUMNS, encode_trials
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.experiment_list import (
    ExperimentQuery,
    encode_experiments,
    matching_ids,
    matching_trials,
    rows_of,
)
from paceline._cluster.master.store.group_curves import CurvePart, part_of, spread_of
from paceline._cluster.master.store.metric_summaries import XAxes, read_x_axes
from paceline._cluster.master.store.query_language import QueryError, matching_trials_of
from paceline._cluster.master.store.reach import current_reach, current_user
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids
from paceline._cluster.master.store.series_reader import Curve, Selection, read_curves, smooth_at
from paceline._cluster.messages.experiment_models import TrialSet
from paceline._cluster.messages.master_models import EditView, NewView, View
from paceline._cluster.messages.search_and_metric_models import (
    CountedName,
    GroupedName,
    GroupsReply,
    GroupsRequest,
    MetricNamesRequest,
)
from paceline._cluster.messages.states import TrialState

comparison_router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

Ids = Annotated[list[Annotated[int, Query(ge=1, le=2**62)]], Query(max_length=1000)]

_MOST_AXES = 16


@comparison_router.get("/trials", response_model=TrialSet)
def list_all_trials(
    records: models.RecordsOf,
    limit: models.Limit = 1000,
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
            raise models.ApiError(400, "invalid_query", str(error)) from error
        except ValueError as error:
            raise models.ApiError(422, "invalid_request", str(error)) from error
        found = sa.select(*LISTED_TRIAL_COLUMNS).where(*conditions).order_by(trials.id.desc())
        rows = connection.execute(found.limit(limit)).all()
        total = len(rows)
        if total == limit:
            total = connection.execute(
                sa.select(sa.func.count(trials.id)).where(*conditions)
            ).scalar_one()
        items = encode_trials(connection, rows, records.encodings)
        listed = rows_of(connection, {row.experiment_id for row in rows})
        experiments = encode_experiments(connection, listed, records.encodings, is_brief=True)
    body = b'{"items":[%b],"total":%d,"experiments":[%b]}'
    content = body % (b",".join(items), total, b",".join(experiments))
    return Response(content, media_type="application/json")


@comparison_router.post("/metric-names")
def count_metric_names(request: MetricNamesRequest, master: models.MasterOf) -> list[CountedName]:
    """List the numeric metrics of some trials by group and name, with how many trials have each."""
    series = tables.series.c
    query = (
        sa.select(series.group, series.key, sa.func.count(sa.distinct(series.trial_id)))
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
def read_metric_groups(request: GroupsRequest, master: models.MasterOf) -> Response:
    """Read metrics of groups of trials: the mean of each group and its spread, with extremes."""
    with master.database.read() as connection:
        found = [_read_groups(connection, metric, request) for metric in request.metrics]
    return Response(msgspec.json.encode({"metrics": found}), media_type="application/json")


def _read_groups(
    connection: sa.Connection, metric: GroupedName, request: GroupsRequest
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


view_router = ApiRouter(tags=["views"])

_MOST_VIEWS = 1000
_views = user_tables.views

ViewId = Annotated[int, Path(ge=1, le=2**62)]
Version = Annotated[
    int, Query(ge=1, le=2**62, description="The version that the change began from.")
]


@view_router.get("/views")
def list_views(master: models.MasterOf) -> list[View]:
    """List the saved views by name."""
    with master.database.read() as connection:
        rows = connection.execute(sa.select(_views).order_by(_views.c.name, _views.c.id)).all()
    return [_view_of(row) for row in rows]


@view_router.post("/views", status_code=201)
async def create_view(request: NewView, master: models.MasterOf) -> View:
    """Save a view under a new name."""

    def job(transaction: Transaction) -> View:
        connection = transaction.connection
        number = connection.scalar(sa.select(sa.func.count(_views.c.id)))
        if number is not None and number >= _MOST_VIEWS:
            raise models.ApiError(
                409,
                "too_many_views",
                f"There must be at most {_MOST_VIEWS} views. Hint: delete some first.",
            )
        return _store(connection, None, request, version=1)

    return await models.write_rows(master, job)


@view_router.put("/views/{view_id}")
async def replace_view(view_id: ViewId, request: EditView, master: models.MasterOf) -> View:
    """Replace a view's name, search and default, unless it was changed since `version`."""

    def job(transaction: Transaction) -> View:
        _check_version(transaction.connection, view_id, request.version)
        return _store(transaction.connection, view_id, request, version=request.version + 1)

    return await models.write_rows(master, job)


@view_router.delete("/views/{view_id}", status_code=204)
async def delete_view(view_id: ViewId, version: Version, master: models.MasterOf) -> None:
    """Delete a view, unless it was changed since `version`."""

    def job(transaction: Transaction) -> None:
        _check_version(transaction.connection, view_id, version)
        transaction.connection.execute(sa.delete(_views).where(_views.c.id == view_id))

    await models.write_rows(master, job)


def _check_version(connection: sa.Connection, view_id: int, version: int) -> None:
    found = connection.execute(sa.select(_views).where(_views.c.id == view_id)).first()
    if found is None:
        raise models.ApiError(
            404, "not_found", f"There is no view {view_id}: someone may have deleted it."
        )
    reach = current_reach()
    if reach is not None and reach.changes is not None and found.owner != reach.user:
        raise models.ApiError(
            403,
            "not_owner",
            f"A view is changed by its owner, {found.owner}, or by an administrator. Hint: save"
            " yours under another name.",
        )
    if found.version != version:
        raise models.ApiError(
            409,
            "view_changed",
            f"The change of view {found.name!r} must begin from its newest version,"
            f" {found.version}, but got {version}. Hint: load it again, replace it with that"
            " version, or save yours under another name.",
        )


def _store(connection: sa.Connection, view_id: int | None, request: NewView, version: int) -> View:
    columns = _views.c
    taken = connection.scalar(sa.select(columns.id).where(columns.name == request.name))
    if taken not in (None, view_id):
        raise models.ApiError(
            409,
            "name_taken",
            f"The name of a view must be new, but {request.name!r} is there. Hint: choose another"
            " name, or replace that view.",
        )
    if request.is_default:
        connection.execute(
            sa.update(_views)
            .where(
                columns.is_default, columns.id != (view_id or 0), columns.owner == current_user()
            )
            .values(is_default=False, version=columns.version + 1)
        )
    values = {**request.model_dump(exclude={"version"}), "version": version}
    values["changed_at"] = time.time()
    statement: Any = sa.insert(_views)
    if view_id is None:
        values["owner"] = current_user()
    else:
        statement = sa.update(_views).where(columns.id == view_id)
    return _view_of(connection.execute(statement.values(values).returning(*columns)).one())


def _view_of(row: sa.Row[Any]) -> View:
    view = View.model_validate(row, from_attributes=True)
    # Each user has a default view of their own.
    is_default = view.is_default and row.owner == current_user()
    return view.model_copy(update={"is_default": is_default})
