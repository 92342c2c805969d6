"""Hyperparameters with nested names joined by dots, and the route of an experiment's table."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import Query, Response
from pydantic_core import to_json
from sqlalchemy import Connection, Row, select

from paceline.config import ExperimentConfig
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._experiment_routes import ExperimentId
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import RecordsOf, experiment_row
from paceline.master.store import config_of, load_json, sample_trials, tables, tagged
from paceline.messages.hyperparameters import HparamAxis, HparamTable
from paceline.messages.metrics import MetricName

router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_LARGEST_TABLE = 10_000


@router.get("/experiments/{experiment_id}/hyperparameters", response_model=HparamTable)
def read_hyperparameters(
    experiment_id: ExperimentId,
    records: RecordsOf,
    metric: Annotated[
        str | None, Query(description="GROUP/NAME; its best value of each trial is told.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=_LARGEST_TABLE)] = _LARGEST_TABLE,
) -> Response:
    """Read the hyperparameters of an experiment's trials and one metric, the oldest trial first.

    Of more than `limit` trials the best half are told, and others that are spread evenly.
    """
    with records.database.read() as connection:
        experiment = experiment_row(connection, experiment_id)
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
    rows: Sequence[Row[Any]],
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
    # As dictionaries: thousands of models would take longer than all the rest.
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
    """Return hyperparameters under flat names; a map that is one value stays one."""
    if not any(isinstance(value, dict) for value in hparams.values()):
        return hparams
    return dict(_walk_values(space, hparams, ""))


def flat_space(space: dict[str, Any]) -> dict[str, Any]:
    """Return what stands in a search space for each flat name."""
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
        raise ApiError(422, "invalid_request", f"`metric` must be GROUP/NAME, but got {metric!r}.")
    return MetricName(group=group, name=name)


def _best_values_for_hyperparameters(
    connection: Connection, trial_ids: list[int], name: MetricName, smaller_is_better: bool
) -> dict[int, float]:
    series = tables.series.c
    column = series.min if smaller_is_better else series.max
    rows = connection.execute(
        select(series.trial_id, column).where(
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
    """Tell whether there are two different values, and look no further once there are."""
    texts = (json.dumps(value, sort_keys=True, default=str) for value in values)
    first = next(texts, None)
    return any(text != first for text in texts)
