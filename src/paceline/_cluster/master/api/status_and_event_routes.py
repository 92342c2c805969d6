"""Routes for watching the master: status pages, Prometheus metrics, channels for messages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any

import psutil
import sqlalchemy as sa
from fastapi import Header, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from paceline._cluster.master.api.access_guard import AccessIdentity, IdentityOf, admission_check
from paceline._cluster.master.api.node_and_slot_routes import (
    all_drained,
    count_drained,
    running_attempts,
    seen_trials,
)
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.api.web_ui_files import has_web_ui
from paceline._cluster.master.experiments.checkpoint_places import is_own_storage
from paceline._cluster.master.experiments.failure_causes import NUM_TRIALS, WITHIN_S
from paceline._cluster.master.master import Master
from paceline._cluster.master.searches.stored_searches import missing_methods
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import num_slots_of, slots_by_node
from paceline._cluster.master.store.reach import current_user
from paceline._cluster.master.store.row_ids_and_counts import (
    ATTEMPTS,
    CHECKPOINTS,
    EXPERIMENTS,
    POINTS,
    TRIALS,
    checkpoint_sizes,
    num_waiting,
    number_by_state,
)
from paceline._cluster.master.waiting import wait_for
from paceline._cluster.messages.master_models import (
    Event,
    MasterInfo,
    MasterStatus,
    NotifyChannel,
    NotifyTest,
    Shutdown,
)
from paceline._cluster.messages.runner_messages import LOCAL_NAME, LOCAL_NODE, NAME_PATTERN
from paceline._cluster.messages.states import ExperimentState

master_router = ApiRouter(tags=["master"], route_class=ReadingRoute)

# Pages send all their first requests at a time: the slowest answer may be so much later.
_OVERLAP_S = 5.0
_KEEP_ALIVE_S = 15.0
_EVENTS_PER_READ = 500
_MOST_UNSETTLED = 1000


@master_router.get("/health")
async def read_health(master: MasterOf) -> dict[str, str]:
    """Return the state and version of the master; needs no token."""
    return {"status": "ok", "version": master.version}


@master_router.get("/master")
def read_master(master: MasterOf) -> MasterInfo:
    """Return the identity and load of the master."""
    with master.database.read() as connection:
        states = number_by_state(connection, EXPERIMENTS)
    with master.database.read(everything=True) as connection:
        settled = _settled_event(connection)
        attempts = running_attempts(connection)
        drained = all_drained(master, connection)
    nodes = master.nodes.slots()
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
        events_after=settled,
    )


def _settled_event(connection: sa.Connection) -> int:
    """Return the id of an event that is some seconds old, or an earlier id among many new events.

    Not only of events that the sender sees: it would read all events of others to find one.
    """
    ids, times = tables.events.c.id, tables.events.c.time
    newest = connection.scalar(sa.select(sa.func.max(ids))) or 0
    first = max(0, newest - _MOST_UNSETTLED)
    is_old = (ids > first, times < time.time() - _OVERLAP_S)
    return connection.scalar(sa.select(sa.func.max(ids)).where(*is_old)) or first


@master_router.post("/master/shutdown", status_code=202)
async def shut_down(request: Request, wanted: Shutdown) -> None:
    """Stop the master, after its attempts have left unless they are to be kept."""
    stop: Callable[[Shutdown], None] = request.app.state.shut_down
    stop(wanted)


@master_router.get("/events", responses={200: {"content": {"text/event-stream": {}}}})
async def follow_events(
    master: MasterOf,
    identity: IdentityOf,
    after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    experiment_id: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=2**62)] = None,
) -> Response:
    """Follow changes as server-sent events, from a cursor on or from now.

    A browser that connects again says the last id by itself, which then goes before `after`. The
    stream ends once the token is revoked or expired, or the sign-in is over.
    """
    assert identity is not None
    cursor = after if last_event_id is None else last_event_id
    if cursor is None:
        cursor = await asyncio.to_thread(_newest_event, master)
    return StreamingResponse(
        _event_stream(master, identity, cursor, experiment_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _event_stream(
    master: Master, identity: AccessIdentity, cursor: int, experiment_id: int | None
) -> AsyncIterator[str]:
    is_admitted = admission_check(master, identity)
    # Browsers pass over events without data.
    yield "event: connected\n\n"
    alive_at = time.monotonic() + _KEEP_ALIVE_S
    while not master.is_closing:
        with master.events.listen() as changed:
            events = await asyncio.to_thread(_read_events, master, cursor, experiment_id)
            # A change of roles ends the stream as well: the client connects again.
            if not await asyncio.to_thread(is_admitted):
                return
            if not events:
                left_s = alive_at - time.monotonic()
                if identity.expires_at is not None:
                    left_s = min(left_s, identity.expires_at - time.time())
                # Changes of other experiments end the wait too.
                await wait_for(changed, max(left_s, 0.0))
                if time.monotonic() >= alive_at:
                    yield "event: alive\n\n"
                    alive_at = time.monotonic() + _KEEP_ALIVE_S
                continue
        for event in events:
            cursor = event.id
            yield f"id: {event.id}\ndata: {event.model_dump_json()}\n\n"


def _newest_event(master: Master) -> int:
    with master.database.read() as connection:
        return connection.execute(sa.select(sa.func.max(tables.events.c.id))).scalar() or 0


def _read_events(master: Master, after: int, experiment_id: int | None) -> list[Event]:
    events = tables.events
    query = sa.select(events).where(events.c.id > after).order_by(events.c.id)
    if experiment_id is not None:
        query = query.where(events.c.experiment_id == experiment_id)
    with master.database.read() as connection:
        rows = connection.execute(query.limit(_EVENTS_PER_READ))
        return [Event(**row._mapping) for row in rows]


status_and_prometheus_router = ApiRouter(tags=["master"], route_class=ReadingRoute)

_MIN_FREE_BYTES = 2**30
_MANY_WRITES = 500
_LONG_LAG_S = 60.0
_STATES = ("experiments", "trials", "attempts", "checkpoints")


@status_and_prometheus_router.get("/status")
def read_status(request: Request, master: MasterOf) -> MasterStatus:
    """Return the identity, load and problems of the master."""
    found = _status_facts(master)
    checkpoints, checkpoint_bytes = found["stored"]
    return MasterStatus(
        **dict(read_master(master)),
        experiments=found["experiments"],
        trials=found["trials"],
        attempts=found["attempts"],
        num_waiting=found["num_waiting"],
        num_metric_points=found["num_points"],
        num_checkpoints=checkpoints,
        checkpoint_bytes=checkpoint_bytes,
        ingest_lag_s=master.measurements.newest_lag_s,
        num_writes_waiting=master.database.num_waiting,
        num_connections=sum(_connections(request).values()) or None,
        num_requests=master.measurements.num_requests(),
        num_slow_requests=master.measurements.num_slow_requests(),
        slow_request_s=master.measurements.slow_request_s,
        memory_bytes=psutil.Process().memory_info().rss,
        sizes=master.sizes.read(),
        free_bytes=master.sizes.free_bytes(),
        problems=_status_problems(master, found),
        oidc_issuer=None if master.oidc is None else master.oidc.settings.issuer,
        num_users=sum(one.is_active for one in master.users.all()),
        user=current_user(),
        is_admin=master.users.is_admin(current_user()),
    )


@status_and_prometheus_router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
)
def read_metrics(request: Request, master: MasterOf) -> Response:
    """Tell numbers of the master in the text form of Prometheus; also at `/metrics`."""
    shown = CollectorRegistry()
    _add_store(shown, master)
    _add_gauge(shown, "connections", "Open connections.", _connections(request), "kind")
    _add_process(shown, master)
    text = generate_latest(shown) + generate_latest(master.measurements.registry)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _status_facts(master: Master) -> dict[str, Any]:
    with master.database.read(everything=True) as connection:
        failing_nodes = _describe_failing_nodes(master, connection)
    with master.database.read() as connection:
        return {
            "failing_nodes": failing_nodes,
            "experiments": number_by_state(connection, EXPERIMENTS),
            "trials": number_by_state(connection, TRIALS),
            "attempts": number_by_state(connection, ATTEMPTS),
            "checkpoints": number_by_state(connection, CHECKPOINTS),
            "stored": checkpoint_sizes(connection, [0]).get(0, (0, 0)),
            "num_points": sum(number_by_state(connection, POINTS).values()),
            "num_waiting": num_waiting(connection),
            "missing_methods": missing_methods(connection),
            "storages": master.storage_health.problems(connection),
            "failing_stores": master.changes.failing_stores.describe(
                connection, partial(is_own_storage, default_storage=master.changes.default_storage)
            ),
        }


def _describe_failing_nodes(master: Master, connection: sa.Connection) -> list[str]:
    now = time.time()
    names = {LOCAL_NODE: LOCAL_NAME} | {node.id: node.name for node in master.nodes.all()}
    sick = [
        f"The node {names[node.node_id]} rests until a check passes: {node.problem}. Hint:"
        " `paceline doctor` on that machine says what to do."
        for node in master.nodes.slots()
        if node.problem and node.node_id in names
    ]
    return sick + [
        f"The node {names.get(node_id, node_id)} rests for {until - now:.0f} s, as attempts of"
        f" {NUM_TRIALS} trials or more failed there within {WITHIN_S:.0f} s. Hint: the logs of"
        " these trials say why; `paceline runner drain` keeps the node out for longer."
        for node_id, until in master.reconciler.resting_nodes(connection, now).items()
    ]


def _status_problems(master: Master, found: dict[str, Any]) -> list[str]:
    seen = seen_trials(master)
    problems = [
        f"Experiment {number} waits, as its search method `{name}` is not installed on the master."
        for number, name in found["missing_methods"]
    ]
    problems += [
        f"Experiment {one.experiment_id} waits, as checkpoint {one.uuid} of trial {one.trial_id}"
        f" cannot be stored: {one.why}."
        for one in master.transfers.waiting.all()
        if seen is None or one.trial_id in seen
    ]
    problems += [one.text for one in master.changes.storage_calls.silent()]
    problems += [
        *found["storages"],
        *found["failing_stores"],
        *found["failing_nodes"],
        *master.notifier.problems(),
    ]
    if master.oidc is not None and master.oidc.problem is not None:
        problems.append(master.oidc.problem)
    if master.database.failure is not None:
        problems.append(str(master.database.failure))
    free = master.sizes.free_bytes()
    if free < _MIN_FREE_BYTES:
        problems.append(f"The disk of the home has only {free / 2**20:.0f} MiB left.")
    lag = master.measurements.newest_lag_s
    if lag is not None and lag > _LONG_LAG_S:
        problems.append(f"The newest records were {lag:.0f} s old when they were stored.")
    if master.database.num_waiting > _MANY_WRITES:
        problems.append(f"{master.database.num_waiting} changes wait for the database.")
    slow = master.measurements.num_slow_requests()
    if slow:
        limit = f"{master.measurements.slow_request_s:g} s"
        problems.append(
            f"{slow} request{'s' if slow > 1 else ''} took longer than {limit} since the start;"
            " `master.log` in the home names them."
        )
    return problems


def _add_store(shown: CollectorRegistry, master: Master) -> None:
    found = _status_facts(master)
    info = read_master(master)
    add = partial(_add_gauge, shown)
    add("info", "The version of Paceline.", {master.version: 1}, "version")
    add("slots", "Slots of the master.", info.num_slots)
    add("slots_used", "Slots that attempts hold.", info.num_slots_used)
    add("slots_drained", "Slots that get no attempts.", info.num_slots_drained)
    add("queue_trials", "Trials that wait for slots.", found["num_waiting"])
    for kind in _STATES:
        add(kind, f"Stored {kind} by state.", found[kind], "state")
    add("checkpoint_bytes", "Bytes of all checkpoints.", found["stored"][1])
    add("metric_points", "Stored points of metrics.", found["num_points"])
    add("writes_waiting", "Changes that wait for the database.", master.database.num_waiting)
    newest = master.measurements.newest_lag_s
    if newest is not None:
        add("ingest_newest_lag_seconds", "The lag of the newest records.", newest)
    add("home_bytes", "Bytes of the parts of the home.", master.sizes.read(), "part")
    add("home_free_bytes", "Free bytes of its disk.", master.sizes.free_bytes())


def _add_process(shown: CollectorRegistry, master: Master) -> None:
    process = psutil.Process()
    times = process.cpu_times()
    cpu = Counter("cpu_seconds", "Processor time.", namespace="process", registry=shown)
    cpu.inc(times.user + times.system)
    add = partial(_add_gauge, shown, namespace="process")
    add("start_time_seconds", "When the master started, since 1970.", master.started_at)
    add("resident_memory_bytes", "Memory of the master.", process.memory_info().rss)
    add("open_fds", "Open files of the master.", process.num_fds())


def _add_gauge(
    shown: CollectorRegistry,
    name: str,
    what: str,
    value: float | Mapping[str, float],
    label: str | None = None,
    namespace: str = "paceline",
) -> None:
    """Add a number, or with a `label` the numbers of its values."""
    names = () if label is None else (label,)
    gauge = Gauge(name, what, names, namespace=namespace, registry=shown)
    if not isinstance(value, Mapping):
        gauge.set(value)
        return
    for text, number in value.items():
        gauge.labels(text).set(number)


def _connections(request: Request) -> dict[str, int]:
    """Return the number of open connections by kind; nothing if another server serves."""
    connections = getattr(request.app.state, "connections", None)
    return {} if connections is None else connections.numbers()


notify_router = ApiRouter(tags=["master"])


@notify_router.get("/notify-channels")
async def list_notify_channels(master: MasterOf) -> list[NotifyChannel]:
    """List the channels for messages to people, without their addresses."""
    return master.notifier.channels()


@notify_router.post("/notify-channels/{name}/test")
async def test_notify_channel(
    name: Annotated[str, PathParameter(pattern=NAME_PATTERN)], master: MasterOf
) -> NotifyTest:
    """Send a test message to a channel, and return the outcome."""
    try:
        outcome = await asyncio.to_thread(master.notifier.test, name)
    except KeyError:
        raise ApiError(
            404,
            "not_found",
            f"There is no channel {name!r}. Hint: an administrator adds it to `notify.yaml` in the"
            " home, and starts the master again.",
        ) from None
    return NotifyTest(failure=outcome.failure)
