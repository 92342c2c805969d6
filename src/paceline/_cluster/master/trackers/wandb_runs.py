"""Runs of W&B's clients: their documents, files and output, and URLs to read and write these."""

import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property, partial
from posixpath import normpath
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import sqlalchemy as sa

from paceline._base.run_directory import check_file_path
from paceline._cluster.master.api.access_guard import AccessIdentity, check_tracker_rights
from paceline._cluster.master.experiments.logged_runs import (
    LoggedRun,
    change_document,
    get_document,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_summaries import XAxes
from paceline._cluster.master.store.reach import check_object
from paceline._cluster.master.store.run_files import get_file, list_files
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError, page
from paceline._cluster.master.trackers.wandb_values import parse_json
from paceline._cluster.messages.states import AttemptState
from paceline.importers._run_writer import GROUP

ENTITY = "paceline"
"""The entity of a client that names none: all people here share it."""
RUN, PROJECT = "wandb-run", "wandb-project"
# W&B's own server calls a run crashed after five minutes; clients are heard every 30 seconds.
LEASE_S = 300.0
_MAX_CONFIG = 2 * 1024 * 1024
_MAX_GLOBS = 100
MAX_SUMMARY = 8 * 1024 * 1024
_NAME = re.compile(r"[^/\\#?%:\x00-\x1f\x7f]{1,128}")


def encode_id(kind: str, *parts: str) -> str:
    """Return an id as W&B's clients expect it: base64."""
    return b64encode(":".join([kind, *parts]).encode()).decode()


def decode_id(text: Any, kind: str) -> list[str]:
    """Return the parts of an id.

    Raises:
        GraphqlError: It is none of this kind.
    """
    try:
        found, *parts = b64decode(str(text), validate=True).decode().split(":")
    except ValueError:
        found, parts = "", []
    if found != kind:
        raise GraphqlError(f"There is no {kind} with the id {text!r:.200}.")
    return parts


class RunPlace(NamedTuple):
    """Entity, project and name of a run: what its client calls its path."""

    entity: str
    project: str
    name: str

    @property
    def parent(self) -> str:
        """The project with its entity."""
        return f"{self.entity}/{self.project}"

    @property
    def id(self) -> str:
        """The id for clients."""
        return encode_id("Run", "v1", self.name, self.project, self.entity)

    @classmethod
    def from_id(cls, text: Any) -> "RunPlace":
        """Return the place of the run with an id."""
        parts = decode_id(text, "Run")
        if len(parts) != 4:
            raise GraphqlError(f"There is no Run with the id {text!r:.200}.")
        return checked_place(parts[3], parts[2], parts[1])


def checked_name(value: Any, default: str) -> str:
    """Return a name of an entity, a project, a run or a collection.

    Raises:
        GraphqlError: It has characters that would make its path ambiguous.
    """
    name = default if value in (None, "") else value
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GraphqlError(
            "A name must have 1 to 128 characters, without `/ \\ # ? % :` and control characters,"
            f" but got {name!r:.200}."
        )
    return name


def checked_place(entity: Any, project: Any, name: Any) -> RunPlace:
    """Return the place of a run, once its names are checked."""
    return RunPlace(
        checked_name(entity, ENTITY),
        checked_name(project, "uncategorized"),
        checked_name(name, secrets.token_hex(4)),
    )


@dataclass(kw_only=True)
class Asked:
    """Request of a client: who asks, and where it reads and writes.

    Attributes:
        master: The master.
        connection: Where to read.
        transaction: Where to write, None for a request that only reads.
        identity: The sender.
        base_url: The URL by which the client reached the master.
    """

    master: Master
    connection: sa.Connection
    transaction: Transaction | None
    identity: AccessIdentity | None
    base_url: str

    @property
    def user(self) -> str:
        """The name of the sender's token."""
        return "" if self.identity is None else self.identity.user

    @cached_property
    def writer(self) -> Transaction:
        """The transaction to write in.

        Raises:
            ApiError: The sender's token may not write.
        """
        check_tracker_rights(self.identity, writes=True)
        if self.transaction is None:
            raise GraphqlError("A query must not change anything. Hint: send a mutation.")
        return self.transaction

    def check_may_list(self) -> None:
        """Refuse a token that may read only what it names.

        Raises:
            ApiError: The sender has such a token.
        """
        check_tracker_rights(self.identity, lists=True)

    def document(self, place: RunPlace) -> dict[str, Any] | None:
        """Return the document of a run, None if there is no such run."""
        found: dict[str, Any] | None = get_document(self.connection, RUN, place.parent, place.name)
        return found

    def run(self, document: Mapping[str, Any]) -> LoggedRun:
        """Return the rows of a run."""
        return self.master.logged_runs.get(self.connection, document["run_id"])

    def known_run(self, place: RunPlace) -> tuple[dict[str, Any], LoggedRun]:
        """Return the document and the rows of a run.

        Raises:
            NotFoundError: There is no such run.
        """
        document = self.document(place)
        if document is None:
            raise NotFoundError(f"There is no run {'/'.join(place)!r}.")
        return document, self.run(document)


def state_of(attempt: sa.Row[Any] | None) -> str:
    """Return W&B's word for the state of a run."""
    if attempt is None:
        return "running"
    if attempt.outcome is None:
        return "crashed" if attempt.state == AttemptState.ENDED.value else "running"
    return {"completed": "finished", "preempted": "preempted"}.get(attempt.outcome, "failed")


def upsert_run(asked: Asked, given: Mapping[str, Any]) -> tuple[RunPlace, bool]:
    """Create a run, or change what its client says of it; return whether it is new."""
    is_by_id = given.get("id") is not None
    if is_by_id:
        place = RunPlace.from_id(given["id"])
    else:
        place = checked_place(given.get("entityName"), given.get("modelName"), given.get("name"))
    asked.writer  # noqa: B018 - refuses tokens that only read
    document = asked.document(place)
    is_new = document is None
    if document is None:
        if is_by_id and given.get("name") is None:
            raise NotFoundError(f"There is no run {'/'.join(place)!r}.")
        display = given.get("displayName") or place.name
        document = {"run_id": new_run_id(), "displayName": display}
        document |= {"config": {}, "summary": {}, "lines": {}, "step": -1, "user": asked.user}
        document |= {"created": time.time(), "tags": []}
        upsert_project(asked, place.entity, place.project)
    _change(document, given)
    if is_new:
        open_run(asked, place, document)
    elif is_by_id or asked.run(document).attempt.outcome is None:
        _tell(asked, place, document)
    store_run(asked, place, document)
    return place, is_new


def upsert_project(asked: Asked, entity: str, project: str, **changed: Any) -> dict[str, Any]:
    """Return the document of a project, which is made if it is not there."""
    base = {"created": time.time(), "description": None}

    def change(before: Any) -> Any:
        return {**base, **(before or {}), **changed}

    connection = asked.writer.connection
    found: dict[str, Any] = change_document(connection, PROJECT, entity, project, change)
    return found


def new_run_id() -> str:
    """Return an id for an experiment that no other client can have."""
    return f"wandb-{secrets.token_hex(16)}"


def _change(document: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Take over what is given of a run."""
    names = {"groupName": "group", "jobType": "jobType", "notes": "notes", "commit": "commit"}
    names |= {"displayName": "displayName", "host": "host", "jobProgram": "program"}
    names |= {"description": "description", "sweep": "sweep"}
    for name, own in names.items():
        if isinstance(given.get(name), str):
            document[own] = str(given[name]).encode(errors="replace").decode()[:4096]
    if isinstance(given.get("tags"), list):
        tags = [str(tag)[:200] for tag in given["tags"][:1000]]
        document["tags"] = list(dict.fromkeys(tags))
    for name, own, limit in (
        ("config", "config", _MAX_CONFIG),
        ("summaryMetrics", "summary", MAX_SUMMARY),
    ):
        if isinstance(given.get(name), str):
            document[own] = json_object(name, given[name], limit)
            if own == "config":
                document["x_axes"] = _x_axes(document["config"])


def _x_axes(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return which step metrics `define_metric` has named, None if it was not called.

    A client says so in its part of the config: an entry has a name (1) or a name that ends with
    `*` (2), and the name (4) or the place, from 1 on, (5) of the entry of its step metric.
    """
    own = config.get("_wandb")
    value = own.get("value") if isinstance(own, dict) else None
    given = value.get("m") if isinstance(value, dict) else None
    entries = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    axes = XAxes(group=GROUP)
    for entry in entries:
        place, step = entry.get("5"), entry.get("4")
        if isinstance(place, int) and 0 < place <= len(entries):
            step = entries[place - 1].get("1")
        step = step if isinstance(step, str) and step else None
        name, pattern = entry.get("1"), entry.get("2")
        # Step metrics have entries as well, which nobody defined (3).
        if isinstance(name, str) and (step is not None or entry.get("6") == [3]):
            axes.names[name] = step
        elif isinstance(pattern, str) and pattern.endswith("*") and len(axes.prefixes) < _MAX_GLOBS:
            axes.prefixes[pattern[:-1]] = step
    found: dict[str, Any] = msgspec.to_builtins(axes)
    return found if axes.names or axes.prefixes else None


def json_object(name: str, text: str, limit: int) -> dict[str, Any]:
    """Return the object in a JSON text.

    Raises:
        GraphqlError: It is none, or too long.
    """
    if len(text) > limit:
        raise GraphqlError(f"`{name}` must have at most {limit:,} bytes, but has {len(text):,}.")
    try:
        value = parse_json(text or "{}")
    except ValueError as error:
        raise GraphqlError(f"`{name}` must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise GraphqlError(f"`{name}` must be a JSON object, but got {text!r:.100}.")
    return value


def config_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run, without W&B's own part."""
    return {
        key: item["value"] if isinstance(item, dict) and "value" in item else item
        for key, item in document["config"].items()
        if key != "_wandb"
    }


def _labels(document: Mapping[str, Any]) -> list[str]:
    words = {"group": document.get("group"), "job": document.get("jobType")}
    words["sweep"] = document.get("sweep")
    return [*document["tags"], *(f"{word}:{text}" for word, text in words.items() if text)]


def open_run(asked: Asked, place: RunPlace, document: Mapping[str, Any]) -> None:
    """Begin an attempt of a run, and say what its client says of it."""
    asked.master.logged_runs.open(
        asked.writer,
        document["run_id"],
        name=document["displayName"],
        project=place.project,
        tags=_labels(document),
        hparams=config_values(document),
        host=document.get("host") or "",
        lease_s=LEASE_S,
        within=(PROJECT, place.entity, place.project),
    )
    _tell(asked, place, document)


def _tell(asked: Asked, place: RunPlace, document: Mapping[str, Any]) -> None:
    runs, run_id = asked.master.logged_runs, document["run_id"]
    runs.relabel(
        asked.writer,
        run_id,
        name=document["displayName"],
        project=place.project,
        tags=_labels(document),
        notes=document.get("notes"),
    )
    runs.set_hparams(asked.writer, run_id, config_values(document))


def store_run(
    asked: Asked, place: RunPlace, document: dict[str, Any], run: LoggedRun | None = None
) -> None:
    """Store the document of a run, whose rows may be at hand."""
    experiment_id = (run or asked.run(document)).experiment_id
    change_document(
        asked.connection, RUN, place.parent, place.name, lambda _: document,
        experiment_id=experiment_id,
    )  # fmt: skip


def forget_run(asked: Asked, place: RunPlace) -> None:
    """Delete the document of a run: a later run of this name is another one."""
    change_document(asked.connection, RUN, place.parent, place.name, lambda _: None)


OWN_PATHS = ("artifacts/", "artifact-uploads/", "artifact-manifests/")
"""Where files of artifacts lie, beside those that a run saves."""
_MAX_ROWS = 10_000
_MAX_FILES = 10_000
Fields = dict[str, Any]


def iso_time(seconds: float) -> str:
    """Return a time as W&B writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def stored_path(name: str) -> str:
    """Return where a file that a run saves is stored.

    Raises:
        GraphqlError: The name could lead out of the run's files.
    """
    try:
        path = check_file_path(name)
    except ValueError as error:
        raise GraphqlError(str(error)) from error
    return f"saved/{path}" if path.startswith(OWN_PATHS) else path


def signed_url(asked: Asked, method: str, trial_id: int, path: str) -> str:
    """Return the URL by which a client that sends no token writes or reads a file of a run.

    Raises:
        NotAllowedError: The sender may not write to the run.
    """
    # Nothing that comes by the URL says who sends it.
    check_object(asked.connection, "trial_id", trial_id, changes=method != "GET")
    target = f"/wandb-files/{trial_id}/{path}"
    query = asked.master.signed_urls.sign(method, target)
    return f"{asked.base_url}{quote(target)}?{query}"


def file_view(asked: Asked, row: sa.Row[Any], name: str | None = None) -> Fields:
    """Return the fields of a file; `name` differs from its path if it belongs to an artifact."""
    url = signed_url(asked, "GET", row.trial_id, row.path)
    shown = row.path if name is None else name
    return {
        "__typename": "File",
        "id": encode_id("File", str(row.trial_id), row.path),
        "name": shown,
        "displayName": shown,
        "url": url,
        "directUrl": url,
        "sizeBytes": row.size,
        "storagePath": row.path,
        "mimetype": row.media_type,
        "updatedAt": iso_time(row.created_at),
        "digest": row.digest,
        "md5": "",
    }


def file_rows(asked: Asked, trial_id: int, arguments: Mapping[str, Any]) -> list[sa.Row[Any]]:
    """Return rows of the files of a run that have certain names, or fit a pattern."""
    names = [normpath(name) for name in arguments.get("names") or () if isinstance(name, str)]
    if names:
        found = (get_file(asked.connection, trial_id, name) for name in names[:_MAX_FILES])
        return [row for row in found if row is not None]
    rows = list_files(asked.connection, trial_id, limit=_MAX_FILES)
    pattern = arguments.get("pattern")
    if isinstance(pattern, str) and pattern:
        parts = pattern.split("%")
        rows = [row for row in rows if _is_like(row.path, parts)]
    return [row for row in rows if not row.path.startswith(OWN_PATHS)]


def _is_like(path: str, parts: list[str]) -> bool:
    """Return whether a path has the parts of a pattern between its `%` one after another."""
    if len(parts) == 1:
        return path == parts[0]
    if not path.startswith(parts[0]) or not path[len(parts[0]) :].endswith(parts[-1]):
        return False
    place, end = len(parts[0]), len(path) - len(parts[-1])
    for part in parts[1:-1]:
        found = path.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


def files_page(asked: Asked, trial_id: int, arguments: Mapping[str, Any]) -> Fields:
    """Return a page of the files of a run."""
    names = [name for name in arguments.get("names") or () if isinstance(name, str)]
    rows = file_rows(asked, trial_id, arguments)
    found = page(rows, arguments, partial(file_view, asked))
    if arguments.get("upload") or (names and not rows):
        missing = set(names) - {row.path for row in rows}
        found["edges"] += [{"node": _missing_file(asked, trial_id, each)} for each in missing]
    return found


def _missing_file(asked: Asked, trial_id: int, name: str) -> Fields:
    fields = dict.fromkeys(("directUrl", "mimetype", "updatedAt", "digest", "md5"))
    return fields | {
        "__typename": "File",
        "id": encode_id("File", str(trial_id), name),
        "name": name,
        "url": None,
        "sizeBytes": "0",
    }


def log_lines(asked: Asked, trial_id: int, arguments: Mapping[str, Any]) -> Fields:
    """Return a page of the output of a run."""
    last = arguments.get("last")
    if isinstance(last, int) and last > 0:
        lines = asked.master.logs.tail(trial_id, min(last, _MAX_ROWS))
    else:
        lines = asked.master.logs.read(trial_id, limit=_MAX_ROWS)

    def show(line: Any) -> Fields:
        level = "error" if line.stream == "stderr" else "info"
        shown = {"number": line.id, "timestamp": iso_time(line.time), "level": level}
        return shown | {"label": "", "line": line.text}

    return page([*lines], arguments, show, default=_MAX_ROWS)
