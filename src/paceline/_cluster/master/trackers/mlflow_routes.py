"""Routes of MLflow's client, below its own prefixes, and the artifacts of its runs."""

import asyncio
import json
import logging
import mimetypes
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import sqlalchemy as sa
from fastapi import Request, Response

from paceline._base.journal_records import MediaFile, MediaReported
from paceline._base.run_directory import check_file_path
from paceline._cluster.master.api.access_guard import (
    AccessIdentity,
    IdentityOf,
    check_tracker_rights,
)
from paceline._cluster.master.api.file_routes import receive_file, send_file
from paceline._cluster.master.api.requests_and_answers import MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.logged_runs import LoggedRuns
from paceline._cluster.master.experiments.unmanaged_runs import experiment_of_run, trial_of_run
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.run_files import get_file, list_files, put_file
from paceline._cluster.master.trackers import mlflow_calls
from paceline._cluster.master.trackers import mlflow_registry as _registry  # noqa: F401
from paceline._cluster.master.trackers import mlflow_runs as _runs  # noqa: F401
from paceline._cluster.master.trackers.mlflow_experiments import now_ms
from paceline._cluster.master.trackers.mlflow_models import TRAINING_GROUP, find_model
from paceline._cluster.master.trackers.mlflow_runs import find_run
from paceline.importers._mlflow_stores import IMAGE_FILE

# Below the experiment: the files of a run, or of a model that one logged.
_OF_RUN = re.compile(r"(?P<project>[^/]+)/(?P<run>[^/]+)/artifacts(?:/(?P<path>.*))?", re.DOTALL)
_OF_MODEL = re.compile(
    r"(?P<project>[^/]+)/models/(?P<model>[^/]+)/artifacts(?:/(?P<path>.*))?", re.DOTALL
)
MODELS = "models"
_MAX_LISTED = 10_000
_BEYOND = "\U0010ffff"


class FilePlace(NamedTuple):
    """Where a file lies: in a run, below a path that is empty for the run itself."""

    run_id: str
    path: str


def find_place(connection: sa.Connection, artifact: str) -> FilePlace:
    """Return where an artifact of `mlflow-artifacts:` lies.

    Raises:
        MlflowError: The path is none of ours, or could lead out of the run's files.
    """
    for text in (artifact, unquote(artifact)):
        try:
            check_file_path(text.rstrip("/"))
        except ValueError as error:
            raise mlflow_calls.invalid(f"Invalid path: {error}") from error
    of_model = _OF_MODEL.fullmatch(artifact)
    if of_model is not None:
        run_id = find_model(connection, of_model["model"]).content["files_run_id"]
        path = f"{MODELS}/{of_model['model']}/{of_model['path'] or ''}"
    else:
        of_run = _OF_RUN.fullmatch(artifact)
        if of_run is None:
            raise mlflow_calls.invalid(
                f"The path of an artifact must be EXPERIMENT/RUN/artifacts/PATH, but got"
                f" {artifact[:200]!r}. Hint: log it in a run."
            )
        run_id, path = of_run["run"], of_run["path"] or ""
        find_run(connection, run_id)
    return FilePlace(run_id, path.rstrip("/"))


def name_file(
    transaction: Transaction, runs: LoggedRuns, place: FilePlace, digest: str, size: int
) -> None:
    """Name a stored content as a file of a run; an image that was logged becomes media."""
    media_type = mimetypes.guess_type(place.path)[0] or "application/octet-stream"
    run = runs.get(transaction.connection, place.run_id)
    put_file(transaction.connection, run.trial, place.path, digest, size, media_type)
    image = IMAGE_FILE.fullmatch(place.path)
    if image is None or "compressed" in place.path:
        return
    file = MediaFile(path=place.path, digest=digest, size=size, media_type=media_type)
    record = MediaReported(
        time=(int(image["time"]) or now_ms()) / 1000,
        group=TRAINING_GROUP,
        steps_completed=int(image["step"]),
        name=re.sub(r"[~#]", "/", image["name"]),
        kind="image",
        files=[file],
    )
    runs.append(transaction, place.run_id, [record])


def find_file(connection: sa.Connection, artifact: str) -> sa.Row[Any]:
    """Return the row of an artifact.

    Raises:
        MlflowError: There is no such file.
    """
    place = find_place(connection, artifact)
    row = get_file(connection, trial_of_place(place, connection).id, place.path)
    if row is None:
        raise mlflow_calls.missing(f"No such artifact: {place.path[:300]!r}")
    return row


def delete_files(connection: sa.Connection, artifact: str) -> None:
    """Delete an artifact: a file, or a directory with all its files."""
    place, files = find_place(connection, artifact), tables.run_files
    prefix = f"{place.path}/" if place.path else ""
    is_chosen = (files.c.path >= prefix) & (files.c.path < prefix + _BEYOND)
    if place.path:
        is_chosen |= files.c.path == place.path
    trial_id = trial_of_place(place, connection).id
    connection.execute(sa.delete(files).where(files.c.trial_id == trial_id, is_chosen))


@mlflow_calls.endpoint("GET", "logged-models/{model_id}/artifacts/directories")
def _list_of_model(call: mlflow_calls.Call) -> dict[str, Any]:
    model = find_model(call.connection, call.given.text("model_id"))
    root = f"{MODELS}/{model.name}"
    path = _checked(call.given.text_or_none("artifact_directory_path") or "")
    place = FilePlace(model.content["files_run_id"], f"{root}/{path}".rstrip("/"))
    files = list_directory(call.connection, place, root=f"{root}/")
    return {"root_uri": model.content["artifact_uri"], "files": files}


@mlflow_calls.endpoint("GET", "artifacts/list")
def _list_of_run(call: mlflow_calls.Call) -> dict[str, Any]:
    run = find_run(call.connection, call.run_id())
    root = run.content["artifact_uri"]
    if not root.startswith("mlflow-artifacts:"):
        raise mlflow_calls.MlflowError(
            "NOT_IMPLEMENTED",
            f"The artifacts of run {run.name} lie at {root}, where Paceline does not look.",
        )
    path = _checked(call.given.text_or_none("path") or "")
    files = list_directory(call.connection, FilePlace(run.name, path))
    return {"root_uri": root, "files": files}


def list_directory(
    connection: sa.Connection, place: FilePlace, *, root: str = ""
) -> list[dict[str, Any]]:
    """Return files and directories in a directory of a run.

    Args:
        connection: Where to read.
        place: The directory.
        root: What paths in the answer leave out.
    """
    prefix = f"{place.path}/" if place.path else ""
    trial_id, after = trial_of_place(place, connection).id, prefix
    found: list[dict[str, Any]] = []
    while len(found) < _MAX_LISTED:
        rows = list_files(connection, trial_id, prefix=prefix, after=after, limit=1)
        if not rows:
            break
        name, slash, _ = rows[0].path[len(prefix) :].partition("/")
        path = (prefix + name).removeprefix(root)
        if slash:
            # Past all files of that directory.
            found.append({"path": path, "is_dir": True})
            after = f"{prefix}{name}/{_BEYOND}"
        else:
            found.append({"path": path, "is_dir": False, "file_size": rows[0].size})
            after = rows[0].path
    return found


def _checked(path: str) -> str:
    path = path.rstrip("/")
    if path:
        try:
            check_file_path(path)
            check_file_path(unquote(path))
        except ValueError as error:
            raise mlflow_calls.invalid(f"Invalid path: {error}") from error
    return path


def trial_of_place(place: FilePlace, connection: sa.Connection) -> sa.Row[Any]:
    """Return the trial whose files are there."""
    experiment = experiment_of_run(connection, place.run_id)
    if experiment is None:
        raise mlflow_calls.missing(f"Run with id={place.run_id[:200]} not found")
    return trial_of_run(connection, experiment.id)


logger = logging.getLogger(__name__)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_LISTS = ("order_by", "run_ids", "stages", "experiment_ids")
_PROXY = "/api/2.0/mlflow-artifacts"
# The client then sends the file in one piece.
_NO_PARTS = "Multipart upload is not supported for the current artifact repository"

Result = TypeVar("Result")

mlflow_router = ApiRouter(include_in_schema=False)


@mlflow_router.api_route("/api/2.0/mlflow/{path:path}", methods=_METHODS)
@mlflow_router.api_route("/api/3.0/mlflow/{path:path}", methods=_METHODS)
async def answer_call(
    path: str, request: Request, master: MasterOf, identity: IdentityOf
) -> Response:
    """Answer a call about experiments, runs or models."""
    assert identity is not None
    found, place = mlflow_calls.find_endpoint(request.method, path)
    check_tracker_rights(identity, writes=found.writes, lists=found.lists)
    arguments = mlflow_calls.Fields({**await _arguments(request), **place})
    body = await _answer(master, identity, found, arguments)
    return Response(body, media_type="application/json")


@mlflow_calls.endpoint("GET", "server-info")
def _server_info(_call: mlflow_calls.Call) -> dict[str, Any]:
    return {
        "store_type": "paceline",
        "workspaces_enabled": False,
        "multipart_uploads_enabled": False,
        "multipart_downloads_enabled": False,
    }


@mlflow_router.put(_PROXY + "/artifacts/{path:path}")
async def put_artifact(
    path: str, request: Request, master: MasterOf, identity: IdentityOf
) -> Response:
    """Store a file; nothing is kept of one that breaks off."""
    check_tracker_rights(identity, writes=True)
    place = await asyncio.to_thread(_read, master, lambda found: find_place(found, path))
    if not place.path:
        raise mlflow_calls.invalid("The path of an artifact must name a file.")
    digest, size = await receive_file(master, partial(trial_of_place, place), request)
    await write_rows(
        master, lambda writer: name_file(writer, master.logged_runs, place, digest, size)
    )
    return Response("{}", media_type="application/json")


@mlflow_router.get(_PROXY + "/artifacts/{path:path}")
async def get_artifact(path: str, master: MasterOf) -> Response:
    """Send a file."""

    row = await asyncio.to_thread(_read, master, lambda found: find_file(found, path))
    return send_file(master, path, row)


@mlflow_router.get(_PROXY + "/artifacts")
async def list_artifacts(master: MasterOf, path: str = "") -> Response:
    """List files and directories in a directory."""

    def find(connection: sa.Connection) -> list[dict[str, Any]]:
        place = find_place(connection, path)
        return list_directory(connection, place, root=f"{place.path}/" if place.path else "")

    files = await asyncio.to_thread(_read, master, find)
    return Response(json.dumps({"files": files}), media_type="application/json")


@mlflow_router.delete(_PROXY + "/artifacts/{path:path}")
async def delete_artifact(path: str, master: MasterOf, identity: IdentityOf) -> Response:
    """Delete a file, or a directory with all that is in it."""
    check_tracker_rights(identity, writes=True)
    await write_rows(master, lambda writer: delete_files(writer.connection, path))
    return Response("{}", media_type="application/json")


@mlflow_router.api_route(_PROXY + "/mpu/{path:path}", methods=["POST"])
@mlflow_router.api_route(_PROXY + "/presigned/{path:path}", methods=["GET"])
async def refuse_parts(path: str) -> Response:
    """Refuse files in parts: the master itself takes and gives all of them."""
    raise mlflow_calls.MlflowError("NOT_IMPLEMENTED", _NO_PARTS)


async def _arguments(request: Request) -> dict[str, Any]:
    """Return the arguments of a call: those of its URL, or of its body."""
    query = request.query_params
    found: dict[str, Any] = {
        name: query.getlist(name) if name in _LISTS else query[name] for name in query
    }
    body = await request.body()
    if not body.strip():
        return found
    try:
        sent = json.loads(body)
        # Clients of old releases encode their JSON twice.
        sent = json.loads(sent) if isinstance(sent, str) else sent
    except (ValueError, RecursionError):
        sent = None
    if not isinstance(sent, dict):
        raise mlflow_calls.invalid("The body of a call must be a JSON object.")
    return found | sent


async def _answer(
    master: Master,
    identity: AccessIdentity,
    found: mlflow_calls.Endpoint,
    given: mlflow_calls.Fields,
) -> bytes:
    def answer(connection: sa.Connection, transaction: Transaction | None = None) -> bytes:
        call = mlflow_calls.Call(given=given, identity=identity, connection=connection,
                                 transaction=transaction, runs=master.logged_runs)  # fmt: skip
        return json.dumps(found.answer(call), separators=(",", ":")).encode()

    if found.writes:
        return await write_rows(master, lambda writer: answer(writer.connection, writer))
    return await asyncio.to_thread(_read, master, answer)


def _read(master: Master, job: Callable[[sa.Connection], Result]) -> Result:
    with master.database.read() as connection:
        return job(connection)
