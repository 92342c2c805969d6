"""Routes of runners: records, output, control and the end of an attempt."""

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query, Request, Response

from paceline.master._master import Master
from paceline.master._waiting_requests import wait_for
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, experiment_row, write_rows
from paceline.master.experiments import (
    RefusedError,
    check_not_over,
    end_runner,
    note_begun,
    read_attempt,
    read_control_of,
)
from paceline.master.store import Transaction, config_of, slots_by_node
from paceline.messages.attempts import (
    AttemptControl,
    AttemptEnd,
    LogReply,
    LogRequest,
    RecordReply,
    RecordRequest,
    runner_id,
)

# The bulk passes here: bodies are decoded straight into structs, not through models.
router = ApiRouter(tags=["attempts"], route_class=ReadingRoute)

AttemptId = Annotated[int, Path(ge=1, le=2**62)]
Member = Annotated[int, Query(ge=0, le=10_000, description="Which of the attempt's nodes, from 0.")]


@router.post("/attempts/{attempt_id}/records", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_records(
    attempt_id: AttemptId, request: Request, master: MasterOf, member: Member = 0
) -> Response:
    """Store journal records and carry out what follows; what is known already is dropped."""
    master.leases.renew(runner_id(attempt_id, member))
    body = await _decode(request, RecordRequest)
    has_validations = any(
        getattr(record, "group", None) == "validation" or getattr(record, "validation", False)
        for batch in body.batches
        for _, record in batch.records
    )
    stored = master.database.write(
        lambda transaction: master.ingest.store(transaction, attempt_id, body.batches),
        is_urgent=has_validations,
    )
    try:
        marks = await asyncio.wrap_future(stored)
    except RefusedError:
        raise
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        # Records that cannot be stored now never can: sending them again would go on for ever.
        message = f"The records cannot be stored: {type(error).__name__}: {error}"
        raise ApiError(422, "invalid_records", message) from error
    # Of a rank the newest record comes last.
    newest = max(
        (batch.records[-1][1].time for batch in body.batches if batch.records), default=None
    )
    if newest is not None:
        master.measurements.note_lag(time.time() - newest)
    control = None
    # A runner that asks for the marks may have missed the answer to an earlier request.
    if has_validations or not body.batches:
        control = await asyncio.to_thread(_read_decision, master, attempt_id)
    return _json(RecordReply(marks=marks, control=control))


@router.post("/attempts/{attempt_id}/logs", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_logs(
    attempt_id: AttemptId, request: Request, master: MasterOf, member: Member = 0
) -> Response:
    """Store lines of output; what is known already is dropped."""
    master.leases.renew(runner_id(attempt_id, member))
    body = await _decode(request, LogRequest)
    attempt = await asyncio.to_thread(_read_attempt, master, attempt_id)
    check_not_over(attempt)
    logs = master.logs
    trial_id, number = attempt.trial_id, attempt.number
    if body.entries:
        last = await asyncio.to_thread(logs.append, trial_id, number, body.entries, member)

        def tell(transaction: Transaction) -> None:
            transaction.emit("logs", attempt.experiment_id, trial_id, last=last)

        await write_rows(master, tell)
    # The first look at a file reads all of it.
    sequence = await asyncio.to_thread(logs.last_sequence, trial_id, number, member)
    return _json(LogReply(last_sequence=sequence))


@router.get("/attempts/{attempt_id}/control")
async def read_control(
    attempt_id: AttemptId,
    master: MasterOf,
    after: Annotated[int, Query(ge=0)] = 0,
    timeout_s: Annotated[float, Query(ge=0, le=60)] = 0,
    begins: Annotated[bool, Query(description="The attempt's runner has begun.")] = False,
    member: Member = 0,
    port: Annotated[int, Query(ge=0, le=65535, description="A port that is free there.")] = 0,
    sends_checkpoints: Annotated[
        bool, Query(description="Its node does not share the checkpoint directory.")
    ] = False,
) -> Response:
    """Read what is wanted of an attempt; waits up to `timeout_s` for another version.

    The answer comes sooner where the runner must ask again to keep its lease.
    """
    master.leases.renew(runner_id(attempt_id, member), after)
    timeout_s = min(timeout_s, master.leases.longest_wait_s)
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

        await write_rows(master, begin)
    with master.controls.listen(attempt_id) as changed:
        control = await asyncio.to_thread(_read_control, master, attempt_id)
        is_news = control.version > after or not timeout_s or master.is_closing
        # Each change is told, so that a request which waited in vain need not look again.
        if not is_news and await wait_for(changed, timeout_s):
            control = await asyncio.to_thread(_read_control, master, attempt_id)
    return _json(control)


@router.post("/attempts/{attempt_id}/end", status_code=204, openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_end(
    attempt_id: AttemptId, request: Request, master: MasterOf, member: Member = 0
) -> None:
    """Record how an attempt ended, on one of its nodes; a second time changes nothing."""
    master.leases.renew(runner_id(attempt_id, member))
    end = (await _decode(request, AttemptEnd)).by_clock_of(time.time())

    def job(transaction: Transaction) -> None:
        if end.is_leaving:
            # What ends the attempt may end its node as well, which has not said so yet.
            for node_id in slots_by_node(read_attempt(transaction.connection, attempt_id)):
                master.nodes.presence.doubt(node_id)
        end_runner(master.changes, transaction, attempt_id, member, end)

    await write_rows(master, job)
    await asyncio.to_thread(master.transfers.forget, attempt_id)


async def _decode(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(422, "invalid_request", str(error)) from error


def _json(message: Any) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")


def _read_attempt(master: Master, attempt_id: int) -> Any:
    with master.database.read() as connection:
        return read_attempt(connection, attempt_id)


def _read_control(master: Master, attempt_id: int) -> AttemptControl:
    with master.database.read() as connection:
        return read_control_of(connection, attempt_id)


def _read_decision(master: Master, attempt_id: int) -> AttemptControl | None:
    """Return what is wanted after the reports so far, None if no search judges them."""
    with master.database.read() as connection:
        attempt = read_attempt(connection, attempt_id)
        searcher = config_of(experiment_row(connection, attempt.experiment_id)).searcher
        return None if searcher.judged_metrics is None else read_control_of(connection, attempt_id)
