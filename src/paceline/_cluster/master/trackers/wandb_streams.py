"""File streams of W&B's clients: history and back, system metrics, output, summary, end."""

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._base.journal_records import AnyRecord, MediaReported, MetricsReported, decode_value
from paceline._base.terminal_text import split_colors
from paceline._cluster.master.experiments.logged_runs import LoggedRun
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.metric_rows import read_rows
from paceline._cluster.master.store.reach import check_object
from paceline._cluster.master.store.series_reader import visible_series_limits
from paceline._cluster.master.trackers import wandb_runs
from paceline._cluster.master.trackers.wandb_values import (
    MAX_INTEGER,
    parse_json,
    records_of_line,
    step_of,
    storable,
    system_record,
    time_of,
)
from paceline._cluster.messages.runner_messages import LogEntry
from paceline.importers._run_writer import GROUP

MAX_KEYS = 10_000
"""Most metrics and media of a run; further ones are left out, and its log says so."""


def keys_of(record: AnyRecord) -> Collection[str]:
    """Return the names of metrics or media in a record."""
    if isinstance(record, MetricsReported):
        return record.metrics
    return [record.name] if isinstance(record, MediaReported) else []


def read_history(
    connection: sa.Connection,
    trial_id: int,
    began: float,
    *,
    group: str = GROUP,
    first_step: int = 0,
    last_step: int | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return rows of a run as its client logged them, the steps from first to last included."""
    rows: dict[int, dict[str, Any]] = {}
    prefix = "" if group == GROUP else "system."
    span = None if last_step is None else max(last_step - first_step + 1, 0)
    most = min((each for each in (span, limit) if each is not None), default=None)
    for row in read_rows(connection, trial_id, group, after_step=first_step - 1, limit=most):
        if last_step is None or row.step <= last_step:
            facts = {"_step": row.step, "_timestamp": row.time, "_runtime": row.time - began}
            values = {f"{prefix}{key}": _shown(value) for key, value in row.metrics.items()}
            rows[row.step] = values | (facts if group == GROUP else facts | {"_wandb": True})
    if group == GROUP:
        for medium in _read_media(connection, trial_id, first_step, last_step):
            at = medium.steps_completed
            facts = {"_step": at, "_timestamp": medium.time, "_runtime": medium.time - began}
            rows.setdefault(at, facts)[medium.name] = _shown_media(medium)
    return [rows[step] for step in sorted(rows)][:limit]


def history_keys(connection: sa.Connection, trial_id: int) -> dict[str, Any]:
    """Return what W&B calls the keys of a run: the metrics with their last values."""
    series, media = tables.series.c, tables.media.c
    columns = (series.key, series.num_points, series.num_numbers, series.last)
    where = (series.trial_id == trial_id, series.group == GROUP)
    query = sa.select(*columns, series.last_step).where(*where).order_by(series.attempt)
    keys: dict[str, Any] = {}
    newest = -1
    for row in connection.execute(query):
        kind = "number" if row.num_numbers else "string"
        keys[row.key] = _key_facts(kind, row.num_points, _shown(decode_value(row.last)))
        newest = max(newest, row.last_step)
    shown = (media.name, media.kind, media.steps_completed)
    chosen = sa.select(*shown).where(media.trial_id == trial_id, media.group == GROUP)
    for name, kind, step in connection.execute(chosen.distinct()):
        keys[name] = _key_facts(kind, 1, None)
        newest = max(newest, step)
    return {"sets": [], "keys": keys, "lastStep": newest}


def _key_facts(kind: str, count: int, last: Any) -> dict[str, Any]:
    types = [{"type": kind, "count": count}]
    return {"typeCounts": types, "monotonic": False, "previousValue": last}


def _read_media(
    connection: sa.Connection, trial_id: int, first_step: int, last_step: int | None
) -> Iterator[Any]:
    media, limits = tables.media.c, visible_series_limits(connection, trial_id)
    query = sa.select(tables.media).where(
        media.trial_id == trial_id,
        media.group == GROUP,
        media.steps_completed >= first_step,
        media.steps_completed <= (MAX_INTEGER if last_step is None else last_step),
    )
    for row in connection.execute(query.order_by(media.id)):
        highest = limits.get(row.attempt)
        if highest is None or row.steps_completed <= highest:
            yield row


def _shown(value: Any) -> Any:
    """Return a stored value as JSON that W&B's clients read: NaN and infinities as texts."""
    return storable(decode_value(value))


def _shown_media(row: Any) -> Any:
    value = _shown(row.value)
    if row.kind == "histogram" and isinstance(value, dict):
        return {"_type": "histogram", "bins": value["bins"], "values": value["counts"]}
    return value


_MAX_LINE = 64 * 1024
_LOG_LINE = re.compile(r"(ERROR )?(\d{4}-\d\d-\d\dT[\d:.]+) ?(.*)", re.DOTALL)
HISTORY, EVENTS = "wandb-history.jsonl", "wandb-events.jsonl"
_SUMMARY, _OUTPUT = "wandb-summary.json", "output.log"


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


def take_stream(
    asked: wandb_runs.Asked, place: wandb_runs.RunPlace, request: StreamRequest
) -> None:
    """Store what a request brings, and nothing twice.

    A client sends a request again if the answer was lost, and `wandb sync` sends a whole run again:
    lines before the number of stored lines are left out then. A client that begins a run's history
    anew, which is another run with the same name, gets an experiment of its own.

    Raises:
        NotFoundError: There is no such run.
    """
    transaction = asked.writer
    document, run = asked.known_run(place)
    # Output goes into files, from which nothing is taken back.
    check_object(asked.connection, "experiment_id", run.experiment_id, changes=True)
    document["preempting"] = bool(request.preempting or document.get("preempting"))
    history = _lines(request, HISTORY)
    if history and _begins_anew(document, history[0]):
        asked.master.logged_runs.finish(transaction, document["run_id"], "completed")
        document["run_id"] = wandb_runs.new_run_id()
        document |= {"lines": {}, "step": -1, "created": time.time()}
        for name in ("began", "first_step", "system_step", "tail", "events_tail"):
            document.pop(name, None)
        wandb_runs.forget_run(asked, place)
        wandb_runs.open_run(asked, place, document)
        run = asked.run(document)
    fresh = _fresh(document, HISTORY, request)
    events = _fresh(document, EVENTS, request)
    output = _fresh_output(document, request)
    is_over = run.attempt.outcome is not None
    if is_over and (fresh or events or output):
        wandb_runs.open_run(asked, place, document)
        run, is_over = asked.run(document), False
    summary = _lines(request, _SUMMARY)
    if summary:
        document["summary"] = wandb_runs.json_object("summary", summary[-1], wandb_runs.MAX_SUMMARY)
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
        asked.master.logged_runs.append(
            transaction, run.run_id, records, lease_s=wandb_runs.LEASE_S
        )
        if request.complete:
            _finish(asked, run, request, document)
    wandb_runs.store_run(asked, place, document, run)


def _finish(
    asked: wandb_runs.Asked, run: LoggedRun, request: StreamRequest, document: Mapping[str, Any]
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
        text, colors = split_colors(text.encode(errors="replace").decode()[:_MAX_LINE])
        stream = "stderr" if is_error else "stdout"
        entries.append(LogEntry(known["next"], time.time(), 0, stream, None, text, colors))
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


def _bounded(
    asked: wandb_runs.Asked, run: LoggedRun, records: list[AnyRecord]
) -> tuple[list[AnyRecord], int]:
    """Return the records without names beyond `MAX_KEYS`, and the number of values left out."""
    names = tables.metric_names.c
    where = names.experiment_id == run.experiment_id
    new = {key for record in records for key in keys_of(record)}
    count = asked.connection.scalar(
        sa.select(sa.func.count()).select_from(names.key.table).where(where)
    )
    if (count or 0) + len(new) <= MAX_KEYS:
        return records, 0
    known = set(asked.connection.execute(sa.select(names.key).where(where)).scalars())
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
