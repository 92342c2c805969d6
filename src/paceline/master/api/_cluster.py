"""Routes of the master itself: health, slots, events, shutdown."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, Row, func, select

from paceline.master._master import Master
from paceline.master._waiting_requests import wait_for
from paceline.master.api._common import MasterOf
from paceline.master.api._reading import ReadingRoute
from paceline.master.api._web_ui_files import has_web_ui
from paceline.master.experiments import holdings, waiting_trials
from paceline.master.scheduling import NodeSlots, Reason, SchedulingResult, decide
from paceline.master.store import EXPERIMENTS, number_by_state, tables
from paceline.messages import resources, views
from paceline.messages.nodes import LOCAL_NAME, LOCAL_NODE
from paceline.messages.states import LIVE_ATTEMPTS, ExperimentState

router = APIRouter(tags=["master"], route_class=ReadingRoute)

_KEEP_ALIVE_S = 15.0
_EVENTS_PER_READ = 500


@router.get("/health")
async def read_health(master: MasterOf) -> dict[str, str]:
    """Tell that the master answers; needs no token."""
    return {"status": "ok", "version": master.version}


@router.get("/master")
def read_master(master: MasterOf) -> resources.MasterInfo:
    """Tell what the master is and how busy it is."""
    with master.database.read() as connection:
        states = number_by_state(connection, EXPERIMENTS)
        used = sum(len(row.slots) for row in _live_attempts(connection))
    nodes = master.reconciler.slots()
    return resources.MasterInfo(
        version=master.version,
        cluster_id=master.home.cluster_id,
        started_at=master.started_at,
        home=str(master.home.path),
        num_slots=sum(len(node.slots) for node in nodes),
        num_slots_used=used,
        num_active_experiments=states.get(ExperimentState.ACTIVE.value, 0),
        has_web_ui=has_web_ui(),
    )


@router.post("/master/shutdown", status_code=202)
async def shut_down(request: Request, wanted: resources.Shutdown) -> None:
    """Stop the master, after its attempts have left unless they are to be kept."""
    stop: Callable[[resources.Shutdown], None] = request.app.state.shut_down
    stop(wanted)


@router.get("/slots")
def list_slots(master: MasterOf) -> list[resources.Slot]:
    """List the slots of all nodes and who uses them; those of lost nodes only if used."""
    with master.database.read() as connection:
        users = {
            (row.node_id or LOCAL_NODE, slot): row
            for row in _live_attempts(connection)
            for slot in row.slots
        }
    nodes = [(LOCAL_NODE, LOCAL_NAME, master.devices)]
    nodes += [(node.id, node.name, node.facts.devices) for node in master.nodes.all()]
    return [
        resources.Slot(
            id=slot,
            node=name,
            device=device,
            trial_id=user.trial_id if user else None,
            experiment_id=user.experiment_id if user else None,
            attempt_id=user.id if user else None,
        )
        for node_id, name, devices in nodes
        for slot, device in enumerate(devices)
        if (user := users.get((node_id, slot)))
        or node_id == LOCAL_NODE
        or not master.nodes.is_lost(node_id)
    ]


@router.get("/queue")
def list_queue(
    master: MasterOf, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[views.QueueEntry]:
    """List the trials that wait for slots, the next one first, and why each waits."""
    with master.database.read() as connection:
        nodes = master.reconciler.slots()
        results = decide(waiting_trials(connection), holdings(connection), nodes)
        shown = list(islice(results, limit))
        facts = _queued_trials(connection, [one.waiting.trial_id for one in shown])
    return [_queue_entry(facts[one.waiting.trial_id], nodes, one) for one in shown]


def _queued_trials(connection: Connection, ids: list[int]) -> dict[int, Any]:
    """Return of each trial its experiment's name, and since when it waits."""
    trials, experiments, attempts = tables.trials.c, tables.experiments.c, tables.attempts.c
    query = (
        select(trials.id, experiments.name, trials.created_at, func.max(attempts.ended_at))
        .select_from(tables.trials)
        .join(tables.experiments, experiments.id == trials.experiment_id)
        .outerjoin(tables.attempts, attempts.trial_id == trials.id)
        .where(trials.id.in_(ids))
        .group_by(trials.id)
    )
    return {row.id: row for row in connection.execute(query)}


def _queue_entry(facts: Any, nodes: list[NodeSlots], result: SchedulingResult) -> views.QueueEntry:
    waiting, reason = result.waiting, result.reason
    _, name, created_at, ended_at = facts
    of_pool = [len(node.slots) for node in nodes if node.pool == waiting.pool]
    total, largest = sum(of_pool), max(of_pool, default=0)
    if len(nodes) == 1:
        too_large = f"It needs {waiting.num_slots} slots, but there are only {total}."
    else:
        too_large = (
            f"It needs {waiting.num_slots} slots of one node, but in the pool {waiting.pool!r} no"
            f" node has more than {largest}."
        )
    detail = {
        None: "Its slots are free: it starts in a moment.",
        Reason.SLOTS_IN_USE: f"It needs {waiting.num_slots} of {total} slots, and fewer are free"
        f"{' on each node' * (len(of_pool) > 1)}.",
        Reason.BEHIND_OTHERS: "A trial that came before waits for slots.",
        Reason.MAX_SLOTS: f"Its experiment may use {waiting.max_slots} slots at a time.",
        Reason.TOO_LARGE: too_large,
        Reason.POOL_LIMIT: "Its pool has as many slots in use as it may.",
        Reason.PREEMPTING: "Others store a checkpoint and make room for it.",
    }[reason]
    return views.QueueEntry(
        trial_id=waiting.trial_id,
        experiment_id=waiting.experiment_id,
        experiment_name=name,
        num_slots=waiting.num_slots,
        waiting_since=max(created_at, ended_at or 0.0),
        reason="starting" if reason is None else reason.value,
        detail=detail,
    )


@router.get("/events", responses={200: {"content": {"text/event-stream": {}}}})
async def follow_events(
    master: MasterOf,
    after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    experiment_id: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
) -> Response:
    """Follow changes as server-sent events, from a cursor on or from now.

    A browser that connects again says the last id by itself, which then goes before `after`.
    """
    cursor = after if last_event_id is None else last_event_id
    if cursor is None:
        cursor = await asyncio.to_thread(_newest_event, master)
    return StreamingResponse(
        _stream(master, cursor, experiment_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream(master: Master, cursor: int, experiment_id: int | None) -> AsyncIterator[str]:
    yield ": connected\n\n"
    while not master.is_closing:
        with master.events.listen() as changed:
            events = await asyncio.to_thread(_read_events, master, cursor, experiment_id)
            if not events:
                if not await wait_for(changed, _KEEP_ALIVE_S):
                    yield ": alive\n\n"
                continue
        for event in events:
            cursor = event.id
            yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n"


def _newest_event(master: Master) -> int:
    with master.database.read() as connection:
        return connection.execute(select(func.max(tables.events.c.id))).scalar() or 0


def _read_events(master: Master, after: int, experiment_id: int | None) -> list[resources.Event]:
    events = tables.events
    query = select(events).where(events.c.id > after).order_by(events.c.id)
    if experiment_id is not None:
        query = query.where(events.c.experiment_id == experiment_id)
    with master.database.read() as connection:
        rows = connection.execute(query.limit(_EVENTS_PER_READ))
        return [resources.Event(**row._mapping) for row in rows]


def _live_attempts(connection: Connection) -> list[Row[Any]]:
    attempts = tables.attempts
    query = select(attempts).where(attempts.c.state.in_(LIVE_ATTEMPTS))
    return list(connection.execute(query))
