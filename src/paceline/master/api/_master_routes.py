"""Routes of the master itself: health, events, shutdown."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import func, select

from paceline.master._master import Master
from paceline.master._waiting_requests import wait_for
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.api._slot_routes import all_drained, count_drained, running_attempts
from paceline.master.api._web_ui_files import has_web_ui
from paceline.master.store import EXPERIMENTS, num_slots_of, number_by_state, slots_by_node, tables
from paceline.messages.events import Event
from paceline.messages.master_info import MasterInfo, Shutdown
from paceline.messages.states import ExperimentState

router = ApiRouter(tags=["master"], route_class=ReadingRoute)

_KEEP_ALIVE_S = 15.0
_EVENTS_PER_READ = 500


@router.get("/health")
async def read_health(master: MasterOf) -> dict[str, str]:
    """Tell that the master answers; needs no token."""
    return {"status": "ok", "version": master.version}


@router.get("/master")
def read_master(master: MasterOf) -> MasterInfo:
    """Tell what the master is and how busy it is."""
    with master.database.read() as connection:
        states = number_by_state(connection, EXPERIMENTS)
        attempts = running_attempts(connection)
        drained = all_drained(master, connection)
    nodes = master.reconciler.slots()
    return MasterInfo(
        version=master.version,
        cluster_id=master.home.cluster_id,
        started_at=master.started_at,
        home=str(master.home.path),
        num_slots=sum(len(node.slots) for node in nodes),
        num_slots_used=sum(num_slots_of(row) for row in attempts),
        **count_drained(
            drained,
            {node.node_id: len(node.slots) for node in nodes},
            [held for row in attempts for held in slots_by_node(row).items()],
        ),
        num_active_experiments=states.get(ExperimentState.ACTIVE.value, 0),
        has_web_ui=has_web_ui(),
    )


@router.post("/master/shutdown", status_code=202)
async def shut_down(request: Request, wanted: Shutdown) -> None:
    """Stop the master, after its attempts have left unless they are to be kept."""
    stop: Callable[[Shutdown], None] = request.app.state.shut_down
    stop(wanted)


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
        _event_stream(master, cursor, experiment_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _event_stream(
    master: Master, cursor: int, experiment_id: int | None
) -> AsyncIterator[str]:
    yield ": connected\n\n"
    alive_at = time.monotonic() + _KEEP_ALIVE_S
    while not master.is_closing:
        with master.events.listen() as changed:
            events = await asyncio.to_thread(_read_events, master, cursor, experiment_id)
            if not events:
                # Changes of other experiments end the wait too.
                await wait_for(changed, max(alive_at - time.monotonic(), 0.0))
                if time.monotonic() >= alive_at:
                    yield ": alive\n\n"
                    alive_at = time.monotonic() + _KEEP_ALIVE_S
                continue
        for event in events:
            cursor = event.id
            yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n"


def _newest_event(master: Master) -> int:
    with master.database.read() as connection:
        return connection.execute(select(func.max(tables.events.c.id))).scalar() or 0


def _read_events(master: Master, after: int, experiment_id: int | None) -> list[Event]:
    events = tables.events
    query = select(events).where(events.c.id > after).order_by(events.c.id)
    if experiment_id is not None:
        query = query.where(events.c.experiment_id == experiment_id)
    with master.database.read() as connection:
        rows = connection.execute(query.limit(_EVENTS_PER_READ))
        return [Event(**row._mapping) for row in rows]
