"""The route of an experiment's trials: filtered, and sorted by any column."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from sqlalchemy import ColumnElement, Float, Select, Text, case, cast, func, select

from paceline.master.api._common import Cursor, Limit, MasterOf, experiment_row, position
from paceline.master.api._experiments import ExperimentId
from paceline.master.api._problems import ApiError
from paceline.master.store import config_of, encode_cursor, json_path, tables, trial_views
from paceline.messages import resources
from paceline.messages.states import TrialState

router = APIRouter(tags=["experiments"])

_trials = tables.trials.c
_latest = cast(_trials.latest_metric, Text)
_FIELDS: dict[str, ColumnElement[Any]] = {
    "metric": _trials.best_metric,
    # What is no number, NaN included, is stored as other JSON.
    "latest": case(
        (func.substr(_latest, 1, 1).in_(list("-0123456789")), cast(_latest, Float)), else_=None
    ),
    "state": _trials.state,
    "steps": _trials.steps_completed,
    "restarts": _trials.restarts,
    "created_at": _trials.created_at,
    "ended_at": _trials.ended_at,
}


@router.get("/experiments/{experiment_id}/trials")
def list_trials(
    experiment_id: ExperimentId,
    master: MasterOf,
    limit: Limit = 100,
    cursor: Cursor = None,
    state: Annotated[list[TrialState] | None, Query()] = None,
    sort_by: Annotated[
        str, Query(description=f"id, {', '.join(_FIELDS)} or `hparam:NAME`.")
    ] = "id",
    order: Annotated[
        Literal["asc", "desc"] | None,
        Query(description="By default the metric's best first, and all else ascending."),
    ] = None,
) -> resources.Page[resources.Trial]:
    """List an experiment's trials by id unless told otherwise; the first page tells the total."""
    with master.database.read() as connection:
        searcher = config_of(experiment_row(connection, experiment_id)).searcher
        conditions = [_trials.experiment_id == experiment_id]
        if state:
            conditions.append(_trials.state.in_([one.value for one in state]))
        total = None
        if cursor is None:
            total = connection.execute(select(func.count()).where(*conditions)).scalar_one()
        if order is None:
            is_descending = sort_by == "metric" and not searcher.smaller_is_better
        else:
            is_descending = order == "desc"
        query = select(tables.trials).where(*conditions)
        rows = list(connection.execute(_ordered(query, sort_by, is_descending, cursor, limit)))
        views = trial_views(connection, rows[:limit])
    more = None
    if len(rows) > limit:
        is_by_id = sort_by == "id"
        after = rows[limit - 1].id if is_by_id else position(cursor, [0])[0] + limit
        more = encode_cursor(after)
    return resources.Page(items=views, next_cursor=more, total=total)


def _ordered(
    query: Select[Any], sort_by: str, is_descending: bool, cursor: str | None, limit: int
) -> Select[Any]:
    """Return the query of one page and one row more; those without a value come last."""
    place = position(cursor, [0])[0]
    if sort_by == "id":
        # A page begins behind a trial, so that it stays true while trials are added.
        if cursor is not None:
            query = query.where(_trials.id < place if is_descending else _trials.id > place)
        order = _trials.id.desc() if is_descending else _trials.id.asc()
        return query.order_by(order).limit(limit + 1)
    key = _key(sort_by)
    direction = key.desc() if is_descending else key.asc()
    ordered = query.order_by(key.is_(None), direction, _trials.id)
    return ordered.offset(place).limit(limit + 1)


def _key(sort_by: str) -> ColumnElement[Any]:
    kind, _, name = sort_by.partition(":")
    if kind == "hparam" and name:
        return func.json_extract(_trials.hparams, json_path(name))
    if sort_by not in _FIELDS:
        raise ApiError(
            422,
            "invalid_request",
            f"`sort_by` must be one of id, {', '.join(_FIELDS)} and hparam:NAME, but got"
            f" {sort_by!r}.",
        )
    return _FIELDS[sort_by]
