"""Routes that MLflow's client asks for, below its own prefixes."""

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from sqlalchemy import Connection

from paceline._cluster.master.api.access_guard import (
    AccessIdentity,
    IdentityOf,
    check_tracker_rights,
)
from paceline._cluster.master.api.file_routes import receive_file, send_file
from paceline._cluster.master.api.requests_and_answers import MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.database import Transaction

# Imported for the endpoints that they register.
from paceline._cluster.master.trackers import mlflow_registry as _registry  # noqa: F401
from paceline._cluster.master.trackers import mlflow_run_search as _run_search  # noqa: F401
from paceline._cluster.master.trackers.mlflow_artifacts import (
    delete_files,
    find_file,
    find_place,
    list_directory,
    name_file,
    trial_of_place,
)
from paceline._cluster.master.trackers.mlflow_calls import (
    Call,
    Endpoint,
    Fields,
    MlflowError,
    endpoint,
    find_endpoint,
    invalid,
)

logger = logging.getLogger(__name__)

MAX_ARTIFACT_BYTES = 64 * 1024**3
_CHUNK = 1024 * 1024
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
    found, place = find_endpoint(request.method, path)
    check_tracker_rights(identity, writes=found.writes, lists=found.lists)
    arguments = Fields({**await _arguments(request), **place})
    body = await _answer(master, identity, found, arguments)
    return Response(body, media_type="application/json")


@endpoint("GET", "server-info")
def _server_info(_call: Call) -> dict[str, Any]:
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
        raise invalid("The path of an artifact must name a file.")
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

    def find(connection: Connection) -> list[dict[str, Any]]:
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
    raise MlflowError("NOT_IMPLEMENTED", _NO_PARTS)


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
        raise invalid("The body of a call must be a JSON object.")
    return found | sent


async def _answer(
    master: Master, identity: AccessIdentity, found: Endpoint, given: Fields
) -> bytes:
    def answer(connection: Connection, transaction: Transaction | None = None) -> bytes:
        call = Call(given=given, identity=identity, connection=connection, transaction=transaction,
                    runs=master.logged_runs)  # fmt: skip
        return json.dumps(found.answer(call), separators=(",", ":")).encode()

    if found.writes:
        return await write_rows(master, lambda writer: answer(writer.connection, writer))
    return await asyncio.to_thread(_read, master, answer)


def _read(master: Master, job: Callable[[Connection], Result]) -> Result:
    with master.database.read() as connection:
        return job(connection)
