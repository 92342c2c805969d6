"""Runs of W&B's clients: their documents, and what their file streams bring."""

import hashlib
import json
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, func, select

from paceline._base.journal_records import AnyRecord, MediaReported
from paceline._cluster.master.api.requests_and_answers import ApiError
from paceline._cluster.master.api.route_scopes import RouteScope
from paceline._cluster.master.experiments.logged_runs import (
    LoggedRun,
    change_document,
    get_document,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError
from paceline._cluster.master.trackers.wandb_history import (
    MAX_KEYS,
    keys_of,
    parse_json,
    records_of_line,
    step_of,
    system_record,
    time_of,
)
from paceline._cluster.messages.runner_messages import LogEntry
from paceline._cluster.messages.states import AttemptState

ENTITY = "paceline"
"""The entity of a client that names none: all people here share it."""
RUN, PROJECT = "wandb-run", "wandb-project"
# W&B's own server calls a run crashed after five minutes; clients are heard every 30 seconds.
_LEASE_S = 300.0
_MAX_CONFIG = 2 * 1024 * 1024
_MAX_SUMMARY = 8 * 1024 * 1024
_MAX_LINE = 64 * 1024
_NAME = re.compile(r"[^/\\#?%:\x00-\x1f\x7f]{1,128}")
_LOG_LINE = re.compile(r"(ERROR )?(\d{4}-\d\d-\d\dT[\d:.]+) ?(.*)", re.DOTALL)
HISTORY, EVENTS = "wandb-history.jsonl", "wandb-events.jsonl"
_SUMMARY, _OUTPUT = "wandb-summary.json", "output.log"


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
        scope: The scope of the sender's token.
        user: The name of the sender's token.
        base_url: The URL by which the client reached the master.
    """

    master: Master
    connection: Connection
    transaction: Transaction | None
    scope: RouteScope
    user: str
    base_url: str

    @cached_property
    def writer(self) -> Transaction:
        """The transaction to write in.

        Raises:
            ApiError: The sender's token may not write.
        """
        if self.scope is RouteScope.READ:
            detail = (
                "The token must have the scope 'report' or 'submit' to log, but"
                f" {self.user!r} has 'read'. Hint: `paceline token create NAME --scope report`."
            )
            raise ApiError(403, "scope_too_low", detail)
        if self.transaction is None:
            raise GraphqlError("A query must not change anything. Hint: send a mutation.")
        return self.transaction

    def check_may_list(self) -> None:
        """Refuse a token that may read only what it names.

        Raises:
            ApiError: The sender has such a token.
        """
        if self.scope is RouteScope.REPORT:
            detail = (
                "The token must have the scope 'read' to list runs and to read artifacts, but"
                f" {self.user!r} has 'report'. Hint: `paceline token create NAME --scope submit`"
                " makes one that logs as well."
            )
            raise ApiError(403, "scope_too_low", detail)

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


def state_of(attempt: Row[Any] | None) -> str:
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
        document = {"run_id": _new_run_id(), "displayName": display}
        document |= {"config": {}, "summary": {}, "lines": {}, "step": -1, "user": asked.user}
        document |= {"created": time.time(), "tags": []}
        upsert_project(asked, place.entity, place.project)
    _change(document, given)
    if is_new:
        _open(asked, place, document)
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


def _new_run_id() -> str:
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
        ("summaryMetrics", "summary", _MAX_SUMMARY),
    ):
        if isinstance(given.get(name), str):
            document[own] = _object(name, given[name], limit)


def _object(name: str, text: str, limit: int) -> dict[str, Any]:
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
    return [*document["tags"], *(f"{word}:{text}" for word, text in words.items() if text)]


def _open(asked: Asked, place: RunPlace, document: Mapping[str, Any]) -> None:
    asked.master.logged_runs.open(
        asked.writer,
        document["run_id"],
        name=document["displayName"],
        project=place.project,
        tags=_labels(document),
        hparams=config_values(document),
        host=document.get("host") or "",
        lease_s=_LEASE_S,
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


def store_run(asked: Asked, place: RunPlace, document: dict[str, Any]) -> None:
    """Store the document of a run."""
    connection, experiment_id = asked.connection, asked.run(document).experiment_id
    change_document(
        connection, RUN, place.parent, place.name, lambda _: document, experiment_id=experiment_id
    )


def forget_run(asked: Asked, place: RunPlace) -> None:
    """Delete the document of a run: a later run of this name is another one."""
    change_document(asked.connection, RUN, place.parent, place.name, lambda _: None)


# ---- file streams ------------------------------------------------------------------------------


class StreamChunk(msgspec.Struct):
    """Lines of a file from an offset on."""

    offset: int = 0
    content: list[str] | str = []


class StreamRequest(msgspec.Struct):
    """Body of a request to a run's file stream."""

    files: dict[str, StreamChunk] = {}
    complete: bool | None = None
    exitcode: int | None = None
    preempting: bool | None = None


def take_stream(asked: Asked, place: RunPlace, request: StreamRequest) -> None:
    """Store what a request brings, and nothing twice.

    A client sends a request again if the answer was lost, and `wandb sync` sends a whole run again:
    lines before the number of stored lines are left out then. A client that begins a run's history
    anew, which is another run with the same name, gets an experiment of its own.

    Raises:
        NotFoundError: There is no such run.
    """
    transaction = asked.writer
    document, _ = asked.known_run(place)
    document["preempting"] = bool(request.preempting or document.get("preempting"))
    history = _lines(request, HISTORY)
    if history and _begins_anew(document, history[0]):
        asked.master.logged_runs.finish(transaction, document["run_id"], "completed")
        document["run_id"] = _new_run_id()
        document |= {"lines": {}, "step": -1, "created": time.time()}
        for name in ("began", "first_step", "system_step", "tail", "events_tail"):
            document.pop(name, None)
        forget_run(asked, place)
        _open(asked, place, document)
    fresh = _fresh(document, HISTORY, request)
    events = _fresh(document, EVENTS, request)
    output = _fresh_output(document, request)
    is_over = asked.run(document).attempt.outcome is not None
    if is_over and (fresh or events or output):
        _open(asked, place, document)
        is_over = False
    summary = _lines(request, _SUMMARY)
    if summary:
        document["summary"] = _object("summary", summary[-1], _MAX_SUMMARY)
    run = asked.run(document)
    records = _records(document, fresh, events)
    records, num_lost = _bounded(asked, run, records)
    if output:
        entries = _entries(document, output)
        last = asked.master.logs.append(run.trial.id, run.attempt.number, entries)
        transaction.emit("logs", run.experiment_id, run.trial.id, last=last)
    if num_lost:
        text = f"{num_lost} values are left out: a run has at most {MAX_KEYS:,} names of metrics."
        asked.master.changes.note(transaction, run.trial.id, run.attempt.number, "WARNING", text)
    if not is_over:
        asked.master.logged_runs.append(transaction, run.run_id, records, lease_s=_LEASE_S)
        if request.complete:
            _finish(asked, run, request, document)
    store_run(asked, place, document)


def _finish(
    asked: Asked, run: LoggedRun, request: StreamRequest, document: Mapping[str, Any]
) -> None:
    code = request.exitcode or 0
    error = f"The script ended with the exit code {code}." if code else None
    outcome = "error" if code else "completed"
    if code and document.get("preempting"):
        outcome, error = "preempted", None
    asked.master.logged_runs.finish(asked.writer, run.run_id, outcome, error)


def _lines(request: StreamRequest, name: str) -> list[str]:
    chunk = request.files.get(name)
    if chunk is None:
        return []
    return [chunk.content] if isinstance(chunk.content, str) else chunk.content


def _mark(line: str) -> str:
    # A client that sends a line once more may have its names in another order.
    content = json.dumps(_parsed(line), sort_keys=True) if line.startswith("{") else line
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()[:16]


def _begins_anew(document: Mapping[str, Any], line: str) -> bool:
    """Return whether a line is the first one of another run of this name.

    A resumed run has later steps; a run that is sent again begins with the same line.
    """
    known = document["lines"].get(HISTORY)
    if known is None or known["first"] == _mark(line):
        return False
    return step_of(_parsed(line), -1) == document.get("first_step")


def _fresh(document: dict[str, Any], name: str, request: StreamRequest) -> list[str]:
    """Return the lines that are not stored yet, and count them."""
    lines = _lines(request, name)
    if not lines:
        return []
    offset, mark = request.files[name].offset, _mark(lines[0])
    known = document["lines"].setdefault(name, {"count": 0, "first": mark, "starts": {}})
    count, again, shift = known["count"], known.get("again"), 0
    is_known = known["starts"].get(str(offset)) == mark
    if mark == known["first"]:
        # A whole run is sent once more, from whatever offset its client began with.
        again = {"shift": offset, "next": offset, "last": None}
    if again is not None and (offset == again["next"] or again["last"] == [offset, mark]):
        is_known, shift = True, again["shift"]
        known["again"] = again | {"next": offset + len(lines), "last": [offset, mark]}
    start = offset - shift
    # Two clients that resume one run count the lines each for itself: all are taken.
    fresh = lines[max(count - start, 0) :] if is_known else lines
    if fresh:
        known["count"] = max(count, start + len(lines))
        known["starts"] = dict([*known["starts"].items(), (str(offset), mark)][-8:])
    return fresh


def _fresh_output(document: dict[str, Any], request: StreamRequest) -> list[str]:
    """Return lines of output; a client sends one again with another text, as progress bars do."""
    lines = _lines(request, _OUTPUT)
    if not lines:
        return []
    offset = request.files[_OUTPUT].offset
    known = document["lines"].setdefault(_OUTPUT, {"count": 0, "next": 0, "last": []})
    mark = f"{offset} {_mark(chr(10).join(lines))}"
    if mark in known["last"]:
        return []
    known["last"] = [*known["last"], mark][-8:]
    known["count"] = max(known["count"], offset + len(lines))
    return lines


def _entries(document: dict[str, Any], lines: Iterable[str]) -> list[LogEntry]:
    known, entries = document["lines"][_OUTPUT], []
    for line in lines:
        found = _LOG_LINE.fullmatch(line.rstrip("\r\n"))
        is_error = found is not None and found[1] is not None
        text = line.rstrip("\r\n") if found is None else found[3]
        text = text.encode(errors="replace").decode()[:_MAX_LINE]
        stream = "stderr" if is_error else "stdout"
        entries.append(LogEntry(known["next"], time.time(), 0, stream, None, text))
        known["next"] += 1
    return entries


def _records(
    document: dict[str, Any], history: Iterable[str], events: Iterable[str]
) -> list[AnyRecord]:
    records: list[AnyRecord] = []
    for text in history:
        line = _parsed(text)
        step, at = step_of(line, document["step"] + 1), time_of(line, time.time())
        if "began" not in document:
            runtime = line.get("_runtime")
            document["first_step"] = step
            document["began"] = at - runtime if isinstance(runtime, (int, float)) else at
        document["step"] = max(document["step"], step)
        document["tail"] = {key: line[key] for key in line if key in ("_step", "_runtime")}
        records += records_of_line(line, step, at)
    for text in events:
        line = _parsed(text)
        if "_runtime" in line:
            document["events_tail"] = {"_runtime": line["_runtime"]}
        # A row belongs to the newest step, so there is one per step, as with our own.
        step = max(document["step"], 0)
        if step > document.get("system_step", -1):
            record = system_record(line, step, time_of(line, time.time()))
            if record is not None:
                records.append(record)
                document["system_step"] = step
    return records


def _parsed(text: str) -> dict[str, Any]:
    """Return a line; one that is no object has nothing that could be stored."""
    try:
        line = parse_json(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _bounded(asked: Asked, run: LoggedRun, records: list[AnyRecord]) -> tuple[list[AnyRecord], int]:
    """Return the records without names beyond `MAX_KEYS`, and the number of values left out."""
    names = tables.metric_names.c
    where = names.experiment_id == run.experiment_id
    new = {key for record in records for key in keys_of(record)}
    count = asked.connection.scalar(select(func.count()).select_from(names.key.table).where(where))
    if (count or 0) + len(new) <= MAX_KEYS:
        return records, 0
    known = set(asked.connection.execute(select(names.key).where(where)).scalars())
    allowed = known | set(sorted(new - known)[: max(MAX_KEYS - len(known), 0)])
    kept: list[AnyRecord] = []
    num_lost = 0
    for record in records:
        if isinstance(record, MediaReported):
            num_lost += record.name not in allowed
            kept += [record] if record.name in allowed else []
            continue
        metrics = getattr(record, "metrics", {})
        chosen = {key: value for key, value in metrics.items() if key in allowed}
        num_lost += len(metrics) - len(chosen)
        if chosen:
            kept.append(msgspec.structs.replace(record, metrics=chosen))
    return kept, num_lost


def shown_json(value: Any) -> str:
    """Return a value as the JSON text that clients want."""
    return json.dumps(value)
