"""Routes of runners: records, output, control and the end of an attempt."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import Connection

from paceline.journal import encode_float
from paceline.master._master import Master
from paceline.master._waiting_requests import wait_for
from paceline.master.api._common import MasterOf, experiment_row, trial_row, write
from paceline.master.api._problems import ApiError
from paceline.master.experiments import RefusedError, check_not_over, end_attempt, read_attempt
from paceline.master.store import Transaction, config_of
from paceline.messages.attempts import (
    AttemptControl,
    AttemptEnd,
    LogReply,
    LogRequest,
    RecordReply,
    RecordRequest,
)
from paceline.messages.states import TrialState

# The bulk passes here: bodies are decoded straight into structs, not through models.
router = APIRouter(tags=["attempts"])

_KILLED = (TrialState.STOPPING_KILLED.value, TrialState.STOPPING_ERROR.value)
_SHUTDOWN_GRACE_S = 5.0

AttemptId = Annotated[int, Path(ge=1, le=2**62)]


@router.post("/attempts/{attempt_id}/records", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_records(attempt_id: AttemptId, request: Request, master: MasterOf) -> Response:
    """Store journal records and carry out what follows; what is known already is dropped."""
    master.leases.renew(attempt_id)
    body = await _decode(request, RecordRequest)
    has_validations = any(
        getattr(record, "group", None) == "validation"
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
    control = None
    # A runner that asks for the marks may have missed the answer to an earlier request.
    if has_validations or not body.batches:
        control = await asyncio.to_thread(_read_decision, master, attempt_id)
    return _json(RecordReply(marks=marks, control=control))


@router.post("/attempts/{attempt_id}/logs", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_logs(attempt_id: AttemptId, request: Request, master: MasterOf) -> Response:
    """Store lines of output; what is known already is dropped."""
    master.leases.renew(attempt_id)
    body = await _decode(request, LogRequest)
    attempt = await asyncio.to_thread(_read_attempt, master, attempt_id)
    check_not_over(attempt)
    logs = master.logs
    trial_id, number = attempt.trial_id, attempt.number
    if body.entries:
        last = await asyncio.to_thread(logs.append, trial_id, number, body.entries)

        def tell(transaction: Transaction) -> None:
            transaction.emit("logs", attempt.experiment_id, trial_id, last=last)

        await write(master, tell)
    # The first look at a file reads all of it.
    sequence = await asyncio.to_thread(logs.last_sequence, trial_id, number)
    return _json(LogReply(last_sequence=sequence))


@router.get("/attempts/{attempt_id}/control")
async def read_control(
    attempt_id: AttemptId,
    master: MasterOf,
    after: Annotated[int, Query(ge=0)] = 0,
    timeout_s: Annotated[float, Query(ge=0, le=60)] = 0,
) -> Response:
    """Read what is wanted of an attempt; waits up to `timeout_s` for another version.

    The answer comes sooner where the runner must ask again to keep its lease.
    """
    master.leases.renew(attempt_id, after)
    timeout_s = min(timeout_s, master.leases.longest_wait_s)
    with master.controls.listen(attempt_id) as changed:
        control = await asyncio.to_thread(_read_control, master, attempt_id)
        if control.version <= after and timeout_s and not master.is_closing:
            await wait_for(changed, timeout_s)
            control = await asyncio.to_thread(_read_control, master, attempt_id)
    return _json(control)


@router.post("/attempts/{attempt_id}/end", status_code=204, openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_end(attempt_id: AttemptId, request: Request, master: MasterOf) -> None:
    """Record how an attempt ended; a second time changes nothing."""
    master.leases.renew(attempt_id)
    end = await _decode(request, AttemptEnd)
    await write(
        master,
        lambda transaction: end_attempt(master.changes, transaction, attempt_id, end),
    )


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
        return _control(connection, attempt_id)


def _read_decision(master: Master, attempt_id: int) -> AttemptControl | None:
    """Return what is wanted after the reports so far, None if no search judges them."""
    with master.database.read() as connection:
        attempt = read_attempt(connection, attempt_id)
        searcher = config_of(experiment_row(connection, attempt.experiment_id)).searcher
        return None if searcher.judged_metrics is None else _control(connection, attempt_id)


def _control(connection: Connection, attempt_id: int) -> AttemptControl:
    attempt = read_attempt(connection, attempt_id)
    check_not_over(attempt)
    trial = trial_row(connection, attempt.trial_id)
    experiment = experiment_row(connection, attempt.experiment_id)
    config = config_of(experiment)
    timeout_s = config.preemption_timeout
    if trial.state == TrialState.STOPPING_COMPLETED.value:
        timeout_s = config.searcher.stop_timeout
    best = experiment.best_metric
    return AttemptControl(
        version=attempt.control_version,
        should_preempt=attempt.preempt_reason is not None,
        preempt_timeout_s=timeout_s,
        should_kill=attempt.should_kill,
        # A user who kills means now; a master that shuts down wants the trial to go on later.
        kill_grace_s=0.0 if trial.state in _KILLED else _SHUTDOWN_GRACE_S,
        operation_length=trial.target_length,
        operations_closed=trial.operations_closed,
        best_validation=None if best is None else encode_float(best),
    )
