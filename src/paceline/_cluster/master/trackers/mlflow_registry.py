"""MLflow's registered models: names for the models of runs, with versions, aliases and stages."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa

from paceline._cluster.master.experiments.checkpoints import MODEL_VERSION, checkpoint_of_source
from paceline._cluster.master.experiments.logged_runs import (
    change_document,
    get_document,
    list_documents,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.reach import (
    NotAllowedError,
    check_object,
    creating_in,
    current_reach,
)
from paceline._cluster.master.trackers import mlflow_calls
from paceline._cluster.master.trackers.mlflow_experiments import now_ms
from paceline._cluster.master.trackers.mlflow_filter import (
    TAG,
    SearchableNames,
    select_rows,
    sort_rows,
)
from paceline._cluster.master.trackers.mlflow_models import note_version
from paceline._cluster.messages.states import CheckpointState

MODEL, VERSION = "mlflow.registered-model", MODEL_VERSION
Content = dict[str, Any]

_STAGES = {name.lower(): name for name in ("None", "Staging", "Production", "Archived")}
# The client asks for all models whose tag is not `true`, and most have none.
_PROMPT_TAG = "mlflow.prompt.is_prompt"
_OF_VERSION = re.compile(r"models:/(?P<name>[^/]+)/(?P<version>\d{1,18})")
_MAX_NAME = 255
_MAX_TAG = 100_000
_MODELS = SearchableNames(
    numbers=frozenset({"creation_timestamp", "last_updated_timestamp"}),
    texts=frozenset({"name"}),
    aliases={"timestamp": "last_updated_timestamp"},
)
_VERSIONS = SearchableNames(
    numbers=frozenset({"creation_timestamp", "last_updated_timestamp", "version_number"}),
    texts=frozenset({"name", "run_id", "source_path", "current_stage", "model_id"}),
    listed=frozenset({"run_id"}),
    aliases={"version": "version_number"},
)


# ---- models --------------------------------------------------------------------------------------


@mlflow_calls.endpoint("POST", "registered-models/create", writes=True)
def _create(call: mlflow_calls.Call) -> dict[str, Any]:
    name, now = _new_name(call, "name"), now_ms()
    content = {
        "creation_timestamp": now,
        "last_updated_timestamp": now,
        "description": call.given.text_or_none("description") or "",
        "tags": call.given.pairs("tags", longest=_MAX_TAG, is_key=False),
        "aliases": {},
        "num_versions": 0,
    }
    change_document(call.connection, MODEL, "", name, lambda _: content)
    return {"registered_model": _shown(call.connection, name, content)}


@mlflow_calls.endpoint("GET", "registered-models/get")
def _get(call: mlflow_calls.Call) -> dict[str, Any]:
    name = call.given.text("name")
    content = _read(call.connection, name)
    return {"registered_model": _shown(call.connection, name, content)}


@mlflow_calls.endpoint("GET", "registered-models/search", lists=True)
def _search(call: mlflow_calls.Call) -> dict[str, Any]:
    found = [(row.name, row.content) for row in list_documents(call.connection, MODEL)]
    found = select_rows(found, call.given.text_or_none("filter"), _MODELS, _look_up)
    orders = [*call.given.texts("order_by"), "name ASC"]
    found = sort_rows(found, orders, _MODELS, _look_up)
    page, token = mlflow_calls.page_of(call.given, found, default=100, most=1000)
    return {"registered_models": [_shown(call.connection, *one) for one in page], **token}


@mlflow_calls.endpoint("POST", "registered-models/rename", writes=True)
def _rename(call: mlflow_calls.Call) -> dict[str, Any]:
    name, documents = call.given.text("name"), tables.documents
    _read(call.connection, name)
    new_name = _new_name(call, "new_name")
    of_model = (documents.c.kind == MODEL) & (documents.c.name == name)
    of_versions = (documents.c.kind == VERSION) & (documents.c.parent == name)
    call.connection.execute(documents.update().where(of_model).values(name=new_name))
    call.connection.execute(documents.update().where(of_versions).values(parent=new_name))
    content = _change(call, new_name, lambda content: content)
    return {"registered_model": _shown(call.connection, new_name, content)}


@mlflow_calls.endpoint("PATCH", "registered-models/update", writes=True)
def _update(call: mlflow_calls.Call) -> dict[str, Any]:
    name, text = call.given.text("name"), call.given.text_or_none("description") or ""
    content = _change(call, name, lambda content: content | {"description": text})
    return {"registered_model": _shown(call.connection, name, content)}


@mlflow_calls.endpoint("DELETE", "registered-models/delete", writes=True)
def _delete(call: mlflow_calls.Call) -> dict[str, Any]:
    name, documents = call.given.text("name"), tables.documents
    _read(call.connection, name)
    of_versions = (documents.c.kind == VERSION) & (documents.c.parent == name)
    call.connection.execute(documents.delete().where(of_versions))
    change_document(call.connection, MODEL, "", name, lambda _: None)
    return {}


@mlflow_calls.endpoint("POST", "registered-models/set-tag", writes=True)
def _set_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    key, value = call.given.text("key"), (call.given.text_or_none("value") or "")[:_MAX_TAG]
    _change(call, call.given.text("name"), _tagging(key, value))
    return {}


@mlflow_calls.endpoint("DELETE", "registered-models/delete-tag", writes=True)
def _delete_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    _change(call, call.given.text("name"), _untagging(call.given.text("key")))
    return {}


@mlflow_calls.endpoint("POST", "registered-models/alias", writes=True)
def _set_alias(call: mlflow_calls.Call) -> dict[str, Any]:
    name, alias, version = (call.given.text(one) for one in ("name", "alias", "version"))
    if len(alias) > _MAX_NAME:
        raise mlflow_calls.invalid(
            f"An alias must have at most {_MAX_NAME} characters, but has {len(alias)}."
        )
    if alias.lower() == "latest" or alias[1:].isdigit() and alias[0] in "vV":
        raise mlflow_calls.invalid(f"'{alias}' alias name is reserved: versions are called so.")
    _read_version(call.connection, name, version)
    _change(call, name, lambda one: one | {"aliases": one["aliases"] | {alias: version}})
    return {}


@mlflow_calls.endpoint("DELETE", "registered-models/alias", writes=True)
def _delete_alias(call: mlflow_calls.Call) -> dict[str, Any]:
    alias = call.given.text("alias")
    _change(call, call.given.text("name"), lambda one: one | {
        "aliases": {key: v for key, v in one["aliases"].items() if key != alias}
    })  # fmt: skip
    return {}


@mlflow_calls.endpoint("GET", "registered-models/alias")
def _get_by_alias(call: mlflow_calls.Call) -> dict[str, Any]:
    name, alias = call.given.text("name"), call.given.text("alias")
    version = _read(call.connection, name)["aliases"].get(alias)
    if version is None:
        raise mlflow_calls.invalid(f"Registered model alias {alias[:300]} not found.")
    return {"model_version": _shown_version(call.connection, name, version)}


@mlflow_calls.endpoint("GET POST", "registered-models/get-latest-versions")
def _get_latest(call: mlflow_calls.Call) -> dict[str, Any]:
    name = call.given.text("name")
    _read(call.connection, name)
    stages = [_stage(text) for text in call.given.texts("stages")]
    found = [
        version
        for version in _latest(call.connection, name)
        if not stages or version["current_stage"] in stages
    ]
    return {"model_versions": found}


# ---- versions ------------------------------------------------------------------------------------


@mlflow_calls.endpoint("POST", "model-versions/create", writes=True)
def _create_version(call: mlflow_calls.Call) -> dict[str, Any]:
    given, now = call.given, now_ms()
    name = given.text("name")
    model = _change(call, name, lambda one: one | {"num_versions": one["num_versions"] + 1})
    version = str(model["num_versions"])
    model_id = given.text_or_none("model_id") or ""
    source = _checked_source(given.text("source"))
    copied = _OF_VERSION.fullmatch(source)
    location = source
    if copied is not None:
        location = _read_version(call.connection, copied["name"], copied["version"])["location"]
    _check_checkpoint(call.connection, location)
    content = {
        "creation_timestamp": now,
        "last_updated_timestamp": now,
        "user_id": call.identity.owner,
        "current_stage": "None",
        "description": given.text_or_none("description") or "",
        "source": source,
        "location": location,
        "run_id": given.text_or_none("run_id") or "",
        "run_link": given.text_or_none("run_link") or "",
        "model_id": model_id,
        "status": "READY",
        "tags": given.pairs("tags", longest=_MAX_TAG, is_key=False),
    }
    documents = tables.documents.c
    of_model = documents.kind == MODEL, documents.name == name
    with creating_in(call.connection.scalar(sa.select(documents.project_id).where(*of_model))):
        change_document(call.connection, VERSION, name, version, lambda _: content)
    if model_id:
        note_version(call.connection, model_id, name, int(version))
    return {"model_version": _shown_version(call.connection, name, version)}


@mlflow_calls.endpoint("GET", "model-versions/get")
def _get_version(call: mlflow_calls.Call) -> dict[str, Any]:
    return {"model_version": _shown_version(call.connection, *_asked_version(call))}


@mlflow_calls.endpoint("GET", "model-versions/get-download-uri")
def _get_download_uri(call: mlflow_calls.Call) -> dict[str, Any]:
    return {"artifact_uri": _read_version(call.connection, *_asked_version(call))["location"]}


@mlflow_calls.endpoint("GET", "model-versions/search", lists=True)
def _search_versions(call: mlflow_calls.Call) -> dict[str, Any]:
    found = [((row.parent, row.name), row.content)
             for row in list_documents(call.connection, VERSION)]  # fmt: skip
    found = select_rows(found, call.given.text_or_none("filter"), _VERSIONS, _look_up_version)
    asked = call.given.texts("order_by") or ["last_updated_timestamp DESC"]
    orders = [*asked, "name ASC", "version_number DESC"]
    found = sort_rows(found, orders, _VERSIONS, _look_up_version)
    page, token = mlflow_calls.page_of(call.given, found, default=10_000, most=200_000)
    shown = [_shown_version(call.connection, *place) for place, _ in page]
    return {"model_versions": shown, **token}


@mlflow_calls.endpoint("PATCH", "model-versions/update", writes=True)
def _update_version(call: mlflow_calls.Call) -> dict[str, Any]:
    text = call.given.text_or_none("description") or ""
    return _change_version(call, lambda content: content | {"description": text})


@mlflow_calls.endpoint("POST", "model-versions/transition-stage", writes=True)
def _change_stage(call: mlflow_calls.Call) -> dict[str, Any]:
    stage = _stage(call.given.text("stage"))
    name, version = _asked_version(call)
    is_archiving = call.given.flag("archive_existing_versions")
    if is_archiving and stage not in ("Staging", "Production"):
        raise mlflow_calls.invalid(
            "Model version transition cannot archive existing model versions because"
            f" '{stage}' is not an Active stage. Valid stages are Staging and Production."
        )
    for row in list_documents(call.connection, VERSION, name) if is_archiving else ():
        if row.content["current_stage"] == stage and row.name != version:
            _archive(call.connection, row)
    # Also a change of the model, as MLflow's clients see it.
    _change(call, name, lambda one: one)
    return _change_version(call, lambda content: content | {"current_stage": stage})


@mlflow_calls.endpoint("DELETE", "model-versions/delete", writes=True)
def _delete_version(call: mlflow_calls.Call) -> dict[str, Any]:
    name, version = _asked_version(call)
    _read_version(call.connection, name, version)
    change_document(call.connection, VERSION, name, version, lambda _: None)
    _change(call, name, lambda one: one | {
        "aliases": {key: v for key, v in one["aliases"].items() if v != version}
    })  # fmt: skip
    return {}


@mlflow_calls.endpoint("POST", "model-versions/set-tag", writes=True)
def _set_version_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    key, value = call.given.text("key"), (call.given.text_or_none("value") or "")[:_MAX_TAG]
    _change_version(call, _tagging(key, value))
    return {}


@mlflow_calls.endpoint("DELETE", "model-versions/delete-tag", writes=True)
def _delete_version_tag(call: mlflow_calls.Call) -> dict[str, Any]:
    _change_version(call, _untagging(call.given.text("key")))
    return {}


# ---- documents -----------------------------------------------------------------------------------


def _read(connection: sa.Connection, name: str) -> Content:
    found: Content | None = get_document(connection, MODEL, "", name)
    if found is None:
        raise mlflow_calls.missing(f"Registered Model with name={name[:_MAX_NAME]} not found")
    return found


def _read_version(connection: sa.Connection, name: str, version: str) -> Content:
    found: Content | None = get_document(connection, VERSION, name, version)
    if found is None:
        raise mlflow_calls.missing(
            f"Model Version (name={name[:_MAX_NAME]}, version={version[:50]}) not found"
        )
    return found


def _asked_version(call: mlflow_calls.Call) -> tuple[str, str]:
    name, version = call.given.text("name"), call.given.text("version")
    if not version.isdecimal():
        raise mlflow_calls.invalid(f"Parameter 'version' must be an integer, got '{version[:50]}'.")
    return name, version


def _change(call: mlflow_calls.Call, name: str, change: Callable[[Content], Content]) -> Content:
    after = change(_read(call.connection, name)) | {"last_updated_timestamp": now_ms()}
    change_document(call.connection, MODEL, "", name, lambda _: after)
    return after


def _change_version(
    call: mlflow_calls.Call, change: Callable[[Content], Content]
) -> dict[str, Any]:
    name, version = _asked_version(call)
    before = _read_version(call.connection, name, version)
    after = change(before) | {"last_updated_timestamp": now_ms()}
    change_document(call.connection, VERSION, name, version, lambda _: after)
    return {"model_version": _shown_version(call.connection, name, version)}


def _archive(connection: sa.Connection, row: sa.Row[Any]) -> None:
    archived = row.content | {"current_stage": "Archived"}
    change_document(connection, VERSION, row.parent, row.name, lambda _: archived)


def _tagging(key: str, value: str) -> Callable[[Content], Content]:
    return lambda content: content | {"tags": content["tags"] | {key: value}}


def _untagging(key: str) -> Callable[[Content], Content]:
    return lambda content: (
        content | {"tags": {name: value for name, value in content["tags"].items() if name != key}}
    )


def _new_name(call: mlflow_calls.Call, argument: str) -> str:
    name = call.given.text(argument)
    if not name.strip() or len(name) > _MAX_NAME or any(mark in name for mark in "/:"):
        raise mlflow_calls.invalid(
            f"Invalid value for parameter '{argument}': a registered model's name must have 1 to"
            f" {_MAX_NAME} characters, none of them '/' or ':', but got {name[:_MAX_NAME]!r}."
        )
    if get_document(call.connection, MODEL, "", name) is not None:
        raise mlflow_calls.MlflowError(
            "RESOURCE_ALREADY_EXISTS", f"Registered Model (name={name}) already exists."
        )
    return name


def _checked_source(source: str) -> str:
    parts = urlsplit(source)
    if parts.scheme in ("", "file"):
        raise mlflow_calls.invalid(
            "To use a local path as a model version source, it would have to lie on the master's"
            f" disk, but got {source[:500]!r}. Hint: log the model in a run, and name that."
        )
    path = unquote(unquote(parts.path))
    if ".." in path.split("/") or "\\" in path or parts.fragment or not path.isprintable():
        raise mlflow_calls.invalid(
            f"Invalid model version source: {source[:500]!r}. If supplying a source as an http,"
            " https, local file path, ftp, objectstore, or mlflow-artifacts uri, an absolute path"
            " must be provided without relative path references present."
        )
    return source


def _check_checkpoint(connection: sa.Connection, source: str) -> None:
    """Refuse a missing, incomplete or foreign checkpoint as the source of a version.

    Nobody can delete it while the version is there: only an editor of its project may keep it.
    """
    uuid = checkpoint_of_source(source)
    if uuid is None:
        return
    check_object(connection, "uuid", uuid)
    owner = tables.checkpoints.c.experiment_id == tables.experiments.c.id
    query = sa.select(tables.checkpoints.c.state, tables.experiments.c.project_id)
    row = connection.execute(query.where(tables.checkpoints.c.uuid == uuid, owner)).one_or_none()
    if row is None:
        raise mlflow_calls.missing(f"There is no checkpoint {uuid[:_MAX_NAME]!r}.")
    reach = current_reach()
    if reach is not None and reach.changes is not None and row.project_id not in reach.changes:
        raise NotAllowedError(f"checkpoint {uuid}", is_hidden=False)
    if row.state != CheckpointState.COMPLETED.value:
        raise mlflow_calls.invalid(
            f"The source must be a whole checkpoint, but files of {uuid} were deleted."
        )


def _stage(text: str) -> str:
    if text.lower() not in _STAGES:
        raise mlflow_calls.invalid(
            f"Invalid Model Version stage: {text[:100]}. Value must be one of"
            f" {', '.join(_STAGES.values())}."
        )
    return _STAGES[text.lower()]


def _shown(connection: sa.Connection, name: str, content: Content) -> dict[str, Any]:
    shown = {key: value for key, value in content.items() if key != "num_versions"}
    aliases = [{"alias": alias, "version": v} for alias, v in content["aliases"].items()]
    return shown | {
        "name": name,
        "tags": mlflow_calls.tag_list(content["tags"]),
        "aliases": aliases,
        "latest_versions": _latest(connection, name),
    }


def _shown_version(connection: sa.Connection, name: str, version: str) -> dict[str, Any]:
    content = _read_version(connection, name, version)
    aliases = _read(connection, name)["aliases"]
    return content | {
        "name": name,
        "version": version,
        "tags": mlflow_calls.tag_list(content["tags"]),
        "aliases": [alias for alias, v in aliases.items() if v == version],
    }


def _latest(connection: sa.Connection, name: str) -> list[dict[str, Any]]:
    """Return the newest version of each stage."""
    documents = tables.documents.c
    query = sa.select(documents.name, documents.content).where(
        documents.kind == VERSION, documents.parent == name
    )
    newest: dict[str, int] = {}
    for version, content in connection.execute(query):
        stage = content["current_stage"]
        newest[stage] = max(newest.get(stage, 0), int(version))
    return [_shown_version(connection, name, str(version)) for version in newest.values()]


def _look_up(model: tuple[str, Content], entity: str, key: str) -> Any:
    name, content = model
    if entity == TAG:
        return content["tags"].get(key, "false" if key == _PROMPT_TAG else None)
    return name if key == "name" else content[key]


def _look_up_version(one: tuple[tuple[str, str], Content], entity: str, key: str) -> Any:
    (name, version), content = one
    if entity == TAG:
        return content["tags"].get(key, "false" if key == _PROMPT_TAG else None)
    found = {"name": name, "version_number": int(version), "source_path": content["source"]}
    return found[key] if key in found else content[key]
