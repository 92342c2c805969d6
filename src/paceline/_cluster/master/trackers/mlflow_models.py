"""MLflow's logged models, as releases from 3.0 on keep them, and metrics of its runs."""

import json
import uuid
from collections.abc import Callable, Sequence
from itertools import groupby
from math import isfinite, isnan
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from paceline._base.journal_records import MetricsReported, encode_float
from paceline._cluster.master.experiments.logged_runs import change_document
from paceline._cluster.master.experiments.unmanaged_runs import experiment_of_run, trial_of_run
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.reach import sees_document
from paceline._cluster.master.store.row_ids_and_counts import ids_parameter, many_ids
from paceline._cluster.master.store.series_reader import (
    Selection,
    load_series_points,
    visible_series_pieces,
)
from paceline._cluster.master.trackers import mlflow_calls
from paceline._cluster.master.trackers.mlflow_experiments import now_ms, path_below, read_experiment
from paceline._cluster.master.trackers.mlflow_filter import (
    ATTRIBUTE,
    PARAMETER,
    TAG,
    SearchableNames,
    select_rows,
    sort_rows,
)
from paceline._cluster.messages.runner_messages import MAX_TIME_S

MODEL = "mlflow.logged-model"
_VERSIONS_TAG = "mlflow.modelVersions"
_STATES = ("LOGGED_MODEL_PENDING", "LOGGED_MODEL_READY", "LOGGED_MODEL_UPLOAD_FAILED")
_MAX_TEXT = 6000
_SEARCHABLE = SearchableNames(
    numbers=frozenset({"creation_timestamp", "last_updated_timestamp"}),
    texts=frozenset({"name", "model_id", "model_type", "status", "source_run_id"}),
    entities=frozenset({ATTRIBUTE, PARAMETER, TAG}),
    aliases={"creation_time": "creation_timestamp",
             "last_updated_time": "last_updated_timestamp"},
)  # fmt: skip


def find_model(connection: sa.Connection, model_id: str) -> sa.Row[Any]:
    """Return the document of a logged model.

    Raises:
        MlflowError: There is none of this id.
    """
    documents = tables.documents
    query = sa.select(documents).where(
        documents.c.kind == MODEL, documents.c.parent == "", documents.c.name == model_id
    )
    found = connection.execute(query).first()
    is_seen = found and sees_document(connection, found.experiment_id, found.project_id)
    if found is None or not is_seen or found.content["is_deleted"]:
        raise mlflow_calls.missing(f"Logged model with ID '{model_id[:200]}' not found.")
    return found


@mlflow_calls.endpoint("POST", "logged-models", writes=True)
def _create(call: mlflow_calls.Call) -> dict[str, Any]:
    given, now = call.given, now_ms()
    project = given.text("experiment_id")
    experiment = read_experiment(call.connection, project)
    model_id = f"m-{uuid.uuid4().hex}"
    name = given.text_or_none("name") or f"model-{model_id[2:10]}"
    run_id = given.text_or_none("source_run_id") or ""
    if run_id and _has_run(call.connection, run_id):
        run = call.runs.get(call.connection, run_id)
    else:
        # Its files need a run here, where MLflow has them in none.
        run = call.runs.open(call.writer, model_id, name=name[:200], project=experiment["name"])
        call.runs.finish(call.writer, model_id, "completed")
    content = {
        "experiment_id": project,
        "name": name,
        "model_type": given.text_or_none("model_type") or "",
        "source_run_id": run_id,
        "files_run_id": run.run_id,
        "artifact_uri": path_below(
            experiment["artifact_location"], "models", model_id, "artifacts"
        ),
        "status": _STATES[0],
        "creation_timestamp": now,
        "last_updated_timestamp": now,
        "params": given.pairs("params", longest=_MAX_TEXT, is_key=False),
        "tags": given.pairs("tags", longest=_MAX_TEXT, is_key=False),
        "metrics": [],
        "is_deleted": False,
    }
    change_document(
        call.connection, MODEL, "", model_id, lambda _: content,
        experiment_id=run.experiment_id,
    )  # fmt: skip
    return _shown(model_id, content)


@mlflow_calls.endpoint("GET", "logged-models/{model_id}")
def _get(call: mlflow_calls.Call) -> dict[str, Any]:
    found = find_model(call.connection, call.given.text("model_id"))
    return _shown(found.name, found.content)


@mlflow_calls.endpoint("PATCH", "logged-models/{model_id}", writes=True)
def _finalize(call: mlflow_calls.Call) -> dict[str, Any]:
    status = call.given.text("status")
    if status not in _STATES:
        raise mlflow_calls.invalid(
            f"Invalid status {status[:100]!r}: it must be among {', '.join(_STATES)}."
        )
    return _change(call, lambda content: content | {"status": status})


@mlflow_calls.endpoint("DELETE", "logged-models/{model_id}", writes=True)
def _delete(call: mlflow_calls.Call) -> dict[str, Any]:
    _change(call, lambda content: content | {"is_deleted": True})
    return {}


@mlflow_calls.endpoint("POST", "logged-models/{model_id}/params", writes=True)
def _log_params(call: mlflow_calls.Call) -> dict[str, Any]:
    params = call.given.pairs("params", longest=_MAX_TEXT, is_key=False)
    _change(call, lambda content: content | {"params": content["params"] | params})
    return {}


@mlflow_calls.endpoint("PATCH", "logged-models/{model_id}/tags", writes=True)
def _set_tags(call: mlflow_calls.Call) -> dict[str, Any]:
    tags = call.given.pairs("tags", longest=_MAX_TEXT, is_key=False)
    return _change(call, lambda content: content | {"tags": content["tags"] | tags})


@mlflow_calls.endpoint("DELETE", "logged-models/{model_id}/tags/{key}", writes=True)
def _delete_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    key = call.given.text("key")

    def change(content: dict[str, Any]) -> dict[str, Any]:
        if key not in content["tags"]:
            raise mlflow_calls.missing(f"No tag with key {key[:300]!r} found for this model")
        return content | {"tags": {name: v for name, v in content["tags"].items() if name != key}}

    return _change(call, change)


@mlflow_calls.endpoint("POST", "logged-models/search", lists=True)
def _search(call: mlflow_calls.Call) -> dict[str, Any]:
    documents = tables.documents.c
    if call.given.has("datasets"):
        raise mlflow_calls.MlflowError(
            "NOT_IMPLEMENTED", "Models cannot be searched by their data sets here."
        )
    found = [
        (row.name, row.content)
        for part in mlflow_calls.chunks(call.given.texts("experiment_ids"))
        for row in call.connection.execute(
            sa.select(documents.name, documents.content).where(
                documents.kind == MODEL,
                documents.parent == "",
                documents.content["experiment_id"].as_string().in_(part),
            )
        )
        if not row.content["is_deleted"]
    ]
    found = select_rows(found, call.given.text_or_none("filter"), _SEARCHABLE, _look_up)
    orders = [
        one.text("field_name") + (" ASC" if one.flag("ascending") else " DESC")
        for one in call.given.items("order_by")
    ]
    found = sort_rows(found, [*orders, "creation_timestamp DESC"], _SEARCHABLE, _look_up)
    page, token = mlflow_calls.page_of(call.given, found, default=100, most=1000)
    return {"models": [_shown(*one)["model"] for one in page], **token}


def log_model_metrics(
    connection: sa.Connection, run_id: str, metrics: dict[str, list[dict[str, Any]]]
) -> None:
    """Keep the newest metrics that a run logged about models, by their ids."""
    for model_id, found in metrics.items():
        row = find_model(connection, model_id)
        kept = {one["key"]: one for one in row.content["metrics"]}
        kept |= {one["key"]: one | {"model_id": model_id, "run_id": run_id} for one in found}
        _store(connection, model_id, row.content | {"metrics": [*kept.values()]})


def note_version(connection: sa.Connection, model_id: str, name: str, version: int) -> None:
    """Note in a model's tags that it became a version of a registered model."""
    content = find_model(connection, model_id).content
    known = json.loads(content["tags"].get(_VERSIONS_TAG, "[]"))
    noted = json.dumps([*known, {"name": name, "version": version}])
    _store(connection, model_id, content | {"tags": content["tags"] | {_VERSIONS_TAG: noted}})


def _has_run(connection: sa.Connection, run_id: str) -> bool:
    documents, experiments = tables.documents, tables.experiments
    query = (
        sa.select(documents.c.name)
        .join(experiments, experiments.c.id == documents.c.experiment_id)
        .where(experiments.c.external_id == run_id, documents.c.kind == "mlflow.run")
    )
    return connection.scalar(query) is not None


def _store(connection: sa.Connection, model_id: str, content: dict[str, Any]) -> None:
    change_document(connection, MODEL, "", model_id, lambda _: content)


def _change(
    call: mlflow_calls.Call, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    row = find_model(call.connection, call.given.text("model_id"))
    after = change(row.content) | {"last_updated_timestamp": now_ms()}
    _store(call.connection, row.name, after)
    return _shown(row.name, after)


def _shown(model_id: str, content: dict[str, Any]) -> dict[str, Any]:
    hidden = ("params", "metrics", "is_deleted", "files_run_id")
    info = {key: value for key, value in content.items() if key not in hidden}
    info |= {"model_id": model_id, "tags": mlflow_calls.tag_list(content["tags"])}
    info["creation_timestamp_ms"] = info.pop("creation_timestamp")
    info["last_updated_timestamp_ms"] = info.pop("last_updated_timestamp")
    return {"model": {"info": info, "data": {
        "params": mlflow_calls.tag_list(content["params"]), "metrics": content["metrics"],
    }}}  # fmt: skip


def _look_up(model: tuple[str, dict[str, Any]], entity: str, key: str) -> Any:
    model_id, content = model
    if entity in (PARAMETER, TAG):
        return content["params" if entity == PARAMETER else "tags"].get(key)
    return model_id if key == "model_id" else content[key]


METRIC_KIND = "mlflow.metric"
TRAINING_GROUP, _SYSTEM_GROUP = "training", "system"
# What the client measures of its machine has names that begin so.
_SYSTEM_PREFIX = "system/"
_MAX_HISTORY = 1_000_000
# Made once: for each call they cost more to make than to run.
_documents = tables.documents.c
_LAST = sa.select(_documents.content).where(
    _documents.kind == METRIC_KIND,
    _documents.parent == sa.bindparam("run_id"),
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


def read_metric(given: mlflow_calls.Fields) -> Metric:
    """Return a metric of a request.

    Raises:
        MlflowError: It has a value that cannot be.
    """
    key, value = given.key(), given.number("value")
    timestamp, step = given.integer("timestamp"), given.integer("step", 0)
    if step < 0:
        raise mlflow_calls.invalid(
            f"Invalid value {step} for parameter '{given.path}step' supplied: steps must not be"
            " negative here. Hint: count from 0."
        )
    if not 0 <= timestamp <= MAX_TIME_S * 1000:
        raise mlflow_calls.invalid(
            f"Invalid value {timestamp} for parameter '{given.path}timestamp' supplied: it must be"
            " milliseconds since 1970."
        )
    names = ("model_id", "dataset_name", "dataset_digest")
    return Metric(key, value, timestamp, step, *map(given.text_or_none, names))


def log_metrics(
    call: mlflow_calls.Call, run_id: str, experiment_id: int | None, metrics: Sequence[Metric]
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
            of_models.setdefault(metric.model_id, []).append(_shown_metric(metric))
    log_model_metrics(call.connection, run_id, of_models)


def latest_metrics(
    connection: sa.Connection, run_ids: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the last value of each metric of runs, in MLflow's form."""
    documents = tables.documents.c
    found: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in run_ids}
    for part in mlflow_calls.chunks(run_ids):
        query = sa.select(documents.parent, documents.content).where(
            documents.kind == METRIC_KIND, documents.parent.in_(part)
        )
        for parent, content in connection.execute(query):
            found[parent].append(content)
    return found


@mlflow_calls.endpoint("GET", "metrics/get-history")
def _get_history(call: mlflow_calls.Call) -> dict[str, Any]:
    run_id, key = call.run_id(), call.given.text("metric_key")
    found = _history(call.connection, run_id, key)
    page, token = mlflow_calls.page_of(call.given, found, default=_MAX_HISTORY, most=_MAX_HISTORY)
    return {"metrics": [_shown_metric(metric) for metric in page], **token}


def _record(step: int, timestamp: int, group: str, values: dict[str, Any]) -> MetricsReported:
    return MetricsReported(time=timestamp / 1000, group=group, steps_completed=step, metrics=values)


def _keep_last(
    connection: sa.Connection, run_id: str, experiment_id: int | None, metrics: Sequence[Metric]
) -> None:
    last: dict[str, Metric] = {}
    for metric in metrics:
        if metric.key not in last or metric.rank > last[metric.key].rank:
            last[metric.key] = metric
    for (content,) in connection.execute(_LAST, ids_parameter(last) | {"run_id": run_id}):
        if _stored(content).rank > last[content["key"]].rank:
            del last[content["key"]]
    rows = [
        {"kind": METRIC_KIND, "parent": run_id, "name": key, "content": _shown_metric(metric),
         "created_at": 0.0, "changed_at": metric.timestamp / 1000, "experiment_id": experiment_id}
        for key, metric in last.items()
    ]  # fmt: skip
    if rows:
        connection.execute(_KEEP, rows)


def _history(connection: sa.Connection, run_id: str, key: str) -> list[Metric]:
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


def _shown_metric(metric: Metric) -> dict[str, Any]:
    value: Any = metric.value
    if not isfinite(value):
        value = "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    given = {name: found for name, found in metric._asdict().items() if found is not None}
    return given | {"value": value}
