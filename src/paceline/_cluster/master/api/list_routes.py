"""Lists of experiments and trials, tables of hyperparameters."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import Depends, Query, Response
from pydantic_core import to_json

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.experiment_routes import ExperimentId
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    LISTED_TRIAL_COLUMNS,
    config_of,
    encode_cursor,
    encode_trials,
)
from paceline._cluster.master.store.database import load_json
from paceline._cluster.master.store.experiment_list import (
    Condition,
    ExperimentQuery,
    NameCache,
    count_rows,
    encode_experiments,
    json_path,
    list_rows,
)
from paceline._cluster.master.store.list_pages import Order, sample_trials
from paceline._cluster.master.store.metric_summaries import all_metric_names
from paceline._cluster.master.store.query_language import (
    QueryError,
    complete_query,
    matching_experiments_of,
)
from paceline._cluster.master.store.reach import current_reach
from paceline._cluster.master.store.row_ids_and_counts import EXPERIMENTS, TRIALS, number_by_state
from paceline._cluster.master.store.series_reader import tagged
from paceline._cluster.messages.experiment_models import (
    ColumnNames,
    Experiment,
    MetricName,
    Page,
    QueryCompletions,
    Trial,
)
from paceline._cluster.messages.search_and_metric_models import HparamAxis, HparamTable
from paceline._cluster.messages.states import ExperimentState, TrialState
from paceline.config._experiment_config import ExperimentConfig

trial_list_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_trials = tables.trials.c
_latest = sa.cast(_trials.latest_metric, sa.Text)
_FIELDS: dict[str, sa.ColumnElement[Any]] = {
    "metric": _trials.best_metric,
    # Numbers only: other values, NaN included, are stored as other JSON and must sort as null.
    "latest": sa.case(
        (sa.func.substr(_latest, 1, 1).in_(list("-0123456789")), sa.cast(_latest, sa.Float)),
        else_=None,
    ),
    "state": _trials.state,
    "steps": _trials.steps_completed,
    "restarts": _trials.restarts,
    "created_at": _trials.created_at,
    "ended_at": _trials.ended_at,
}


@trial_list_router.get("/experiments/{experiment_id}/trials", response_model=Page[Trial])
def list_trials(
    experiment_id: ExperimentId,
    records: models.RecordsOf,
    limit: models.Limit = 100,
    cursor: models.Cursor = None,
    state: Annotated[list[TrialState] | None, Query()] = None,
    sort_by: Annotated[
        str, Query(description=f"id, {', '.join(_FIELDS)} or `hparam:NAME`.")
    ] = "id",
    order: Annotated[
        Literal["asc", "desc"] | None,
        Query(description="By default the metric's best first, and all else ascending."),
    ] = None,
) -> Response:
    """List an experiment's trials, by id by default; the first page has the total."""
    with records.database.read() as connection:
        searcher = config_of(models.experiment_row(connection, experiment_id)).searcher
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
            models.position_in_rows(cursor, [0])
            if by_id and cursor
            else models.place_in_rows(cursor, name, 2)
        )
        rows = Order(keys, is_descending, is_missing_descending=False).read(
            connection, sa.select(*LISTED_TRIAL_COLUMNS, *keys[:-1]).where(*conditions),
            after=after, limit=limit + 1,
        )  # fmt: skip
        items = encode_trials(connection, rows[:limit], records.encodings)
    more = None
    if len(rows) > limit:
        last = rows[limit - 1]
        more = encode_cursor(last.id) if by_id else encode_cursor(name, last.place, last.id)
    return models.page_of_encoded(items, more, total)


def _trial_sort_key(sort_by: str) -> sa.ColumnElement[Any]:
    kind, _, name = sort_by.partition(":")
    if kind == "hparam" and name:
        try:
            return sa.func.json_extract(_trials.hparams, json_path(name))
        except ValueError as error:
            raise models.ApiError(422, "invalid_request", str(error)) from error
    if sort_by not in _FIELDS:
        raise models.ApiError(
            422,
            "invalid_request",
            f"`sort_by` must be one of id, {', '.join(_FIELDS)} and hparam:NAME, but got"
            f" {sort_by!r}.",
        )
    return _FIELDS[sort_by]


hyperparameter_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_LARGEST_TABLE = 10_000


@hyperparameter_router.get(
    "/experiments/{experiment_id}/hyperparameters", response_model=HparamTable
)
def read_hyperparameters(
    experiment_id: ExperimentId,
    records: models.RecordsOf,
    metric: Annotated[
        str | None, Query(description="GROUP/NAME; its best value of each trial is listed.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=_LARGEST_TABLE)] = _LARGEST_TABLE,
) -> Response:
    """Read hyperparameters and a metric of an experiment's trials, the oldest trial first.

    Of more than `limit` trials the best half are shown, and others that are spread evenly.
    """
    with records.database.read() as connection:
        experiment = models.experiment_row(connection, experiment_id)
        searcher = config_of(experiment).searcher
        name = _metric_beside_hyperparameters(metric, searcher.metric)
        rows, num_trials = sample_trials(
            connection, experiment_id, limit, smaller_is_better=searcher.smaller_is_better
        )
        is_searched = metric is None
        values = (
            {row.id: row.best_metric for row in rows}
            if is_searched
            else _best_values_for_hyperparameters(
                connection, [row.id for row in rows], name, searcher.smaller_is_better
            )
        )
    body = records.encodings.encoded(
        ("hyperparameters", experiment.config, name.model_dump(), list(map(tuple, rows)),
         list(values.items()), num_trials),
        lambda: _encode_table(config_of(experiment), name, rows, values, num_trials),
    )  # fmt: skip
    return Response(body, media_type="application/json")


def _encode_table(
    config: ExperimentConfig,
    name: MetricName,
    rows: Sequence[sa.Row[Any]],
    values: dict[int, Any],
    num_trials: int,
) -> bytes:
    space = config.hyperparameters
    flat = [flat_values(space, load_json(row.hparams)) for row in rows]
    table = HparamTable(
        metric=name,
        smaller_is_better=config.searcher.smaller_is_better,
        axes=_hyperparameter_axes(space, flat),
        num_trials=num_trials,
        is_sampled=num_trials > len(rows),
        rows=[],
    )
    # Dictionaries instead of models: thousands of models would take longer than all the rest.
    shown = [
        {
            "trial_id": row.id,
            "state": row.state,
            "hparams": hparams,
            "steps_completed": row.steps_completed,
            "metric": tagged(values.get(row.id)),
        }
        for row, hparams in zip(rows, flat, strict=True)
    ]
    return to_json({**table.model_dump(), "rows": shown}, inf_nan_mode="null")


def flat_values(space: dict[str, Any], hparams: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters under flat names; a map chosen as a single value stays a map."""
    if not any(isinstance(value, dict) for value in hparams.values()):
        return hparams
    return dict(_walk_values(space, hparams, ""))


def flat_space(space: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a search space by flat name."""
    return dict(_walk_space(space, ""))


def _walk_values(space: Any, values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        entry = space.get(name) if isinstance(space, dict) else None
        is_value = isinstance(entry, dict) and "type" in entry
        if isinstance(value, dict) and not is_value:
            yield from _walk_values(entry, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _walk_space(space: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, entry in space.items():
        if isinstance(entry, dict) and "type" not in entry:
            yield from _walk_space(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry


def _metric_beside_hyperparameters(metric: str | None, searched: str) -> MetricName:
    if metric is None:
        return MetricName(group="validation", name=searched)
    group, _, name = metric.partition("/")
    if not group or not name:
        raise models.ApiError(
            422, "invalid_request", f"`metric` must be GROUP/NAME, but got {metric!r}."
        )
    return MetricName(group=group, name=name)


def _best_values_for_hyperparameters(
    connection: sa.Connection, trial_ids: list[int], name: MetricName, smaller_is_better: bool
) -> dict[int, float]:
    series = tables.series.c
    column = series.min if smaller_is_better else series.max
    rows = connection.execute(
        sa.select(series.trial_id, column).where(
            series.trial_id.in_(trial_ids),
            series.group == name.group,
            series.key == name.name,
            column.is_not(None),
        )
    )
    best: dict[int, float] = {}
    choose = min if smaller_is_better else max
    for trial_id, value in rows:
        best[trial_id] = choose(best.get(trial_id, value), value)
    return best


def _hyperparameter_axes(space: dict[str, Any], rows: list[dict[str, Any]]) -> list[HparamAxis]:
    entries = flat_space(space)
    names = sorted(entries.keys() | {name for row in rows for name in row})
    axes = []
    for name in names:
        entry = entries.get(name)
        told = entry if isinstance(entry, dict) else {}
        base, kind = float(told.get("base", 10)), str(told.get("type", "const"))
        is_log = kind == "log"
        minval, maxval = told.get("minval"), told.get("maxval")
        if is_log and minval is not None and maxval is not None:
            minval, maxval = base**minval, base**maxval
        axes.append(
            HparamAxis(
                name=name, type=kind, is_log=is_log, minval=minval, maxval=maxval,
                is_varied=_is_varied_hyperparameter(row.get(name) for row in rows),
                vals=told.get("vals"),
            )
        )  # fmt: skip
    return axes


def _is_varied_hyperparameter(values: Iterator[Any]) -> bool:
    """Return whether there are two different values, and look no further once there are."""
    texts = (json.dumps(value, sort_keys=True, default=str) for value in values)
    first = next(texts, None)
    return any(text != first for text in texts)


experiment_list_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_MAX_SPACES = 1000
Names = Annotated[list[str], Query(max_length=100)]
QueryText = Annotated[
    str | None,
    Query(
        description="A query such as `lr < 0.01 and tag:baseline and not state:ERROR`; an"
        " experiment is listed if it holds for one of its trials."
    ),
]


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of an experiment list, as they are asked for."""

    states: Sequence[ExperimentState] = ()
    search: str | None = None
    labels: Sequence[str] = ()
    archived: Literal["no", "only", "all"] = "no"
    owner: str | None = None
    project: str | None = None
    where: Sequence[str] = ()
    query: str | None = None
    experiments: Sequence[int] | None = None


# A coroutine: FastAPI gives plain functions a thread, which takes longer than this.
async def _filters(
    state: Annotated[list[ExperimentState] | None, Query()] = None,
    search: Annotated[
        str | None, Query(description="In the name, description or labels, or the id.")
    ] = None,
    label: Annotated[Names | None, Query(description="Has all of these labels.")] = None,
    archived: Annotated[Literal["no", "only", "all"], Query()] = "no",
    owner: Annotated[str | None, Query(max_length=64, description="Of this user.")] = None,
    project: Annotated[str | None, Query(max_length=64, description="In this project.")] = None,
    where: Annotated[
        Names | None,
        Query(
            description='Conditions, each as JSON: `["last:validation/loss", "<", 0.5]`. One on'
            " `hparam:NAME` holds if any trial meets it; other columns are of the best trial."
        ),
    ] = None,
    query: QueryText = None,
    experiment: Annotated[
        list[int] | None, Query(max_length=1000, description="Only these ids.")
    ] = None,
) -> Filters:
    return Filters(
        state or [], search, label or [], archived, owner, project, where or [], query, experiment
    )


FiltersOf = Annotated[Filters, Depends(_filters)]


def experiments_of(
    connection: sa.Connection,
    filters: Filters,
    columns: Sequence[str] = (),
    sort_by: str = "id",
    *,
    is_descending: bool = True,
) -> ExperimentQuery:
    """Return the query of an experiment list with some filters.

    Raises:
        ApiError: The text of a query or a condition has an error.
    """
    with told_as_api_errors():
        return ExperimentQuery(
            states=[one.value for one in filters.states],
            search=filters.search,
            labels=filters.labels,
            is_archived={"no": False, "only": True, "all": None}[filters.archived],
            owner=filters.owner,
            project=filters.project,
            conditions=[list_condition(text) for text in filters.where],
            only=filters.experiments,
            within=matching_experiments_of(connection, filters.query) if filters.query else None,
            columns=columns,
            sort_by=sort_by,
            is_descending=is_descending,
        )


@contextmanager
def told_as_api_errors() -> Iterator[None]:
    """Turn errors of queries and columns inside into answers."""
    try:
        yield
    except QueryError as error:
        raise models.ApiError(400, "invalid_query", str(error)) from error
    except ValueError as error:
        raise models.ApiError(422, "invalid_request", str(error)) from error


@experiment_list_router.get("/experiments", response_model=Page[Experiment])
def list_experiments(
    filters: FiltersOf,
    records: models.RecordsOf,
    limit: models.Limit = 100,
    cursor: models.Cursor = None,
    column: Annotated[
        Names | None,
        Query(description="Further columns: `hparam:NAME`, `last:GROUP/NAME`, `min:`, `max:`."),
    ] = None,
    sort_by: Annotated[str, Query(description="A field or one of those columns.")] = "id",
    order: Literal["asc", "desc"] = "desc",
    brief: Annotated[bool, Query(description="Leave `config` empty.")] = False,
) -> Response:
    """List experiments, newest first by default; the first page has the total."""
    after = models.place_in_rows(cursor, f"{sort_by} {order}", num_keys=2)
    is_descending = order == "desc"
    with records.database.read() as connection:
        wanted = experiments_of(
            connection, filters, column or (), sort_by, is_descending=is_descending
        )
        with told_as_api_errors():
            # One more row shows whether there is a further page.
            listed = list_rows(connection, wanted, after=after, limit=limit + 1)
            total = None
            if cursor is None:
                # Looking through all of them twice is dear.
                is_whole = len(listed) <= limit
                total = len(listed) if is_whole else count_rows(connection, wanted)
        items = encode_experiments(connection, listed[:limit], records.encodings, is_brief=brief)
    more = None
    if len(listed) > limit:
        more = encode_cursor(f"{sort_by} {order}", *listed[limit - 1].position)
    return models.page_of_encoded(items, more, total)


@experiment_list_router.get("/experiment-columns")
def list_experiment_columns(records: models.RecordsOf) -> ColumnNames:
    """List the metrics and hyperparameters available as columns of the experiment list."""
    with records.database.read() as connection:
        names = all_metric_names(connection)
        hparams = _hparam_names(connection, records.kept_names)
    return ColumnNames(
        metrics=[MetricName(group=group, name=name) for group, name in names],
        hparams=hparams,
    )


@experiment_list_router.get("/query-completions")
def list_query_completions(
    records: models.RecordsOf,
    query: Annotated[str, Query(description="The text up to the cursor.")] = "",
) -> QueryCompletions:
    """List what the last word of a query may become: fields, or values of the field before it."""
    with records.database.read() as connection:
        names = _hparam_names(connection, records.kept_names)
        metrics = dict.fromkeys(name for _, name in all_metric_names(connection))
        place, texts = complete_query(connection, query, [*names, *metrics])
    return QueryCompletions(place=place, texts=texts)


def _hparam_names(connection: sa.Connection, kept: NameCache) -> list[str]:
    experiments = tables.experiments.c
    newest = connection.execute(sa.select(sa.func.max(experiments.id))).scalar_one()
    state = (newest, sum(number_by_state(connection, EXPERIMENTS).values()), current_reach())
    return kept.read(state, lambda: _read_hparam_names(connection))


def _read_hparam_names(connection: sa.Connection) -> list[str]:
    experiments = tables.experiments.c
    # Texts, decoded after removing duplicates: most experiments share the space of another.
    spaces = connection.execute(
        sa.select(sa.func.json_extract(experiments.config, "$.hyperparameters", type_=sa.Text))
        .order_by(experiments.id.desc())
        .limit(_MAX_SPACES)
    ).scalars()
    return sorted({name for space in set(spaces) for name in flat_space(json.loads(space))})


def list_condition(text: str) -> Condition:
    """Return a condition of the experiment list from its JSON.

    Raises:
        ValueError: The text is no condition.
    """
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
