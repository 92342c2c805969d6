"""MLflow's experiments, which are projects here: documents that name runs belong to."""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from paceline._cluster.master.experiments.logged_runs import (
    change_document,
    get_document,
    list_documents,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.trackers import mlflow_calls
from paceline._cluster.master.trackers.mlflow_filter import (
    TAG,
    SearchableNames,
    select_rows,
    sort_rows,
)

EXPERIMENT = "mlflow.experiment"
ACTIVE, DELETED = "active", "deleted"
Content = dict[str, Any]

# Clients log here unless they choose an experiment.
_DEFAULT_ID = "0"
_MAX_NAME = 500
_MAX_LOCATION = 2048
_MAX_TAG = 20_000
_MAX_LISTED = 50_000
_SEARCHABLE = SearchableNames(
    numbers=frozenset({"creation_time", "last_update_time"}),
    texts=frozenset({"name", "experiment_id"}),
    aliases={"last_updated_time": "last_update_time"},
)


def now_ms() -> int:
    """Return the time as MLflow counts it: in milliseconds since the epoch."""
    return int(time.time() * 1000)


def read_experiment(connection: sa.Connection, experiment_id: str) -> Content:
    """Return the content of an experiment.

    Raises:
        MlflowError: There is none of this id.
    """
    found: Content | None = get_document(connection, EXPERIMENT, "", experiment_id)
    if found is not None:
        return found
    if experiment_id == _DEFAULT_ID:
        return _new_content(_DEFAULT_ID, "Default", created=0)
    raise mlflow_calls.missing(f"No Experiment with id={experiment_id[:200]} exists")


def path_below(location: str, *parts: str) -> str:
    """Return what lies below a location: a path, or a URL whose query stays behind its path."""
    url = urlsplit(location)
    if not url.scheme:
        return "/".join([location.rstrip("/"), *parts])
    return url._replace(path="/".join([url.path.rstrip("/"), *parts])).geturl()


def check_active(kind: str, name: str, stage: str) -> None:
    """Refuse a change of what was deleted.

    Raises:
        MlflowError: It was.
    """
    if stage != ACTIVE:
        raise mlflow_calls.invalid(
            f"The {kind} {name} must be in the 'active' state. Current state is {stage}."
        )


def is_wanted(view: str | None, stage: str) -> bool:
    """Return whether a view of the active, the deleted or all shows a stage.

    Raises:
        MlflowError: There is no such view.
    """
    stages = {
        "ACTIVE_ONLY": (ACTIVE,),
        "DELETED_ONLY": (DELETED,),
        "ALL": (ACTIVE, DELETED),
    }
    if (view or "ACTIVE_ONLY") not in stages:
        raise mlflow_calls.invalid(
            f"Invalid view type {view!r:.100}: it must be among {', '.join(stages)}."
        )
    return stage in stages[view or "ACTIVE_ONLY"]


@mlflow_calls.endpoint("POST", "experiments/create", writes=True)
def _create(call: mlflow_calls.Call) -> dict[str, Any]:
    name = _checked_name(call, "name")
    location = call.given.text_or_none("artifact_location")
    if location is not None and len(location) > _MAX_LOCATION:
        raise mlflow_calls.invalid(
            f"Invalid value for parameter 'artifact_location' supplied: it must have at most"
            f" {_MAX_LOCATION} characters, but has {len(location)}."
        )
    tags = call.given.pairs("tags", longest=_MAX_TAG)
    documents = tables.documents.c
    count = sa.select(sa.func.count()).where(documents.kind == EXPERIMENT)
    # The default one takes the number 0, also where nobody has used it yet.
    if not call.connection.scalar(count):
        _change(call, _DEFAULT_ID, lambda content: content)
    experiment_id = str(call.connection.scalar(count))
    content = _new_content(experiment_id, name, location=location, tags=tags)
    change_document(call.connection, EXPERIMENT, "", experiment_id, lambda _: content)
    return {"experiment_id": experiment_id}


@mlflow_calls.endpoint("GET", "experiments/get")
def _get(call: mlflow_calls.Call) -> dict[str, Any]:
    experiment_id = call.given.text("experiment_id")
    return {"experiment": _shown(experiment_id, read_experiment(call.connection, experiment_id))}


@mlflow_calls.endpoint("GET", "experiments/get-by-name")
def _get_by_name(call: mlflow_calls.Call) -> dict[str, Any]:
    name = call.given.text("experiment_name")
    found = _find(call.connection, name)
    if found is None:
        raise mlflow_calls.missing(f"Could not find experiment with name '{name[:_MAX_NAME]}'")
    return {"experiment": _shown(*found)}


@mlflow_calls.endpoint("GET POST", "experiments/search", lists=True)
def _search(call: mlflow_calls.Call) -> dict[str, Any]:
    rows = list_documents(call.connection, EXPERIMENT)
    found = [(row.name, row.content) for row in rows]
    if all(experiment_id != _DEFAULT_ID for experiment_id, _ in found):
        found.insert(0, (_DEFAULT_ID, read_experiment(call.connection, _DEFAULT_ID)))
    view = call.given.text_or_none("view_type")
    found = [one for one in found if is_wanted(view, one[1]["lifecycle_stage"])]
    found = select_rows(found, call.given.text_or_none("filter"), _SEARCHABLE, _look_up)
    orders = [*call.given.texts("order_by"), "creation_time DESC", "experiment_id ASC"]
    found = sort_rows(found, orders, _SEARCHABLE, _look_up)
    page, token = mlflow_calls.page_of(call.given, found, default=1000, most=_MAX_LISTED)
    return {"experiments": [_shown(*one) for one in page], **token}


@mlflow_calls.endpoint("POST", "experiments/update", writes=True)
def _update(call: mlflow_calls.Call) -> dict[str, Any]:
    experiment_id = call.given.text("experiment_id")
    if call.given.has("new_name"):
        name = _checked_name(call, "new_name", own_id=experiment_id)
        check_active("experiment", experiment_id, _stage(call, experiment_id))
        _change(call, experiment_id, lambda content: content | {"name": name})
    return {}


@mlflow_calls.endpoint("POST", "experiments/delete", writes=True)
def _delete(call: mlflow_calls.Call) -> dict[str, Any]:
    return _move(call, ACTIVE, DELETED)


@mlflow_calls.endpoint("POST", "experiments/restore", writes=True)
def _restore(call: mlflow_calls.Call) -> dict[str, Any]:
    return _move(call, DELETED, ACTIVE)


@mlflow_calls.endpoint("POST", "experiments/set-experiment-tag", writes=True)
def _set_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    experiment_id, key = call.given.text("experiment_id"), call.given.key()
    value = call.given.text_or_none("value") or ""
    if len(value) > _MAX_TAG:
        raise mlflow_calls.invalid(f"'value' exceeds the maximum length of {_MAX_TAG} characters")
    check_active("experiment", experiment_id, _stage(call, experiment_id))
    _change(call, experiment_id, lambda one: one | {"tags": one["tags"] | {key: value}})
    return {}


@mlflow_calls.endpoint("POST", "experiments/delete-experiment-tag", writes=True)
def _delete_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    experiment_id, key = call.given.text("experiment_id"), call.given.text("key")
    tags = read_experiment(call.connection, experiment_id)["tags"]
    if key not in tags:
        raise mlflow_calls.missing(
            f"No tag with name: {key[:300]} in experiment with id {experiment_id}"
        )
    del tags[key]
    _change(call, experiment_id, lambda one: one | {"tags": tags})
    return {}


def _move(call: mlflow_calls.Call, before: str, after: str) -> dict[str, Any]:
    experiment_id = call.given.text("experiment_id")
    if _stage(call, experiment_id) != before:
        raise mlflow_calls.missing(
            f"No Experiment with id={experiment_id} exists in the '{before}' state"
        )
    _change(call, experiment_id, lambda content: content | {"lifecycle_stage": after})
    return {}


def _stage(call: mlflow_calls.Call, experiment_id: str) -> str:
    return str(read_experiment(call.connection, experiment_id)["lifecycle_stage"])


def _change(
    call: mlflow_calls.Call, experiment_id: str, change: Callable[[Content], Content]
) -> None:
    before = read_experiment(call.connection, experiment_id)
    after = change(before) | {"last_update_time": now_ms()}
    change_document(call.connection, EXPERIMENT, "", experiment_id, lambda _: after)


def _checked_name(call: mlflow_calls.Call, argument: str, own_id: str | None = None) -> str:
    name = call.given.text_or_none(argument)
    if name is None:
        raise mlflow_calls.absent(argument)
    if not name.strip() or len(name) > _MAX_NAME:
        raise mlflow_calls.invalid(
            f"Invalid experiment name: {name[:_MAX_NAME]!r}. It must have 1 to {_MAX_NAME}"
            " characters."
        )
    found = _find(call.connection, name)
    if found is not None and found[0] != own_id:
        is_deleted = found[1]["lifecycle_stage"] == DELETED
        raise mlflow_calls.MlflowError(
            "RESOURCE_ALREADY_EXISTS",
            f"Experiment(name={name}) already exists"
            + (" in deleted state. Hint: restore it, or take another name." if is_deleted else "."),
        )
    return name


def _find(connection: sa.Connection, name: str) -> tuple[str, Content] | None:
    """Return the id and the content of the experiment of a name."""
    documents = tables.documents
    query = sa.select(documents.c.name, documents.c.content).where(
        documents.c.kind == EXPERIMENT, documents.c.content["name"].as_string() == name
    )
    row = connection.execute(query).first()
    if row is not None:
        return row.name, row.content
    default = read_experiment(connection, _DEFAULT_ID)
    return (_DEFAULT_ID, default) if default["name"] == name else None


def _new_content(
    experiment_id: str,
    name: str,
    *,
    location: str | None = None,
    tags: dict[str, str] | None = None,
    created: int | None = None,
) -> Content:
    created = now_ms() if created is None else created
    return {
        "name": name,
        "artifact_location": location or f"mlflow-artifacts:/{experiment_id}",
        "lifecycle_stage": ACTIVE,
        "tags": tags or {},
        "creation_time": created,
        "last_update_time": created,
    }


def _shown(experiment_id: str, content: Content) -> dict[str, Any]:
    return {
        "experiment_id": experiment_id,
        **content,
        "tags": mlflow_calls.tag_list(content["tags"]),
    }


def _look_up(one: tuple[str, Content], entity: str, key: str) -> Any:
    if entity == TAG:
        return one[1]["tags"].get(key)
    return one[0] if key == "experiment_id" else one[1][key]
