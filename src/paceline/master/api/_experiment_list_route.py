"""The route of the experiment list, and what can be a column of it."""

import json
from typing import Annotated, Literal

from fastapi import Query, Response
from sqlalchemy import Connection, Text, func, select

from paceline.master._name_cache import NameCache
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._hyperparameter_routes import flat_space
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import (
    Cursor,
    Limit,
    RecordsOf,
    page_of_encoded,
    place_in_rows,
)
from paceline.master.store import (
    EXPERIMENTS,
    Condition,
    ExperimentQuery,
    all_metric_names,
    count_rows,
    encode_cursor,
    encode_experiments,
    list_rows,
    number_by_state,
    tables,
)
from paceline.messages.base import Page
from paceline.messages.experiments import ColumnNames, Experiment
from paceline.messages.metrics import MetricName
from paceline.messages.states import ExperimentState

router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_MAX_SPACES = 1000
Names = Annotated[list[str], Query(max_length=100)]


@router.get("/experiments", response_model=Page[Experiment])
def list_experiments(
    records: RecordsOf,
    limit: Limit = 100,
    cursor: Cursor = None,
    state: Annotated[list[ExperimentState] | None, Query()] = None,
    search: Annotated[
        str | None, Query(description="In the name, description or labels, or the id.")
    ] = None,
    label: Annotated[Names | None, Query(description="Has all of these labels.")] = None,
    archived: Annotated[Literal["no", "only", "all"], Query()] = "no",
    where: Annotated[
        Names | None,
        Query(description='Conditions, each as JSON: `["last:validation/loss", "<", 0.5]`.'),
    ] = None,
    column: Annotated[
        Names | None,
        Query(description="Further columns: `hparam:NAME`, `last:GROUP/NAME`, `min:`, `max:`."),
    ] = None,
    sort_by: Annotated[str, Query(description="A field or one of those columns.")] = "id",
    order: Literal["asc", "desc"] = "desc",
    brief: Annotated[bool, Query(description="Leave `config` empty.")] = False,
) -> Response:
    """List experiments, newest first unless told otherwise; the first page tells the total."""
    after = place_in_rows(cursor, f"{sort_by} {order}", num_keys=2)
    with records.database.read() as connection:
        try:
            query = ExperimentQuery(
                states=[one.value for one in state or ()],
                search=search,
                labels=label or (),
                is_archived={"no": False, "only": True, "all": None}[archived],
                conditions=[_list_condition(text) for text in where or ()],
                columns=column or (),
                sort_by=sort_by,
                is_descending=order == "desc",
            )
            listed = list_rows(connection, query, after=after, limit=limit + 1)
            total = None
            if cursor is None:
                # Looking through all of them twice is dear.
                is_whole = len(listed) <= limit
                total = len(listed) if is_whole else count_rows(connection, query)
        except ValueError as error:
            raise ApiError(422, "invalid_request", str(error)) from error
        items = encode_experiments(connection, listed[:limit], records.encodings, is_brief=brief)
    more = None
    if len(listed) > limit:
        more = encode_cursor(f"{sort_by} {order}", *listed[limit - 1].position)
    return page_of_encoded(items, more, total)


@router.get("/experiment-columns")
def list_experiment_columns(records: RecordsOf) -> ColumnNames:
    """List the metrics and hyperparameters that can be columns of the experiment list."""
    with records.database.read() as connection:
        names = all_metric_names(connection)
        hparams = _hparam_names(connection, records.kept_names)
    return ColumnNames(
        metrics=[MetricName(group=group, name=name) for group, name in names],
        hparams=hparams,
    )


def _hparam_names(connection: Connection, kept: NameCache) -> list[str]:
    experiments = tables.experiments.c
    newest = connection.execute(select(func.max(experiments.id))).scalar_one()
    state = (newest, sum(number_by_state(connection, EXPERIMENTS).values()))
    return kept.read(state, lambda: _read_hparam_names(connection))


def _read_hparam_names(connection: Connection) -> list[str]:
    experiments = tables.experiments.c
    # As texts: most experiments have the space of another one.
    spaces = connection.execute(
        select(func.json_extract(experiments.config, "$.hyperparameters", type_=Text))
        .order_by(experiments.id.desc())
        .limit(_MAX_SPACES)
    ).scalars()
    return sorted({name for space in set(spaces) for name in flat_space(json.loads(space))})


def _list_condition(text: str) -> Condition:
    try:
        column, operator, value = [*json.loads(text), None][:3]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"A condition must be a JSON list of column, operator and value, but got {text!r}."
        ) from error
    is_scalar = value is None or isinstance(value, (str, int, float))
    if not isinstance(column, str) or not isinstance(operator, str) or not is_scalar:
        raise ValueError(f"A condition must compare a column to a scalar, but got {text!r}.")
    return Condition(column=column, operator=operator, value=value)
