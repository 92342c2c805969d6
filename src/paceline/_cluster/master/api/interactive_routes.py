"""Routes of interactive tasks: their links for their owners, and the bytes between both sides."""

import asyncio
import time
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import Path, Query, Request, Response

from paceline._cluster.master.api.access_guard import AccessIdentity, IdentityOf
from paceline._cluster.master.api.attempt_and_log_routes import AttemptId
from paceline._cluster.master.api.experiment_routes import ExperimentId
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf, experiment_row
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.attempts import read_attempt
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.streams import TO_TASK, TO_USER, Stream, StreamOverError
from paceline._cluster.messages.master_models import InteractiveLink
from paceline._cluster.messages.runner_messages import StreamMark, StreamNames, StreamPoll
from paceline._cluster.messages.states import LIVE_ATTEMPTS, AttemptState

stream_router = ApiRouter(tags=["interactive"])

# Random, so that nobody guesses the stream of another.
Name = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Chosen by the user's side.")]
Offset = Annotated[int, Query(ge=0, le=2**53, description="How many bytes came before.")]
WaitS = Annotated[float, Query(ge=0, le=30)]
_BODY: dict[str, Any] = {"requestBody": {"content": {"application/octet-stream": {}}}}


@stream_router.post("/experiments/{experiment_id}/link")
async def ask_for_link(
    experiment_id: ExperimentId, master: MasterOf, identity: IdentityOf, wait_s: WaitS = 0.0
) -> InteractiveLink:
    """Return what opens an interactive task of the sender; waits until the task listens."""
    attempt_id, kind = await asyncio.to_thread(_own_task, master, experiment_id, identity)
    path = await master.streams.link(attempt_id, wait_s)
    return InteractiveLink(kind=kind, path=path)


@stream_router.get("/experiments/{experiment_id}/streams/{stream}")
async def read_stream(
    experiment_id: ExperimentId, stream: Name, master: MasterOf, identity: IdentityOf,
    offset: Offset, wait_s: WaitS = 0.0,
) -> Response:  # fmt: skip
    """Read what an interactive task sends; the first request opens the stream."""
    found = await _of_user(master, experiment_id, stream, identity, is_first=offset == 0)
    return await _read(master, stream, found, TO_USER, offset, wait_s)


@stream_router.put("/experiments/{experiment_id}/streams/{stream}", openapi_extra=_BODY)
async def write_stream(
    experiment_id: ExperimentId, stream: Name, request: Request, master: MasterOf,
    identity: IdentityOf, offset: Offset, wait_s: WaitS = 0.0, is_end: bool = False,
) -> Response:  # fmt: skip
    """Send bytes to an interactive task; the answer says how many were taken altogether."""
    data = await request.body()
    found = await _of_user(master, experiment_id, stream, identity, is_first=offset == 0)
    return await _write(found, TO_TASK, offset, data, wait_s, is_end=is_end)


@stream_router.delete("/experiments/{experiment_id}/streams/{stream}", status_code=204)
async def close_stream(
    experiment_id: ExperimentId, stream: Name, master: MasterOf, identity: IdentityOf
) -> None:
    """Close a stream to an interactive task."""
    if master.streams.find(stream) is not None:
        await _of_user(master, experiment_id, stream, identity, is_first=False)
        master.streams.drop(stream)


@stream_router.post("/attempts/{attempt_id}/streams", openapi_extra={"requestBody": {
    "content": {"application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def poll_streams(attempt_id: AttemptId, request: Request, master: MasterOf) -> Response:
    """List the streams that the runner of an interactive task is to serve; waits for news."""
    try:
        poll = msgspec.json.decode(await request.body(), type=StreamPoll)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(422, "invalid_request", str(error)) from error
    wait_s = min(poll.wait_s, master.leases.longest_wait_s)
    version, names = await master.streams.poll(
        attempt_id, poll.link, is_ready=poll.is_ready, after=poll.after, wait_s=wait_s
    )
    content = msgspec.json.encode(StreamNames(version=version, names=names))
    return Response(content, media_type="application/json")


@stream_router.get("/attempts/{attempt_id}/streams/{stream}")
async def read_stream_at_task(
    attempt_id: AttemptId, stream: Name, master: MasterOf, offset: Offset, wait_s: WaitS = 0.0
) -> Response:
    """Read what the user of an interactive task sends."""
    found = _of_task(master, attempt_id, stream)
    return await _read(master, stream, found, TO_TASK, offset, wait_s)


@stream_router.put("/attempts/{attempt_id}/streams/{stream}", openapi_extra=_BODY)
async def write_stream_at_task(
    attempt_id: AttemptId, stream: Name, request: Request, master: MasterOf, offset: Offset,
    wait_s: WaitS = 0.0, is_end: bool = False,
) -> Response:  # fmt: skip
    """Send bytes to the user of an interactive task."""
    data = await request.body()
    found = _of_task(master, attempt_id, stream)
    return await _write(found, TO_USER, offset, data, wait_s, is_end=is_end)


@stream_router.delete("/attempts/{attempt_id}/streams/{stream}", status_code=204)
async def close_stream_at_task(attempt_id: AttemptId, stream: Name, master: MasterOf) -> None:
    """Close a stream, as the task did."""
    found = master.streams.find(stream)
    if found is not None and found.attempt_id == attempt_id:
        # What the task sent last is read first; the user's side closes it then.
        found.end()


def _own_task(
    master: Master, experiment_id: int, identity: AccessIdentity | None
) -> tuple[int, str]:
    """Return attempt and kind of a running interactive task that belongs to the sender.

    Raises:
        ApiError: It is another's, or none.
        RefusedError: It does not run.
    """
    attempts = tables.attempts.c
    query = sa.select(attempts.id).where(
        attempts.experiment_id == experiment_id, attempts.state.in_(LIVE_ATTEMPTS)
    )
    with master.database.read() as connection:
        experiment = experiment_row(connection, experiment_id)
        attempt_id = connection.execute(query.order_by(attempts.id.desc())).scalar()
    section = config_of(experiment).interactive
    if section is None:
        raise RefusedError(
            "not_interactive",
            f"Experiment {experiment_id} must be a notebook, a shell or a TensorBoard, but trains."
            " Hint: `paceline notebook` makes one.",
        )
    if identity is None or identity.owner != experiment.owner:
        raise ApiError(
            403,
            "other_owner",
            f"The {section.kind} of experiment {experiment_id} opens for its owner only,"
            f" {experiment.owner!r}: what runs in it has the owner's rights. Hint: make your own.",
        )
    if attempt_id is None:
        raise RefusedError(
            "not_running",
            f"The {section.kind} of experiment {experiment_id} must run to be opened, but does not."
            f" Hint: see `paceline e describe {experiment_id}`.",
        )
    return attempt_id, section.kind


async def _of_user(
    master: Master,
    experiment_id: int,
    name: str,
    identity: AccessIdentity | None,
    *,
    is_first: bool,
) -> Stream:
    found = master.streams.find(name)
    if found is None and is_first and not master.is_closing:
        attempt_id, _ = await asyncio.to_thread(_own_task, master, experiment_id, identity)
        # The other direction may have opened it meanwhile.
        found = master.streams.find(name)
        if found is None:
            user = "" if identity is None else identity.owner
            found = master.streams.opened(name, experiment_id, attempt_id, user)
    owner = None if identity is None else identity.owner
    if found is None or (found.user, found.experiment_id) != (owner, experiment_id):
        raise _unknown(name)
    found.asked_at[TO_USER] = time.monotonic()
    return found


def _has_ended(master: Master, attempt_id: int) -> bool:
    with master.database.read(everything=True) as connection:
        attempt = read_attempt(connection, attempt_id)
    return bool(attempt.state == AttemptState.ENDED.value)


def _of_task(master: Master, attempt_id: int, name: str) -> Stream:
    found = master.streams.find(name)
    if found is None or found.attempt_id != attempt_id:
        raise _unknown(name)
    found.asked_at[TO_TASK] = time.monotonic()
    return found


async def _read(
    master: Master, name: str, stream: Stream, direction: int, offset: int, wait_s: float
) -> Response:
    try:
        data = await stream.pipes[direction].read(offset, wait_s)
    except StreamOverError:
        if direction == TO_USER and all(pipe.is_over for pipe in stream.pipes):
            master.streams.drop(name)
        raise _over() from None
    stream.asked_at[direction] = time.monotonic()
    if not data and await asyncio.to_thread(_has_ended, master, stream.attempt_id):
        # A runner that was lost has closed nothing.
        stream.end()
    return Response(data, media_type="application/octet-stream")


async def _write(
    stream: Stream, direction: int, offset: int, data: bytes, wait_s: float, *, is_end: bool
) -> Response:
    pipe = stream.pipes[direction]
    try:
        num_taken = await pipe.write(offset, data, wait_s)
    except StreamOverError:
        raise _over() from None
    if is_end and num_taken == offset + len(data):
        pipe.end()
    content = msgspec.json.encode(StreamMark(num_bytes=num_taken))
    return Response(content, media_type="application/json")


def _unknown(name: str) -> ApiError:
    return ApiError(404, "unknown_stream", f"There is no stream {name}; it may have ended.")


def _over() -> ApiError:
    return ApiError(410, "stream_over", "The stream has ended.")
