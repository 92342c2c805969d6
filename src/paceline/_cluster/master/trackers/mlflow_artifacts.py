"""Artifacts of MLflow's runs: files of a run, sent and fetched through the master."""

import mimetypes
import re
from typing import Any, NamedTuple
from urllib.parse import unquote

from sqlalchemy import Connection, Row, delete

from paceline._base.journal_records import MediaFile, MediaReported
from paceline._base.run_directory import check_file_path
from paceline._cluster.master.experiments.logged_runs import LoggedRuns
from paceline._cluster.master.experiments.unmanaged_runs import (
    experiment_of_run,
    trial_of_run,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.run_files import get_file, list_files, put_file
from paceline._cluster.master.trackers.mlflow_calls import (
    Call,
    MlflowError,
    endpoint,
    invalid,
    missing,
)
from paceline._cluster.master.trackers.mlflow_experiments import now_ms
from paceline._cluster.master.trackers.mlflow_metrics import TRAINING_GROUP
from paceline._cluster.master.trackers.mlflow_models import find_model
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


def find_place(connection: Connection, artifact: str) -> FilePlace:
    """Return where an artifact of `mlflow-artifacts:` lies.

    Raises:
        MlflowError: The path is none of ours, or could lead out of the run's files.
    """
    for text in (artifact, unquote(artifact)):
        try:
            check_file_path(text.rstrip("/"))
        except ValueError as error:
            raise invalid(f"Invalid path: {error}") from error
    of_model = _OF_MODEL.fullmatch(artifact)
    if of_model is not None:
        run_id = find_model(connection, of_model["model"]).content["files_run_id"]
        path = f"{MODELS}/{of_model['model']}/{of_model['path'] or ''}"
    else:
        of_run = _OF_RUN.fullmatch(artifact)
        if of_run is None:
            raise invalid(
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


def find_file(connection: Connection, artifact: str) -> Row[Any]:
    """Return the row of an artifact.

    Raises:
        MlflowError: There is no such file.
    """
    place = find_place(connection, artifact)
    row = get_file(connection, trial_of_place(place, connection).id, place.path)
    if row is None:
        raise missing(f"No such artifact: {place.path[:300]!r}")
    return row


def delete_files(connection: Connection, artifact: str) -> None:
    """Delete an artifact: a file, or a directory with all its files."""
    place, files = find_place(connection, artifact), tables.run_files
    prefix = f"{place.path}/" if place.path else ""
    is_chosen = (files.c.path >= prefix) & (files.c.path < prefix + _BEYOND)
    if place.path:
        is_chosen |= files.c.path == place.path
    trial_id = trial_of_place(place, connection).id
    connection.execute(delete(files).where(files.c.trial_id == trial_id, is_chosen))


@endpoint("GET", "logged-models/{model_id}/artifacts/directories")
def _list_of_model(call: Call) -> dict[str, Any]:
    model = find_model(call.connection, call.given.text("model_id"))
    root = f"{MODELS}/{model.name}"
    path = _checked(call.given.text_or_none("artifact_directory_path") or "")
    place = FilePlace(model.content["files_run_id"], f"{root}/{path}".rstrip("/"))
    files = list_directory(call.connection, place, root=f"{root}/")
    return {"root_uri": model.content["artifact_uri"], "files": files}


@endpoint("GET", "artifacts/list")
def _list_of_run(call: Call) -> dict[str, Any]:
    run = find_run(call.connection, call.run_id())
    root = run.content["artifact_uri"]
    if not root.startswith("mlflow-artifacts:"):
        raise MlflowError(
            "NOT_IMPLEMENTED",
            f"The artifacts of run {run.name} lie at {root}, where Paceline does not look.",
        )
    path = _checked(call.given.text_or_none("path") or "")
    files = list_directory(call.connection, FilePlace(run.name, path))
    return {"root_uri": root, "files": files}


def list_directory(
    connection: Connection, place: FilePlace, *, root: str = ""
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
            raise invalid(f"Invalid path: {error}") from error
    return path


def trial_of_place(place: FilePlace, connection: Connection) -> Row[Any]:
    """Return the trial whose files are there."""
    experiment = experiment_of_run(connection, place.run_id)
    if experiment is None:
        raise missing(f"Run with id={place.run_id[:200]} not found")
    return trial_of_run(connection, experiment.id)
