"""Records, output, control and end of attempts; runs without a master; logs."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from fastapi import Depends, Path, Query, Request, Response

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.access_guard import IdentityOf
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter, RouteScope
from paceline._cluster.master.experiments.attempt_runners import end_runner, note_begun
from paceline._cluster.master.experiments.attempts import (
    check_not_over,
    read_attempt,
    read_control_of,
)
from paceline._cluster.master.experiments.failure_causes import find_log_hits
from paceline._cluster.master.experiments.logged_runs import find_link
from paceline._cluster.master.experiments.record_ingest import RecordIngest
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.unmanaged_runs import batch_place
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of, slots_by_node
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.log_files import LogFilter, StoredLine, linear_pattern
from paceline._cluster.master.store.row_ids_and_counts import update_attempt
from paceline._cluster.master.store.trial_logs import merge_lines
from paceline._cluster.master.waiting import wait_for
from paceline._cluster.messages import runner_messages as messages
from paceline._cluster.messages.experiment_models import LinkTarget, LogLine, LogPage

_FOLLOWS = {
    "alert": "has a text of a log policy",
    "no_retry": "has a text after which no restart follows if it fails",
    "exclude_node": "excludes this node for further attempts of the trial",
}


def take_log_hits(
    ingest: RecordIngest,
    transaction: Transaction,
    attempt_id: int,
    member: int,
    hits: dict[str, dict[str, Any]],
) -> None:
    """Store the first line with each pattern of log policies, with an alert for each."""
    attempt = read_attempt(transaction.connection, attempt_id)
    known = attempt.log_hits or {}
    nodes = [*slots_by_node(attempt)]
    new = {
        name: {**hit, "node": nodes[min(member, len(nodes) - 1)]}
        for name, hit in hits.items()
        if name not in known
    }
    for hit in new.values():
        title = f"The output of attempt {attempt.number} {_FOLLOWS[hit['action']]}"
        ingest.raise_alert(transaction, attempt, title, hit["line"])
    if new:
        update_attempt(transaction.connection, attempt_id, log_hits=known | new)


# The bulk passes here: bodies are decoded straight into structs, not through models.
attempt_router = ApiRouter(tags=["attempts"], route_class=ReadingRoute)

# Records in a transaction: after each, other jobs write.
_MAX_AT_ONCE = 500

AttemptId = Annotated[int, Path(ge=1, le=2**62)]
Member = Annotated[int, Query(ge=0, le=10_000, description="Which of the attempt's nodes, from 0.")]


@attempt_router.post("/attempts/{attempt_id}/records", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_records(
    attempt_id: AttemptId, request: Request, master: models.MasterOf, member: Member = 0
) -> Response:
    """Store journal records and apply their consequences; known records are dropped."""
    master.leases.renew(messages.runner_id(attempt_id, member))
    body = await _decode(request, messages.RecordRequest)
    has_validations = _has_validations(body.batches)
    try:
        for part in messages.in_parts(body.batches, _MAX_AT_ONCE):
            store = partial(master.ingest.store, attempt_id=attempt_id, batches=part)
            stored = master.database.write(store, is_urgent=_has_validations(part))
            marks = await asyncio.wrap_future(stored)
    except RefusedError:
        raise
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        # Records that cannot be stored now never can: sending them again would never end.
        message = f"The records cannot be stored: {type(error).__name__}: {error}"
        raise models.ApiError(422, "invalid_records", message) from error
    # Last record of each batch: records of a rank are in order, so the last is the newest.
    newest = max(
        (batch.records[-1][1].time for batch in body.batches if batch.records), default=None
    )
    if newest is not None:
        master.measurements.note_lag(time.time() - newest)
    control = None
    # A runner that asks for the marks may have missed the answer to an earlier request.
    if has_validations or not body.batches:
        control = await asyncio.to_thread(_read_decision, master, attempt_id)
    return _json(messages.RecordReply(marks=marks, control=control))


@attempt_router.post("/attempts/{attempt_id}/logs", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_logs(
    attempt_id: AttemptId, request: Request, master: models.MasterOf, member: Member = 0
) -> Response:
    """Store lines of output; known lines are dropped."""
    master.leases.renew(messages.runner_id(attempt_id, member))
    body = await _decode(request, messages.LogRequest)
    attempt, hits = await asyncio.to_thread(_read_attempt, master, attempt_id, body.entries)
    check_not_over(attempt)
    logs = master.logs
    trial_id, number = attempt.trial_id, attempt.number
    if body.entries:
        last = await asyncio.to_thread(logs.append, trial_id, number, body.entries, member)

        def tell(transaction: Transaction) -> None:
            transaction.emit("logs", attempt.experiment_id, trial_id, last=last)
            if hits:
                take_log_hits(master.ingest, transaction, attempt_id, member, hits)

        await models.write_rows(master, tell)
    # The first look reads the whole file.
    sequence = await asyncio.to_thread(logs.last_sequence, trial_id, number, member)
    return _json(messages.LogReply(last_sequence=sequence))


@attempt_router.get("/attempts/{attempt_id}/control")
async def read_control(
    attempt_id: AttemptId,
    master: models.MasterOf,
    after: Annotated[int, Query(ge=0)] = 0,
    timeout_s: Annotated[float, Query(ge=0, le=60)] = 0,
    begins: Annotated[bool, Query(description="The attempt's runner has begun.")] = False,
    member: Member = 0,
    port: Annotated[int, Query(ge=0, le=65535, description="A port that is free there.")] = 0,
    sends_checkpoints: Annotated[
        bool, Query(description="Its node does not share the checkpoint directory.")
    ] = False,
    unused_s: Annotated[
        float | None, Query(ge=0, le=10**9, description="For how long it did not use its slots.")
    ] = None,
) -> Response:
    """Read the master's orders for an attempt; waits up to `timeout_s` for a new version.

    The answer comes sooner where the runner must ask again to keep its lease.
    """
    master.leases.renew(messages.runner_id(attempt_id, member), after)
    timeout_s = min(timeout_s, master.leases.longest_wait_s)
    if unused_s is not None:
        master.ingest.activities.note_unused(attempt_id, member, unused_s)
    if begins:

        def begin(transaction: Transaction) -> None:
            note_begun(
                master.changes,
                transaction,
                attempt_id,
                member,
                port=port,
                sends_checkpoints=sends_checkpoints,
            )
            master.ingest.store(transaction, attempt_id, [])

        await models.write_rows(master, begin)
    with master.controls.listen(attempt_id) as changed:
        control = await asyncio.to_thread(_read_control, master, attempt_id)
        is_news = control.version > after or not timeout_s or master.is_closing
        # Each change wakes the waiting requests, so that one which waited in vain need not look
        # again.
        if not is_news and await wait_for(changed, timeout_s):
            control = await asyncio.to_thread(_read_control, master, attempt_id)
    return _json(control)


@attempt_router.post("/attempts/{attempt_id}/end", status_code=204, openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_end(
    attempt_id: AttemptId, request: Request, master: models.MasterOf, member: Member = 0
) -> None:
    """Record the end of an attempt on a node; repeated calls change nothing."""
    master.leases.renew(messages.runner_id(attempt_id, member))
    end = (await _decode(request, messages.AttemptEnd)).by_clock_of(time.time())

    def job(transaction: Transaction) -> None:
        if end.is_leaving:
            # Node in doubt: the cause of this end may end the node too, before the node reports.
            for node_id in slots_by_node(read_attempt(transaction.connection, attempt_id)):
                master.nodes.presence.doubt(node_id)
        end_runner(master.changes, transaction, attempt_id, member, end)

    await models.write_rows(master, job)
    await asyncio.to_thread(master.transfers.forget, attempt_id)


async def _decode(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        # Deeply nested JSON exhausts the decoder's stack.
        raise models.ApiError(422, "invalid_request", str(error)) from error


def _json(message: Any) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")


def _read_attempt(
    master: Master, attempt_id: int, entries: Sequence[messages.LogEntry]
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return an attempt, and what log policies find in lines of its output."""
    with master.database.read() as connection:
        attempt = read_attempt(connection, attempt_id)
        policies = config_of(models.experiment_row(connection, attempt.experiment_id)).log_policies
    return attempt, find_log_hits(policies, entries)


def _read_control(master: Master, attempt_id: int) -> messages.AttemptControl:
    with master.database.read() as connection:
        return read_control_of(connection, attempt_id)


def _has_validations(batches: Sequence[messages.RecordBatch]) -> bool:
    return any(
        getattr(record, "group", None) == "validation" or getattr(record, "validation", False)
        for batch in batches
        for _, record in batch.records
    )


def _read_decision(master: Master, attempt_id: int) -> messages.AttemptControl | None:
    """Return the control after the stored reports, None if the search judges no reports."""
    with master.database.read() as connection:
        attempt = read_attempt(connection, attempt_id)
        searcher = config_of(models.experiment_row(connection, attempt.experiment_id)).searcher
        return None if searcher.judged_metrics is None else read_control_of(connection, attempt_id)


# The bulk passes here: bodies are decoded straight into structs, not through models.
run_router = ApiRouter(tags=["runs"], route_class=ReadingRoute)

RunId = Annotated[str, Path(min_length=1, max_length=128)]


@run_router.get("/runs")
def find_run(
    records: models.RecordsOf,
    link: Annotated[str, Query(min_length=3, max_length=500, description="Without the host.")],
) -> LinkTarget:
    """Find what a client of W&B or MLflow prints as the place of its run or its project."""
    with records.database.read() as connection:
        found = find_link(connection, link)
    if found is None:
        raise models.ApiError(404, "not_found", f"Nothing was logged here as {link!r}.")
    return LinkTarget(experiment_id=found[0], label=found[1])


@run_router.put("/runs/{run_id}", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def register_run(
    run_id: RunId, request: Request, master: models.MasterOf, identity: IdentityOf
) -> Response:
    """Register a run as an unmanaged experiment, and return the stored positions."""
    body = await _decode(request, messages.RunRegistration)
    if body.info.run_id != run_id:
        raise models.ApiError(
            422,
            "invalid_request",
            f"`info.run_id` must be the one in the path, {run_id!r}, but got {body.info.run_id!r}.",
        )
    reply = await models.write_rows(
        master,
        lambda transaction: master.unmanaged.register(
            transaction, body.info, body.path, is_trusted=may_name_directories(identity)
        ),
    )
    return _json_bytes(reply)


@run_router.post("/runs/{run_id}/records", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_run_records(
    run_id: RunId, request: Request, master: models.MasterOf, identity: IdentityOf
) -> Response:
    """Store journal records of a run; known records are dropped."""
    body = await _decode(request, messages.RunRecords)
    # A whole run in one transaction would hold up all other writers.
    parts = [*messages.in_parts(sorted(body.batches, key=batch_place), _MAX_AT_ONCE)]
    try:
        for part in parts:
            take = partial(
                master.unmanaged.take,
                run_id=run_id,
                batches=part,
                is_alive=body.is_alive or part is not parts[-1],
                moved=body.moved,
                lease_s=body.lease_s,
                is_trusted=may_name_directories(identity),
            )
            reply = await models.write_rows(master, take)
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        message = f"The records cannot be stored: {type(error).__name__}: {error}"
        raise models.ApiError(422, "invalid_records", message) from error
    return _json_bytes(reply)


def may_name_directories(identity: IdentityOf) -> bool:
    """Return whether a sender may name directories that the master opens."""
    if identity is None or identity.scope is RouteScope.REPORT:
        return False
    return identity.reach is None or identity.reach.sees is None


def _json_bytes(message: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")


log_router = ApiRouter(tags=["trials"], route_class=ReadingRoute)

Level = Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_MAX_LINES = 10_000
LineLimit = Annotated[int, Query(ge=1, le=_MAX_LINES)]
_PATTERN_HELP = "A regular expression of RE2 that a line must hold, regardless of case."
After = Annotated[int, Query(ge=-1, le=2**62, description="Lines beyond this id.")]
Tail = Annotated[int | None, Query(ge=1, le=_MAX_LINES, description="The last so many lines.")]


async def _log_filter(
    rank: int | None = None,
    level: Annotated[Level | None, Query(description="The lowest to list.")] = None,
    stream: str | None = None,
    search: str | None = None,
    since: Annotated[float | None, Query(description="Seconds since 1970, included.")] = None,
    until: Annotated[float | None, Query(description="Seconds since 1970, included.")] = None,
    pattern: Annotated[str | None, Query(max_length=500, description=_PATTERN_HELP)] = None,
) -> LogFilter:
    try:
        found = None if pattern is None else linear_pattern(pattern)
    except ValueError as error:
        raise models.ApiError(
            422,
            "invalid_request",
            f"`pattern` must be a regular expression that RE2 takes, but got {pattern!r}: {error}.",
        ) from error
    return LogFilter(rank, level, stream, search, since, until, found)


Only = Annotated[LogFilter, Depends(_log_filter)]


@log_router.get("/trials/{trial_id}/logs")
def list_trial_logs(
    trial_id: models.TrialId,
    master: models.MasterOf,
    only: Only,
    after: After = -1,
    limit: LineLimit = 1000,
    tail: Tail = None,
) -> LogPage:
    """List lines of a trial's output, oldest first."""
    with master.database.read() as connection:
        models.trial_row(connection, trial_id)
    if tail is not None:
        lines = master.logs.tail(trial_id, tail, only=only)
        more = None
    else:
        lines = master.logs.read(trial_id, after=after, limit=limit + 1, only=only)
        more = str(lines[limit - 1].id) if len(lines) > limit else None
        lines = lines[:limit]
    return LogPage(
        items=[log_view(trial_id, line, only) for line in lines],
        next_cursor=more,
        num_damaged=master.logs.num_damaged(trial_id),
        num_lines=master.logs.num_lines(trial_id),
    )


@log_router.get("/experiments/{experiment_id}/logs")
def list_experiment_logs(
    experiment_id: Annotated[int, Path(ge=1, le=2**62)],
    master: models.MasterOf,
    only: Only,
    limit: LineLimit = 1000,
    tail: Tail = None,
) -> LogPage:
    """List lines of all trials of an experiment in order of time."""
    read: list[int] = []
    with master.database.read() as connection:
        models.experiment_row(connection, experiment_id)
        spans = (
            _log_ends(connection, experiment_id) if tail else _log_begins(connection, experiment_id)
        )
        spans = _noted_logs(spans, read)
        lines = merge_lines(master.logs, spans, newest_first=tail is not None, only=only)
        chosen = list(islice(lines, tail or limit))
    if tail is not None:
        chosen.reverse()
    return LogPage(
        items=[log_view(trial_id, line, only) for trial_id, line in chosen],
        num_damaged=sum(map(master.logs.num_damaged, read)),
    )


def _noted_logs(spans: Iterator[tuple[int, float]], read: list[int]) -> Iterator[tuple[int, float]]:
    """Yield spans unchanged, collecting the ids of the trials read."""
    for trial_id, at in spans:
        read.append(trial_id)
        yield trial_id, at


def _log_begins(connection: sa.Connection, experiment_id: int) -> Iterator[tuple[int, float]]:
    """Return the experiment's trials with their first attempt's time, in time order."""
    attempts = tables.attempts.c
    query = (
        sa.select(attempts.trial_id, attempts.created_at)
        .where(attempts.experiment_id == experiment_id, attempts.number == 1)
        .order_by(attempts.created_at, attempts.trial_id)
    )
    return ((trial_id, time) for trial_id, time in connection.execute(query))


def _log_ends(connection: sa.Connection, experiment_id: int) -> Iterator[tuple[int, float]]:
    """Return the experiment's trials with the time of their end, the latest first."""
    trials = tables.trials
    query = (
        sa.select(trials.c.id, trials.c.ended_at)
        .where(trials.c.experiment_id == experiment_id, trials.c.num_attempts > 0)
        .order_by(trials.c.ended_at.desc().nulls_first(), trials.c.id.desc())
    )
    rows = connection.execute(query)
    return ((trial_id, inf if time is None else time) for trial_id, time in rows)


def log_view(trial_id: int, line: StoredLine, only: LogFilter) -> LogLine:
    """Return a stored line as API model."""
    return LogLine(
        id=line.id,
        trial_id=trial_id,
        attempt=line.attempt,
        time=line.time,
        rank=line.rank,
        stream=line.stream,
        level=line.level,
        text=line.text,
        colors=[*line.colors] or None,
        found=only.place_in(line.text),
    )
