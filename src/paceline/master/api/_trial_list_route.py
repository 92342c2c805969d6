"""The route of an experiment's trials: filtered, and sorted by any column."""

from typing import Annotated, Any, Literal

from fastapi import Query, Response
from sqlalchemy import ColumnElement, Float, Text, case, cast, func, select

from paceline.master.api._api_router import ApiRouter
from paceline.master.api._experiment_routes import ExperimentId
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import (
    Cursor,
    Limit,
    RecordsOf,
    experiment_row,
    page_of_encoded,
    place_in_rows,
    position_in_rows,
)
from paceline.master.store import (
    LISTED_TRIAL_COLUMNS,
    TRIALS,
    Order,
    config_of,
    encode_cursor,
    encode_trials,
    json_path,
    number_by_state,
    tables,
)
from paceline.messages.base import Page
from paceline.messages.states import TrialState
from paceline.messages.trials import Trial

router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

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


@router.get("/experiments/{experiment_id}/trials", response_model=Page[Trial])
def list_trials(
    experiment_id: ExperimentId,
    records: RecordsOf,
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
) -> Response:
    """List an experiment's trials by id unless told otherwise; the first page tells the total."""
    with records.database.read() as connection:
        searcher = config_of(experiment_row(connection, experiment_id)).searcher
        conditions = [_trials.experiment_id == experiment_id]
        if state:
            conditions.append(_trials.state.in_([one.value for one in state]))
        total = None
        if cursor is None:
            numbers = number_by_state(connection, TRIALS, experiment_id)
            total = sum(n for one, n in numbers.items() if not state or one in state)
        if order is None:
            is_descending = sort_by == "metric" and not searcher.smaller_is_better
        else:
            is_descending = order == "desc"
        by_id = sort_by == "id"
        keys = (_trials.id,) if by_id else (_trial_sort_key(sort_by).label("place"), _trials.id)
        name = f"{sort_by} {'desc' if is_descending else 'asc'}"
        after = (
            position_in_rows(cursor, [0]) if by_id and cursor else place_in_rows(cursor, name, 2)
        )
        rows = Order(keys, is_descending, is_missing_descending=False).read(
            connection, select(*LISTED_TRIAL_COLUMNS, *keys[:-1]).where(*conditions),
            after=after, limit=limit + 1,
        )  # fmt: skip
        items = encode_trials(connection, rows[:limit], records.encodings)
    more = None
    if len(rows) > limit:
        last = rows[limit - 1]
        more = encode_cursor(last.id) if by_id else encode_cursor(name, last.place, last.id)
    return page_of_encoded(items, more, total)


def _trial_sort_key(sort_by: str) -> ColumnElement[Any]:
    kind, _, name = sort_by.partition(":")
    if kind == "hparam" and name:
        try:
            return func.json_extract(_trials.hparams, json_path(name))
        except ValueError as error:
            raise ApiError(422, "invalid_request", str(error)) from error
    if sort_by not in _FIELDS:
        raise ApiError(
            422,
            "invalid_request",
            f"`sort_by` must be one of id, {', '.join(_FIELDS)} and hparam:NAME, but got"
            f" {sort_by!r}.",
        )
    return _FIELDS[sort_by]
