"""Routes by which the master is watched: for people, and for Prometheus."""

import time
from typing import Any

import psutil
from fastapi import Request, Response
from sqlalchemy import Connection

from paceline.master._master import Master
from paceline.master._measurements import LAG_BOUNDS_S, REQUEST_BOUNDS_S
from paceline.master._prometheus_text import CONTENT_TYPE, PrometheusText
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._master_routes import read_master
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.experiments import NUM_TRIALS, WITHIN_S, missing_methods
from paceline.master.store import (
    ATTEMPTS,
    CHECKPOINTS,
    EXPERIMENTS,
    POINTS,
    TRIALS,
    checkpoint_sizes,
    num_waiting,
    number_by_state,
)
from paceline.messages.master_info import MasterStatus
from paceline.messages.node_runners import LOCAL_NAME, LOCAL_NODE

router = ApiRouter(tags=["master"], route_class=ReadingRoute)

_MIN_FREE_BYTES = 2**30
_MANY_WRITES = 500
_LONG_LAG_S = 60.0
_STATES = ("experiments", "trials", "attempts", "checkpoints")


@router.get("/status")
def read_status(request: Request, master: MasterOf) -> MasterStatus:
    """Tell what the master is, how busy it is, and what is wrong."""
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
        ingest_lag_s=master.measurements.lag()[0],
        num_writes_waiting=master.database.num_waiting,
        num_connections=sum(_connections(request).values()) or None,
        num_requests=sum(master.measurements.requests().values()),
        num_slow_requests=sum(master.measurements.slow().values()),
        slow_request_s=master.measurements.slow_request_s,
        memory_bytes=psutil.Process().memory_info().rss,
        sizes=master.sizes.read(),
        free_bytes=master.sizes.free_bytes(),
        problems=_status_problems(master, found),
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def read_metrics(request: Request, master: MasterOf) -> Response:
    """Tell numbers of the master in the text form of Prometheus."""
    shown = PrometheusText()
    _add_store_to_prometheus(shown, master)
    _add_requests_to_prometheus(shown, master)
    connections = [({"kind": kind}, n) for kind, n in _connections(request).items()]
    shown.series("paceline_connections", "Open connections.", "gauge", connections)
    _add_process_to_prometheus(shown, master)
    return Response(shown.text(), media_type=CONTENT_TYPE)


def _status_facts(master: Master) -> dict[str, Any]:
    with master.database.read() as connection:
        return {
            "experiments": number_by_state(connection, EXPERIMENTS),
            "trials": number_by_state(connection, TRIALS),
            "attempts": number_by_state(connection, ATTEMPTS),
            "checkpoints": number_by_state(connection, CHECKPOINTS),
            "stored": checkpoint_sizes(connection, [0]).get(0, (0, 0)),
            "num_points": sum(number_by_state(connection, POINTS).values()),
            "num_waiting": num_waiting(connection),
            "missing_methods": missing_methods(connection),
            "failing_nodes": _describe_failing_nodes(master, connection),
            "failing_stores": master.changes.failing_stores.describe(connection),
        }


def _describe_failing_nodes(master: Master, connection: Connection) -> list[str]:
    now = time.time()
    names = {LOCAL_NODE: LOCAL_NAME} | {node.id: node.name for node in master.nodes.all()}
    return [
        f"The node {names.get(node_id, node_id)} rests for {until - now:.0f} s, as attempts of"
        f" {NUM_TRIALS} trials or more failed there within {WITHIN_S:.0f} s. Hint: the logs of"
        " these trials say why; `paceline runner drain` keeps the node out for longer."
        for node_id, until in master.reconciler.resting_nodes(connection, now).items()
    ]


def _status_problems(master: Master, found: dict[str, Any]) -> list[str]:
    problems = [
        f"Experiment {number} waits, as its search method `{name}` is not installed on the master."
        for number, name in found["missing_methods"]
    ]
    problems += [
        f"Experiment {one.experiment_id} waits, as checkpoint {one.uuid} of trial {one.trial_id}"
        f" cannot be stored: {one.why}."
        for one in master.transfers.waiting.all()
    ]
    problems += [one.text for one in master.changes.storage_calls.silent()]
    problems += [*found["failing_stores"], *found["failing_nodes"]]
    if master.database.failure is not None:
        problems.append(str(master.database.failure))
    free = master.sizes.free_bytes()
    if free < _MIN_FREE_BYTES:
        problems.append(f"The disk of the home has only {free / 2**20:.0f} MiB left.")
    lag = master.measurements.lag()[0]
    if lag is not None and lag > _LONG_LAG_S:
        problems.append(f"The newest records were {lag:.0f} s old when they were stored.")
    if master.database.num_waiting > _MANY_WRITES:
        problems.append(f"{master.database.num_waiting} changes wait for the database.")
    slow = sum(master.measurements.slow().values())
    if slow:
        limit = f"{master.measurements.slow_request_s:g} s"
        problems.append(
            f"{slow} request{'s' if slow > 1 else ''} took longer than {limit} since the start;"
            " `master.log` in the home names them."
        )
    return problems


def _add_store_to_prometheus(shown: PrometheusText, master: Master) -> None:
    found = _status_facts(master)
    shown.gauge("paceline_info", "The version of Paceline.", 1, version=master.version)
    info = read_master(master)
    shown.gauge("paceline_slots", "Slots of the master.", info.num_slots)
    shown.gauge("paceline_slots_used", "Slots that attempts hold.", info.num_slots_used)
    shown.gauge("paceline_slots_drained", "Slots that get no attempts.", info.num_slots_drained)
    shown.gauge("paceline_queue_trials", "Trials that wait for slots.", found["num_waiting"])
    for kind in _STATES:
        states = [({"state": state}, n) for state, n in sorted(found[kind].items())]
        shown.series(f"paceline_{kind}", f"Stored {kind} by state.", "gauge", states)
    shown.gauge("paceline_checkpoint_bytes", "Bytes of all checkpoints.", found["stored"][1])
    shown.gauge("paceline_metric_points", "Stored points of metrics.", found["num_points"])
    shown.gauge(
        "paceline_writes_waiting",
        "Changes that wait for the database.",
        master.database.num_waiting,
    )
    newest, total, cumulative = master.measurements.lag()
    shown.gauge("paceline_ingest_newest_lag_seconds", "The lag of the newest records.", newest)
    shown.histogram(
        "paceline_ingest_lag_seconds",
        "How old the newest record of a request was when it was stored.",
        LAG_BOUNDS_S,
        [({}, total, cumulative)],
    )
    sizes = [({"part": part}, size) for part, size in sorted(master.sizes.read().items())]
    shown.series("paceline_home_bytes", "Bytes of the parts of the home.", "gauge", sizes)
    shown.gauge("paceline_home_free_bytes", "Free bytes of its disk.", master.sizes.free_bytes())


def _add_requests_to_prometheus(shown: PrometheusText, master: Master) -> None:
    requests = [
        ({"method": method, "route": route, "status": str(status)}, number)
        for (method, route, status), number in sorted(master.measurements.requests().items())
    ]
    shown.series("paceline_http_requests_total", "Requests answered.", "counter", requests)
    slow = [({"route": route}, n) for route, n in sorted(master.measurements.slow().items())]
    shown.series("paceline_slow_requests_total", "Slow requests.", "counter", slow)
    shown.histogram(
        "paceline_http_request_seconds",
        "Seconds until an answer began.",
        REQUEST_BOUNDS_S,
        [
            ({"route": route}, total, cumulative)
            for route, (total, cumulative) in sorted(master.measurements.seconds().items())
        ],
    )


def _add_process_to_prometheus(shown: PrometheusText, master: Master) -> None:
    process = psutil.Process()
    times = process.cpu_times()
    shown.gauge(
        "process_start_time_seconds", "When the master started, since 1970.", master.started_at
    )
    shown.counter(
        "process_cpu_seconds_total", "Processor time of the master.", times.user + times.system
    )
    shown.gauge("process_resident_memory_bytes", "Memory of the master.", process.memory_info().rss)
    shown.gauge("process_open_fds", "Open files of the master.", process.num_fds())


def _connections(request: Request) -> dict[str, int]:
    """Return the number of open connections by kind; nothing if another server serves."""
    connections = getattr(request.app.state, "connections", None)
    return {} if connections is None else connections.numbers()
