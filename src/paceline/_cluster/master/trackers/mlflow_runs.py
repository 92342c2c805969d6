"""MLflow's runs: unmanaged runs here, with documents for what its client reads back; searches."""

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.logged_runs import change_document
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.reach import sees_document
from paceline._cluster.master.trackers import mlflow_calls
from paceline._cluster.master.trackers.mlflow_experiments import (
    ACTIVE,
    DELETED,
    EXPERIMENT,
    check_active,
    is_wanted,
    now_ms,
    path_below,
    read_experiment,
)
from paceline._cluster.master.trackers.mlflow_filter import (
    ATTRIBUTE,
    DATASET,
    METRIC,
    PARAMETER,
    TAG,
    SearchableNames,
    parse_filter,
    select_rows,
    sort_rows,
)
from paceline._cluster.master.trackers.mlflow_models import (
    METRIC_KIND,
    Metric,
    latest_metrics,
    log_metrics,
    read_metric,
)
from paceline.importers._mlflow_stores import number_of

RUN = "mlflow.run"
Content = dict[str, Any]

_OUTCOMES = {
    "FINISHED": ("completed", None),
    "FAILED": ("error", "The client said that the run failed."),
    "KILLED": ("error", "The client said that the run was killed."),
}
_STATUSES = ("RUNNING", "SCHEDULED", *_OUTCOMES)
_NAME_TAG, _NOTE_TAG, _USER_TAG = "mlflow.runName", "mlflow.note.content", "mlflow.user"
_MODELS_TAG = "mlflow.log-model.history"
_MAX_PARAM, _MAX_TAG = 6000, 8000
_MAX_METRICS, _MAX_OTHERS, _MAX_ALL = 1000, 100, 1000
# Names here may be shorter than those of MLflow.
_MAX_SHOWN_NAME = 200

# Made once: for each call it costs more to make than to run.
_RUN = (
    sa.select(tables.documents)
    .join(tables.experiments, tables.experiments.c.id == tables.documents.c.experiment_id)
    .where(
        tables.experiments.c.external_id == sa.bindparam("run_id"), tables.documents.c.kind == RUN
    )
)


def find_run(connection: sa.Connection, run_id: str) -> sa.Row[Any]:
    """Return the document of a run.

    Raises:
        MlflowError: There is no such run.
    """
    found = connection.execute(_RUN, {"run_id": run_id}).first()
    if found is None or not sees_document(connection, found.experiment_id, found.project_id):
        raise mlflow_calls.missing(f"Run with id={run_id[:200]} not found")
    return found


def change_run(
    call: mlflow_calls.Call, run_id: str, change: Callable[[Content], Content]
) -> Content:
    """Replace the content of an active run's document; return the new one."""
    return _change(call, find_run(call.connection, run_id), change)


@mlflow_calls.endpoint("POST", "runs/create", writes=True)
def _create(call: mlflow_calls.Call) -> dict[str, Any]:
    given = call.given
    project = given.text_or_none("experiment_id") or "0"
    experiment = read_experiment(call.connection, project)
    check_active("experiment", project, experiment["lifecycle_stage"])
    run_id, start = uuid.uuid4().hex, given.integer("start_time", 0) or now_ms()
    _check_time("start_time", start)
    tags = given.pairs("tags", longest=_MAX_TAG)
    name = given.text_or_none("run_name")
    if name and tags.get(_NAME_TAG, name) != name:
        raise mlflow_calls.invalid(
            "Both 'run_name' argument and 'mlflow.runName' tag are specified, but with different"
            f" values (run_name='{name}', mlflow.runName='{tags[_NAME_TAG]}')."
        )
    tags[_NAME_TAG] = name or tags.get(_NAME_TAG) or f"run-{run_id[:8]}"
    content = {
        "experiment_id": project,
        "run_name": tags[_NAME_TAG],
        "user_id": given.text_or_none("user_id") or tags.get(_USER_TAG, ""),
        "status": "RUNNING",
        "start_time": start,
        "end_time": None,
        "artifact_uri": path_below(experiment["artifact_location"], run_id, "artifacts"),
        "lifecycle_stage": ACTIVE,
        "params": {},
        "tags": tags,
        "datasets": [],
        "model_inputs": [],
        "model_outputs": [],
    }
    logged = call.runs.open(
        call.writer,
        run_id,
        name=_shown_name(content),
        project=experiment["name"],
        created=start / 1000,
        within=(EXPERIMENT, "", project),
    )
    change_document(
        call.connection, RUN, project, run_id, lambda _: content, experiment_id=logged.experiment_id
    )
    if _NOTE_TAG in tags:
        call.runs.relabel(call.writer, run_id, notes=tags[_NOTE_TAG])
    return {"run": shown_run(run_id, content, [])}


@mlflow_calls.endpoint("GET", "runs/get")
def _get(call: mlflow_calls.Call) -> dict[str, Any]:
    run_id = call.run_id()
    content = find_run(call.connection, run_id).content
    return {"run": shown_run(run_id, content, latest_metrics(call.connection, [run_id])[run_id])}


@mlflow_calls.endpoint("POST", "runs/update", writes=True)
def _update(call: mlflow_calls.Call) -> dict[str, Any]:
    run_id, given = call.run_id(), call.given
    status = given.text_or_none("status")
    if status is not None and status not in _STATUSES:
        raise mlflow_calls.invalid(
            f"Invalid status {status[:100]!r}: it must be among {', '.join(_STATUSES)}."
        )
    name = given.text_or_none("run_name")
    end = given.integer("end_time", 0)
    _check_time("end_time", end)

    def change(content: Content) -> Content:
        after = content | {"status": status or content["status"]}
        if end:
            after["end_time"] = end
        elif status in ("RUNNING", "SCHEDULED"):
            after["end_time"] = None
        if name:
            after["run_name"] = name
            after["tags"] = content["tags"] | {_NAME_TAG: name}
        return after

    content = change_run(call, run_id, change)
    if status in _OUTCOMES:
        call.runs.finish(call.writer, run_id, *_OUTCOMES[status])
    elif status is not None:
        call.runs.reopen(call.writer, run_id)
    return {"run_info": shown_run(run_id, content, [])["info"]}


@mlflow_calls.endpoint("POST", "runs/delete", writes=True)
def _delete(call: mlflow_calls.Call) -> dict[str, Any]:
    return _mark(call, DELETED)


@mlflow_calls.endpoint("POST", "runs/restore", writes=True)
def _restore(call: mlflow_calls.Call) -> dict[str, Any]:
    return _mark(call, ACTIVE)


@mlflow_calls.endpoint("POST", "runs/log-metric", writes=True)
def _log_metric(call: mlflow_calls.Call) -> dict[str, Any]:
    run_id = call.run_id()
    return _log(call, run_id, metrics=[read_metric(call.given)])


@mlflow_calls.endpoint("POST", "runs/log-parameter", writes=True)
def _log_parameter(call: mlflow_calls.Call) -> dict[str, Any]:
    return _log(call, call.run_id(), params=[_read_param(call.given)])


@mlflow_calls.endpoint("POST", "runs/set-tag", writes=True)
def _set_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    run_id, key = call.run_id(), call.given.key()
    value = (call.given.text_or_none("value") or "")[:_MAX_TAG]
    return _log(call, run_id, tags={key: value})


@mlflow_calls.endpoint("POST", "runs/log-batch", writes=True)
def _log_batch(call: mlflow_calls.Call) -> dict[str, Any]:
    given, run_id = call.given, call.given.text("run_id")
    metrics = [read_metric(one) for one in given.items("metrics", _MAX_METRICS)]
    params = [_read_param(one) for one in given.items("params", _MAX_OTHERS)]
    given.items("tags", _MAX_OTHERS)
    tags = given.pairs("tags", longest=_MAX_TAG)
    total = len(metrics) + len(params) + len(tags)
    if total > _MAX_ALL:
        raise mlflow_calls.invalid(
            f"A batch logging request can contain at most {_MAX_ALL} metrics, params, and tags."
            f" Got {total}. Please split up across multiple requests and try again."
        )
    return _log(call, run_id, metrics=metrics, params=params, tags=tags)


@mlflow_calls.endpoint("POST", "runs/delete-tag", writes=True)
def _delete_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    run_id, key = call.run_id(), call.given.text("key")

    def change(content: Content) -> Content:
        if key not in content["tags"]:
            raise mlflow_calls.missing(f"No tag with name: {key[:300]} in run with id {run_id}")
        return content | {"tags": {name: v for name, v in content["tags"].items() if name != key}}

    change_run(call, run_id, change)
    return {}


@mlflow_calls.endpoint("POST", "runs/log-inputs", writes=True)
def _log_inputs(call: mlflow_calls.Call) -> dict[str, Any]:
    datasets = [_read_dataset(one) for one in call.given.items("datasets", _MAX_ALL)]
    models = [{"model_id": one.text("model_id")} for one in call.given.items("models", _MAX_ALL)]

    def change(content: Content) -> Content:
        known = {_dataset_key(one): one for one in content["datasets"]}
        known = {_dataset_key(one): one for one in datasets} | known
        inputs = [*content["model_inputs"]]
        inputs += [one for one in models if one not in inputs]
        return content | {"datasets": [*known.values()], "model_inputs": inputs}

    change_run(call, call.run_id(), change)
    return {}


@mlflow_calls.endpoint("POST", "runs/outputs", writes=True)
def _log_outputs(call: mlflow_calls.Call) -> dict[str, Any]:
    models = [
        {"model_id": one.text("model_id"), "step": one.integer("step", 0)}
        for one in call.given.items("models", _MAX_ALL)
    ]
    change_run(call, call.run_id(),
               lambda one: one | {"model_outputs": [*one["model_outputs"], *models]})  # fmt: skip
    return {}


@mlflow_calls.endpoint("POST", "runs/log-model", writes=True)
def _log_model(call: mlflow_calls.Call) -> dict[str, Any]:
    text = call.given.text("model_json")
    try:
        model = json.loads(text)
        lacking = {"artifact_path", "flavors", "utc_time_created", "run_id"} - model.keys()
    except (ValueError, AttributeError, RecursionError):
        raise mlflow_calls.invalid(
            f"Malformed model info. \n {text[:200]} \n is not a valid JSON."
        ) from None
    if lacking:
        raise mlflow_calls.invalid(f"Model json is missing mandatory fields: {lacking}")

    def change(content: Content) -> Content:
        known = json.loads(content["tags"].get(_MODELS_TAG, "[]"))
        return content | {"tags": content["tags"] | {_MODELS_TAG: json.dumps([*known, model])}}

    change_run(call, call.run_id(), change)
    return {}


def _log(
    call: mlflow_calls.Call,
    run_id: str,
    *,
    metrics: list[Metric] | None = None,
    params: list[tuple[str, str]] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Store what one request logs, or nothing of it."""
    if params:
        _check_unique([key for key, _ in params])

    def change(content: Content) -> Content:
        for key, value in params or ():
            stored = content["params"].get(key, value)
            if stored != value:
                raise mlflow_calls.invalid(
                    f"Changing param values is not allowed. Param with key='{key}' was already"
                    f" logged with value='{stored}' for run ID='{run_id}'. Attempted logging new"
                    f" value '{value}'."
                )
        after = content | {
            "params": content["params"] | dict(params or ()),
            "tags": content["tags"] | dict(tags or {}),
        }
        after["run_name"] = after["tags"].get(_NAME_TAG, content["run_name"])
        return after

    row = find_run(call.connection, run_id)
    _change(call, row, change)
    if metrics:
        log_metrics(call, run_id, row.experiment_id, metrics)
    return {}


def _store(call: mlflow_calls.Call, row: sa.Row[Any], content: Content) -> None:
    """Store a run's new content, and what people see of it here."""
    change_document(call.connection, RUN, row.parent, row.name, lambda _: content)
    call.runs.set_hparams(
        call.writer,
        row.name,
        {key: number_of(value) for key, value in content["params"].items()},
    )
    notes = content["tags"].get(_NOTE_TAG)
    call.runs.relabel(call.writer, row.name, name=_shown_name(content), notes=notes)


def _change(
    call: mlflow_calls.Call, row: sa.Row[Any], change: Callable[[Content], Content]
) -> Content:
    check_active("run", row.name, row.content["lifecycle_stage"])
    before = json.dumps(row.content)
    after = change(row.content)
    if json.dumps(after) != before:
        _store(call, row, after)
    return after


def _mark(call: mlflow_calls.Call, stage: str) -> dict[str, Any]:
    """Mark a run as deleted or not: it stays here, as it does with MLflow."""
    row = find_run(call.connection, call.run_id())
    after = row.content | {"lifecycle_stage": stage}
    change_document(call.connection, RUN, row.parent, row.name, lambda _: after)
    return {}


def _read_param(given: mlflow_calls.Fields) -> tuple[str, str]:
    key, value = given.key(), given.text_or_none("value") or ""
    return key, value[:_MAX_PARAM]


def _read_dataset(given: mlflow_calls.Fields) -> dict[str, Any]:
    found = given.item("dataset")
    names = ("name", "digest", "source_type", "source")
    dataset = {name: found.text(name) for name in names}
    for name in ("schema", "profile"):
        if found.has(name):
            dataset[name] = found.text_or_none(name) or ""
    tags = given.pairs("tags", longest=_MAX_TAG, is_key=False)
    return {"tags": mlflow_calls.tag_list(tags), "dataset": dataset}


def _dataset_key(dataset: Mapping[str, Any]) -> tuple[str, str]:
    return dataset["dataset"]["name"], dataset["dataset"]["digest"]


def _check_unique(keys: list[str]) -> None:
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise mlflow_calls.invalid(
            f"Duplicate parameter keys have been submitted: {twice}. Please ensure the request"
            " contains only one param value per param key."
        )


def _check_time(name: str, value: int) -> None:
    # Until the year 9999.
    if not 0 <= value <= 253_402_300_799_000:
        raise mlflow_calls.invalid(f"Invalid value {value} for parameter '{name}' supplied: it must"
                                   " be milliseconds since 1970.")  # fmt: skip


def _shown_name(content: Content) -> str:
    return str(content["run_name"])[:_MAX_SHOWN_NAME].strip() or "run"


def shown_run(run_id: str, content: Content, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run in MLflow's form."""
    info = {key: content[key] for key in (
        "experiment_id", "run_name", "user_id", "status", "start_time", "artifact_uri",
        "lifecycle_stage",
    )}  # fmt: skip
    if content["end_time"] is not None:
        info["end_time"] = content["end_time"]
    return {
        "info": {"run_id": run_id, "run_uuid": run_id, **info},
        "data": {
            "metrics": metrics,
            "params": mlflow_calls.tag_list(content["params"]),
            "tags": mlflow_calls.tag_list(content["tags"]),
        },
        "inputs": {
            "dataset_inputs": content["datasets"],
            "model_inputs": content["model_inputs"],
        },
        "outputs": {"model_outputs": content["model_outputs"]},
    }


_CONTEXT_TAG = "mlflow.data.context"
_MAX_LISTED = 50_000
_SEARCHABLE = SearchableNames(
    numbers=frozenset({"start_time", "end_time"}),
    texts=frozenset(
        {"run_id", "run_name", "user_id", "status", "artifact_uri", "experiment_id"},
    ),
    entities=frozenset({ATTRIBUTE, METRIC, PARAMETER, TAG, DATASET}),
    listed=frozenset({"run_id"}),
    aliases={"created": "start_time", "Created": "start_time", "run name": "run_name",
             "Run name": "run_name", "Run Name": "run_name"},
)  # fmt: skip


@mlflow_calls.endpoint("POST", "runs/search", lists=True)
def _search(call: mlflow_calls.Call) -> dict[str, Any]:
    given = call.given
    # Checked before anything is read: a broken filter is refused where there is no run, too.
    parse_filter(given.text_or_none("filter"), _SEARCHABLE)
    view = given.text_or_none("run_view_type")
    documents = tables.documents.c
    found = [
        (row.name, row.content)
        for part in mlflow_calls.chunks(given.texts("experiment_ids"))
        for row in call.connection.execute(
            sa.select(documents.name, documents.content).where(
                documents.kind == RUN, documents.parent.in_(part)
            )
        )
        if is_wanted(view, row.content["lifecycle_stage"])
    ]
    look_up = _RunLookup(call.connection, [run_id for run_id, _ in found])
    found = select_rows(found, given.text_or_none("filter"), _SEARCHABLE, look_up)
    orders = [*given.texts("order_by"), "start_time DESC", "run_id ASC"]
    found = sort_rows(found, orders, _SEARCHABLE, look_up)
    page, token = mlflow_calls.page_of(given, found, default=1000, most=_MAX_LISTED)
    metrics = latest_metrics(call.connection, [run_id for run_id, _ in page])
    return {"runs": [shown_run(run_id, one, metrics[run_id]) for run_id, one in page], **token}


class _RunLookup:
    """What filters and orders compare of runs; each metric is read for all runs at once."""

    def __init__(self, connection: sa.Connection, run_ids: list[str]) -> None:
        self._connection = connection
        self._run_ids = run_ids
        self._metrics: dict[str, dict[str, float]] = {}

    def __call__(self, run: tuple[str, Content], entity: str, key: str) -> Any:
        run_id, content = run
        if entity == METRIC:
            return self._values_of(key).get(run_id)
        if entity in (PARAMETER, TAG):
            return content["params" if entity == PARAMETER else "tags"].get(key)
        if entity == DATASET and key == "context":
            return [
                tag["value"]
                for one in content["datasets"]
                for tag in one["tags"]
                if tag["key"] == _CONTEXT_TAG
            ]
        if entity == DATASET:
            return [one["dataset"][key] for one in content["datasets"]]
        return run_id if key == "run_id" else content[key]

    def _values_of(self, key: str) -> dict[str, float]:
        if key not in self._metrics:
            documents = tables.documents.c
            self._metrics[key] = {
                row.parent: float(row.content["value"])
                for part in mlflow_calls.chunks(self._run_ids)
                for row in self._connection.execute(
                    sa.select(documents.parent, documents.content).where(
                        documents.kind == METRIC_KIND,
                        documents.parent.in_(part),
                        documents.name == key,
                    )
                )
            }
        return self._metrics[key]
