"""Metrics of MLflow's runs: points in our series, and the last value of each key."""

from collections.abc import Sequence
from itertools import groupby
from math import isfinite, isnan
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.dialects.sqlite import insert

from paceline._base.journal_records import MetricsReported, encode_float
from paceline._cluster.master.experiments.unmanaged_runs import (
    experiment_of_run,
    trial_of_run,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.metric_series import (
    Selection,
    load_series_points,
    visible_series_pieces,
)
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids
from paceline._cluster.master.trackers.mlflow_calls import (
    Call,
    Fields,
    chunks,
    endpoint,
    invalid,
    page_of,
)
from paceline._cluster.master.trackers.mlflow_models import log_model_metrics
from paceline._cluster.messages.runner_messages import MAX_TIME_S

METRIC_KIND = "mlflow.metric"
TRAINING_GROUP, _SYSTEM_GROUP = "training", "system"
# What the client measures of its machine has names that begin so.
_SYSTEM_PREFIX = "system/"
_MAX_HISTORY = 1_000_000
# Made once: for each call they cost more to make than to run.
_documents = tables.documents.c
_LAST = select(_documents.content).where(
    _documents.kind == METRIC_KIND,
    _documents.parent == bindparam("run_id"),
    _documents.name.in_(many_ids()),
)
_KEEP = insert(tables.documents)
_KEEP = _KEEP.on_conflict_do_update(
    index_elements=["kind", "parent", "name"],
    set_={name: _KEEP.excluded[name] for name in ("content", "changed_at")},
)


class Metric(NamedTuple):
    """Value of a metric; `timestamp` is in milliseconds since the epoch."""

    key: str
    value: float
    timestamp: int
    step: int
    model_id: str | None = None
    dataset_name: str | None = None
    dataset_digest: str | None = None

    @property
    def rank(self) -> tuple[int, int, float]:
        """What decides which of two values is the last one: NaN is below all, as in MLflow."""
        return self.step, self.timestamp, float("-inf") if isnan(self.value) else self.value

    @property
    def place(self) -> tuple[int, int, str]:
        """Step, time and group: what one record has once."""
        return self.step, self.timestamp, metric_group(self.key)[0]


def metric_group(key: str) -> tuple[str, str]:
    """Return the group and the name of a metric here."""
    if key.startswith(_SYSTEM_PREFIX) and key != _SYSTEM_PREFIX:
        return _SYSTEM_GROUP, key.removeprefix(_SYSTEM_PREFIX)
    return TRAINING_GROUP, key


def read_metric(given: Fields) -> Metric:
    """Return a metric of a request.

    Raises:
        MlflowError: It has a value that cannot be.
    """
    key, value = given.key(), given.number("value")
    timestamp, step = given.integer("timestamp"), given.integer("step", 0)
    if step < 0:
        raise invalid(
            f"Invalid value {step} for parameter '{given.path}step' supplied: steps must not be"
            " negative here. Hint: count from 0."
        )
    if not 0 <= timestamp <= MAX_TIME_S * 1000:
        raise invalid(
            f"Invalid value {timestamp} for parameter '{given.path}timestamp' supplied: it must be"
            " milliseconds since 1970."
        )
    names = ("model_id", "dataset_name", "dataset_digest")
    return Metric(key, value, timestamp, step, *map(given.text_or_none, names))


def log_metrics(
    call: Call, run_id: str, experiment_id: int | None, metrics: Sequence[Metric]
) -> None:
    """Append metrics to a run's series, and keep the last value of each key."""
    records: list[MetricsReported] = []
    for (step, timestamp, group), same in groupby(metrics, lambda metric: metric.place):
        values: dict[str, Any] = {}
        for metric in same:
            name = metric_group(metric.key)[1]
            if name in values:
                records.append(_record(step, timestamp, group, values))
                values = {}
            values[name] = encode_float(metric.value)
        records.append(_record(step, timestamp, group, values))
    call.runs.append(call.writer, run_id, records)
    _keep_last(call.connection, run_id, experiment_id, metrics)
    of_models: dict[str, list[dict[str, Any]]] = {}
    for metric in metrics:
        if metric.model_id:
            of_models.setdefault(metric.model_id, []).append(_shown(metric))
    log_model_metrics(call.connection, run_id, of_models)


def latest_metrics(
    connection: Connection, run_ids: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the last value of each metric of runs, in MLflow's form."""
    documents = tables.documents.c
    found: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in run_ids}
    for part in chunks(run_ids):
        query = select(documents.parent, documents.content).where(
            documents.kind == METRIC_KIND, documents.parent.in_(part)
        )
        for parent, content in connection.execute(query):
            found[parent].append(content)
    return found


@endpoint("GET", "metrics/get-history")
def _get_history(call: Call) -> dict[str, Any]:
    run_id, key = call.run_id(), call.given.text("metric_key")
    found = _history(call.connection, run_id, key)
    page, token = page_of(call.given, found, default=_MAX_HISTORY, most=_MAX_HISTORY)
    return {"metrics": [_shown(metric) for metric in page], **token}


def _record(step: int, timestamp: int, group: str, values: dict[str, Any]) -> MetricsReported:
    return MetricsReported(time=timestamp / 1000, group=group, steps_completed=step, metrics=values)


def _keep_last(
    connection: Connection, run_id: str, experiment_id: int | None, metrics: Sequence[Metric]
) -> None:
    last: dict[str, Metric] = {}
    for metric in metrics:
        if metric.key not in last or metric.rank > last[metric.key].rank:
            last[metric.key] = metric
    for (content,) in connection.execute(_LAST, ids_parameter(last) | {"run_id": run_id}):
        if _stored(content).rank > last[content["key"]].rank:
            del last[content["key"]]
    rows = [
        {"kind": METRIC_KIND, "parent": run_id, "name": key, "content": _shown(metric),
         "created_at": 0.0, "changed_at": metric.timestamp / 1000, "experiment_id": experiment_id}
        for key, metric in last.items()
    ]  # fmt: skip
    if rows:
        connection.execute(_KEEP, rows)


def _history(connection: Connection, run_id: str, key: str) -> list[Metric]:
    """Return all points of a metric in MLflow's order; one that was sent twice is there once."""
    group, name = metric_group(key)
    experiment = experiment_of_run(connection, run_id)
    if experiment is None:
        return []
    trial_id = trial_of_run(connection, experiment.id).id
    selection = Selection(trial_id=trial_id, group=group, key=name)
    pieces = [p for _, some in visible_series_pieces(connection, selection) for p in some]
    found = {
        # NaN is unequal to itself.
        (step, round(time * 1000), repr(value)): value
        for _, points in load_series_points(connection, pieces)
        for step, time, value in zip(points.steps, points.times, points.values, strict=True)
    }
    metrics = [Metric(key, value, time, step) for (step, time, _), value in found.items()]
    return sorted(metrics, key=lambda one: (one.timestamp, one.step, one.rank))


def _stored(content: dict[str, Any]) -> Metric:
    return Metric(content["key"], float(content["value"]), content["timestamp"], content["step"])


def _shown(metric: Metric) -> dict[str, Any]:
    value: Any = metric.value
    if not isfinite(value):
        value = "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    given = {name: found for name, found in metric._asdict().items() if found is not None}
    return given | {"value": value}
