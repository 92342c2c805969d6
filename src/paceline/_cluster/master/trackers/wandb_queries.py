"""Queries and mutations of W&B's clients about projects, runs and files."""

import json
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa

from paceline._base.journal_records import AlertRaised
from paceline._cluster.master.experiments.logged_runs import get_document, list_documents
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.row_ids_and_counts import update_experiment
from paceline._cluster.master.trackers import wandb_artifact_changes, wandb_runs
from paceline._cluster.master.trackers import wandb_artifacts as artifacts
from paceline._cluster.master.trackers import wandb_sweeps as sweeps
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError, chosen_runs, page
from paceline._cluster.master.trackers.wandb_streams import (
    EVENTS,
    HISTORY,
    history_keys,
    read_history,
)
from paceline._cluster.master.trackers.wandb_values import storable
from paceline.importers._run_writer import SYSTEM_GROUP

# Clients refuse servers that are older than 0.70.0, and warn of clients newer than the second.
_SERVER_VERSION, _MAX_CLIENT_VERSION = "0.85.0", "9.0.0"
_FEATURES = (
    "FILESTREAM_GZIP",
    "USE_ARTIFACT_WITH_ENTITY_AND_PROJECT_INFORMATION",
    "ARTIFACT_TAGS",
    "PROJECT_ARTIFACT_COLLECTION_MEMBERSHIP",
    "ARTIFACT_COLLECTION_MEMBERSHIP_FILES",
    "ARTIFACT_V2_DOWNLOAD_HANDLER_SUPPORTS_ARTIFACT_ID",
    "TOTAL_COUNT_IN_FILE_CONNECTION",
)
_MAX_ROWS = 10_000
_MAX_FILES = 10_000
Fields = dict[str, Any]


def query_fields(asked: wandb_runs.Asked) -> Fields:
    """Return the fields of a query, by name."""

    def project(arguments: Mapping[str, Any]) -> Fields | None:
        entity = wandb_runs.checked_name(arguments.get("entityName"), wandb_runs.ENTITY)
        return project_view(
            asked, entity, wandb_runs.checked_name(arguments.get("name"), "uncategorized")
        )

    return {
        "viewer": lambda _: _viewer(asked),
        "serverInfo": lambda _: _server_info(),
        "entity": lambda given: _entity(
            asked, wandb_runs.checked_name(given.get("name"), wandb_runs.ENTITY)
        ),
        "organization": lambda _: None,
        "project": project,
        "model": project,
        "models": partial(_projects, asked),
        "users": lambda _: {"edges": []},
        **artifacts.query_fields(asked),
    }


def mutation_fields(asked: wandb_runs.Asked) -> Fields:
    """Return the fields of a mutation, by name; each has its arguments in `input`."""
    fields: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "upsertBucket": partial(_upsert_bucket, asked),
        "upsertModel": partial(_upsert_model, asked),
        "createRunFiles": partial(_create_run_files, asked),
        "markRunFilesUploaded": lambda _: {"success": True},
        "deleteFiles": partial(_delete_files, asked),
        "notifyScriptableRunAlert": partial(_alert, asked),
        "stopRun": partial(_stop_run, asked),
        "deleteRun": partial(_delete_run, asked),
        "updateRunState": partial(_update_run_state, asked),
        "upsertSweep": partial(_upsert_sweep, asked),
        "createAgent": partial(sweeps.create_agent, asked),
        "agentHeartbeat": partial(sweeps.beat, asked),
        "linkArtifact": partial(_refuse, "Registries", "give the artifact an alias."),
        **wandb_artifact_changes.mutation_fields(asked),
    }

    def with_input(change: Callable[[Mapping[str, Any]], Any], arguments: Fields) -> Any:
        from graphql import Undefined

        asked.writer  # noqa: B018 - refuses tokens that only read, whatever the mutation is
        given = arguments.get("input")
        given = given if isinstance(given, dict) else {}
        # What stands for a variable that is left out.
        return change({key: value for key, value in given.items() if value is not Undefined})

    return {name: partial(with_input, change) for name, change in fields.items()}


def _number_of(*names: str) -> int:
    """Return the number that clients want as the internal id of something with a name."""
    return zlib.crc32("/".join(names).encode())


def _viewer(asked: wandb_runs.Asked) -> Fields:
    return {
        "id": wandb_runs.encode_id("User", asked.user),
        "entity": wandb_runs.ENTITY,
        "username": asked.user,
        "name": asked.user,
        "email": "",
        "admin": False,
        "flags": "{}",
        "deletedAt": None,
        "teams": {"edges": [{"node": {"name": wandb_runs.ENTITY}}]},
        "apiKeys": {"edges": []},
        "organizations": [],
    }


def _server_info() -> Fields:
    newest = {
        "outOfDate": False,
        "latestVersionString": _SERVER_VERSION,
        "versionOnThisInstanceString": _SERVER_VERSION,
    }
    return {
        "cliVersionInfo": {"max_cli_version": _MAX_CLIENT_VERSION, "min_cli_version": "0.0.1"},
        "latestLocalVersionInfo": newest,
        "features": [{"name": name, "isEnabled": True} for name in _FEATURES],
        "exposesExplicitMetrics": True,
    }


def _entity(asked: wandb_runs.Asked, name: str) -> Fields:
    return {
        "id": wandb_runs.encode_id("Entity", name),
        "name": name,
        "isTeam": False,
        "available": False,
        "organization": None,
        "user": {"organizations": []},
        "artifactCollections": lambda _: {"edges": []},
    }


def _projects(asked: wandb_runs.Asked, arguments: Mapping[str, Any]) -> Fields:
    asked.check_may_list()
    entity = wandb_runs.checked_name(arguments.get("entityName"), wandb_runs.ENTITY)
    rows = list_documents(asked.connection, wandb_runs.PROJECT, entity)
    return page(rows, arguments, lambda row: project_view(asked, entity, row.name))


def project_view(asked: wandb_runs.Asked, entity: str, name: str) -> Fields | None:
    """Return the fields of a project, None if there is no such project."""
    document = get_document(asked.connection, wandb_runs.PROJECT, entity, name)
    if document is None:
        return None

    def run(arguments: Mapping[str, Any]) -> Fields | None:
        if arguments.get("name") in (None, ""):
            return None
        place = wandb_runs.RunPlace(entity, name, wandb_runs.checked_name(arguments["name"], ""))
        found = asked.document(place)
        return None if found is None else run_view(asked, place, found)

    return {
        "__typename": "Project",
        "id": wandb_runs.encode_id("Project", "v1", name, entity),
        "internalId": wandb_runs.encode_id("ProjectInternalId", str(_number_of(entity, name))),
        "name": name,
        "entityName": entity,
        "entity": {"id": wandb_runs.encode_id("Entity", entity), "name": entity},
        "description": document.get("description"),
        "createdAt": wandb_runs.iso_time(document["created"]),
        "isBenchmark": False,
        "readOnly": False,
        "access": "PRIVATE",
        "views": "{}",
        "user": lambda _: _viewer(asked),
        "run": run,
        "bucket": run,
        "runs": partial(_runs, asked, entity, name),
        "runCount": lambda given: len(_chosen(asked, entity, name, given)),
        "sweep": partial(_sweep, asked, entity, name),
        "sweeps": partial(_sweeps, asked, entity, name),
        "totalSweeps": lambda _: _sweeps(asked, entity, name, {})["totalCount"],
        **artifacts.project_fields(asked, f"{entity}/{name}"),
    }


def _runs(
    asked: wandb_runs.Asked, entity: str, project: str, arguments: Mapping[str, Any]
) -> Fields:
    def show(found: Mapping[str, Any]) -> Fields:
        place = wandb_runs.RunPlace(entity, project, found["name"])
        return run_view(asked, place, found["document"], found["attempt"])

    return page(_chosen(asked, entity, project, arguments), arguments, show)


def _sweep(
    asked: wandb_runs.Asked, entity: str, project: str, arguments: Mapping[str, Any]
) -> Fields | None:
    name = wandb_runs.checked_name(arguments.get("sweepName"), "-")
    place = wandb_runs.RunPlace(entity, project, name)
    document = get_document(asked.connection, sweeps.SWEEP, place.parent, name)
    return None if document is None else _sweep_view(asked, place, document)


def _sweeps(
    asked: wandb_runs.Asked, entity: str, project: str, arguments: Mapping[str, Any]
) -> Fields:
    asked.check_may_list()
    rows = list_documents(asked.connection, sweeps.SWEEP, f"{entity}/{project}")

    def show(row: sa.Row[Any]) -> Fields:
        return _sweep_view(asked, wandb_runs.RunPlace(entity, project, row.name), row.content)

    return page(rows, arguments, show)


def _sweep_view(
    asked: wandb_runs.Asked, place: wandb_runs.RunPlace, document: Mapping[str, Any]
) -> Fields:
    def runs(arguments: Mapping[str, Any]) -> Fields:
        wanted = {**arguments, "filters": json.dumps({"sweep": place.name})}
        return _runs(asked, place.entity, place.project, wanted)

    return {
        **sweeps.sweep_view(place, document),
        "runs": runs,
        "project": lambda _: project_view(asked, place.entity, place.project),
    }


def _chosen(
    asked: wandb_runs.Asked, entity: str, project: str, arguments: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    asked.check_may_list()
    rows = list_documents(asked.connection, wandb_runs.RUN, f"{entity}/{project}")
    attempts = _newest_attempts(asked)
    found = []
    for row in rows:
        document, attempt = row.content, attempts.get(row.experiment_id)
        beat = document["created"] if attempt is None else attempt.last_record_at
        fields = {key: document.get(key) for key in ("displayName", "tags", "group", "jobType")}
        fields |= {"name": row.name, "document": document, "attempt": attempt}
        fields |= {
            "state": wandb_runs.state_of(attempt),
            "createdAt": wandb_runs.iso_time(document["created"]),
        }
        fields |= {"heartbeatAt": wandb_runs.iso_time(beat or document["created"])}
        fields |= {
            "config": wandb_runs.config_values(document),
            "summaryMetrics": document["summary"],
        }
        found.append(fields | {"user": document.get("user"), "sweep": document.get("sweep")})
    return chosen_runs(found, arguments.get("filters"), arguments.get("order"))


def _newest_attempts(asked: wandb_runs.Asked) -> dict[int, sa.Row[Any]]:
    """Return the newest attempt of each run of a W&B client by its experiment."""
    attempts, documents = tables.attempts, tables.documents
    ids = sa.select(documents.c.experiment_id).where(documents.c.kind == wandb_runs.RUN)
    query = sa.select(attempts).where(attempts.c.experiment_id.in_(ids)).order_by(attempts.c.number)
    return {row.experiment_id: row for row in asked.connection.execute(query)}


def run_view(
    asked: wandb_runs.Asked,
    place: wandb_runs.RunPlace,
    document: Mapping[str, Any],
    attempt: sa.Row[Any] | None = None,
) -> Fields:
    """Return the fields of a run."""
    run = asked.run(document)
    attempt = attempt or run.attempt
    trial_id, connection = run.trial.id, asked.connection
    began = document.get("began", document["created"])
    counts = {name: lines["count"] for name, lines in document["lines"].items()}
    read = partial(read_history, connection, trial_id, began)

    def history(arguments: Mapping[str, Any]) -> list[str]:
        first, end = arguments.get("minStep"), arguments.get("maxStep")
        rows = read(
            first_step=max(first, 0) if isinstance(first, int) else 0,
            last_step=end - 1 if isinstance(end, int) else None,
            limit=_MAX_ROWS if isinstance(end, int) else None,
        )
        samples = None if isinstance(end, int) else arguments.get("samples")
        return [*map(json.dumps, _sampled(rows, samples))]

    def events(arguments: Mapping[str, Any]) -> list[str]:
        return [*map(json.dumps, _sampled(read(group=SYSTEM_GROUP), arguments.get("samples")))]

    def sampled(arguments: Mapping[str, Any]) -> list[list[Fields]]:
        return [_sampled_history(read, _spec(each)) for each in arguments.get("specs") or ()]

    return {
        "__typename": "Run",
        "id": place.id,
        "name": place.name,
        "displayName": document["displayName"],
        "description": document.get("description") or document["displayName"],
        "notes": document.get("notes"),
        "tags": document["tags"],
        "group": document.get("group"),
        "jobType": document.get("jobType"),
        "commit": document.get("commit"),
        "host": document.get("host"),
        "sweepName": document.get("sweep"),
        "state": wandb_runs.state_of(attempt),
        "stopped": bool(document.get("should_stop")),
        "readOnly": False,
        "createdAt": wandb_runs.iso_time(document["created"]),
        "heartbeatAt": wandb_runs.iso_time(attempt.last_record_at or document["created"]),
        "projectId": str(_number_of(place.entity, place.project)),
        "project": lambda _: project_view(asked, place.entity, place.project),
        "user": {"name": document.get("user"), "username": document.get("user")},
        "config": lambda _: json.dumps(document["config"]),
        "wandbConfig": lambda _: json.dumps(
            (document["config"].get("_wandb") or {}).get("value") or {}
        ),
        "summaryMetrics": lambda _: json.dumps(document["summary"]),
        "systemMetrics": lambda _: json.dumps(next(iter(read(group=SYSTEM_GROUP)[-1:]), {})),
        "historyKeys": lambda _: history_keys(connection, trial_id),
        "historyLineCount": counts.get(HISTORY, 0),
        "eventsLineCount": counts.get(EVENTS, 0),
        "logLineCount": counts.get("output.log", 0),
        "historyTail": json.dumps([json.dumps(document.get("tail", {}))]),
        "eventsTail": json.dumps([json.dumps(document.get("events_tail", {}))]),
        "history": history,
        "events": events,
        "sampledHistory": sampled,
        "parquetHistory": {"parquetUrls": [], "liveData": [{"_step": 0}]},
        "files": partial(wandb_runs.files_page, asked, trial_id),
        "fileCount": lambda _: len(wandb_runs.file_rows(asked, trial_id, {})),
        "logLines": partial(wandb_runs.log_lines, asked, trial_id),
        **artifacts.run_fields(asked, place),
    }


def _spec(text: Any) -> Fields:
    try:
        spec = json.loads(text)
    except (TypeError, ValueError):
        spec = None
    if not isinstance(spec, dict):
        raise GraphqlError(f"A spec of a sampled history must be JSON, but got {text!r:.200}.")
    return spec


def _sampled_history(read: Callable[..., list[Fields]], spec: Fields) -> list[Fields]:
    keys = [key for key in spec.get("keys") or () if isinstance(key, str)]
    first, last = spec.get("minStep"), spec.get("maxStep")
    rows = read(
        first_step=first if isinstance(first, int) and first > 0 else 0,
        last_step=last if isinstance(last, int) else None,
    )
    rows = [{key: row[key] for key in keys} for row in rows if all(key in row for key in keys)]
    return _sampled(rows, spec.get("samples"))


def _sampled(rows: list[Fields], samples: Any) -> list[Fields]:
    """Return evenly chosen rows; the last is among them."""
    if not isinstance(samples, int) or not 0 < samples < len(rows):
        return rows
    step = (len(rows) - 1) / max(samples - 1, 1)
    return [rows[round(index * step)] for index in range(samples)]


# ---- mutations ---------------------------------------------------------------------------------


def _upsert_bucket(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    place, is_new = wandb_runs.upsert_run(asked, given)
    document, _ = asked.known_run(place)
    return {"bucket": run_view(asked, place, document), "inserted": is_new}


def _upsert_model(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    entity = wandb_runs.checked_name(given.get("entityName"), wandb_runs.ENTITY)
    name = wandb_runs.checked_name(given.get("name"), "uncategorized")
    is_new = get_document(asked.connection, wandb_runs.PROJECT, entity, name) is None
    description = given.get("description")
    changed = {"description": str(storable(description))[:4096]} if description else {}
    wandb_runs.upsert_project(asked, entity, name, **changed)
    view = project_view(asked, entity, name)
    return {"project": view, "model": view, "inserted": is_new}


def _upsert_sweep(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    place, document, warnings = sweeps.upsert_sweep(asked, given)
    view = _sweep_view(asked, place, document)
    return {"sweep": view, "configValidationWarnings": warnings}


def _named_run(given: Mapping[str, Any]) -> wandb_runs.RunPlace:
    if not given.get("runName"):
        raise GraphqlError("`runName` must name a run, but is missing.")
    return wandb_runs.checked_place(
        given.get("entityName"), given.get("projectName"), given["runName"]
    )


def _create_run_files(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    place = _named_run(given)
    _, run = asked.known_run(place)
    names = [name for name in given.get("files") or () if isinstance(name, str)]
    files = []
    for name in names[:_MAX_FILES]:
        path = wandb_runs.stored_path(name)
        files.append(
            {"name": name, "uploadUrl": wandb_runs.signed_url(asked, "PUT", run.trial.id, path)}
        )
    return {"runID": place.id, "uploadHeaders": [], "files": files}


def _delete_files(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    files = tables.run_files.c
    asked.check_may_list()
    known = sa.select(tables.documents.c.experiment_id).where(
        tables.documents.c.kind == wandb_runs.RUN
    )
    for text in given.get("files") or ():
        trial_id, *parts = wandb_runs.decode_id(text, "File")
        where = (files.trial_id == int(trial_id), files.path == ":".join(parts))
        statement = sa.delete(tables.run_files).where(*where, files.experiment_id.in_(known))
        asked.connection.execute(statement)
    return {"success": True}


def _alert(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    _, run = asked.known_run(_named_run(given))
    levels = {"WARN": "warn", "ERROR": "error"}
    title, text = (str(storable(given.get(name) or ""))[:4096] for name in ("title", "text"))
    level = levels.get(str(given.get("severity")), "info")
    alert = AlertRaised(time=time.time(), title=title or "Alert", description=text, level=level)
    asked.master.logged_runs.append(asked.writer, run.run_id, [alert])
    return {"success": True}


def _delete_run(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    """Archive the experiment of a run, whose name is free then."""
    asked.check_may_list()
    place = wandb_runs.RunPlace.from_id(given.get("id"))
    document, run = asked.known_run(place)
    asked.master.logged_runs.finish(asked.writer, document["run_id"], "completed")
    update_experiment(asked.connection, run.experiment_id, is_archived=True)
    wandb_runs.forget_run(asked, place)
    return {"clientMutationId": None}


def _update_run_state(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    document, _ = asked.known_run(wandb_runs.RunPlace.from_id(given.get("id")))
    if given.get("state") != "failed":
        raise GraphqlError(
            f"A run can be set to `failed` only, but got {given.get('state')!r:.50}."
        )
    error = f"{asked.user} marked the run as failed."
    asked.master.logged_runs.finish(asked.writer, document["run_id"], "error", error)
    return {"success": True}


def _refuse(what: str, hint: str, _: Mapping[str, Any]) -> None:
    raise GraphqlError(f"{what} of W&B are not served here. Hint: {hint}")


def _stop_run(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> Fields:
    place = wandb_runs.RunPlace.from_id(given.get("id"))
    document, _ = asked.known_run(place)
    wandb_runs.store_run(asked, place, document | {"should_stop": True})
    return {"success": True}
