"""Routes of nodes: registering, polling for attempts, and what people see and do."""

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from fastapi import Path, Query, Request, Response
from sqlalchemy import Connection, Row, select

from paceline.master._master import Master
from paceline.master.api._access_guard import IdentityOf
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, write_rows
from paceline.master.api._slot_routes import (
    all_drained,
    count_drained,
    drain_slots,
    resume_slots,
    running_attempts,
)
from paceline.master.experiments import read_pools
from paceline.master.nodes import NodeRefusedError, RegisteredNode, UnknownNodeError, work_for
from paceline.master.scheduling import pool_of
from paceline.master.store import Transaction, slots_by_node, tables
from paceline.messages.node_runners import (
    DEFAULT_POOL,
    LOCAL_NAME,
    LOCAL_NODE,
    NAME_PATTERN,
    NodeFacts,
    NodePoll,
    NodeWork,
)
from paceline.messages.nodes_and_slots import DrainNode, Node, NodeState
from paceline.messages.states import LIVE_ATTEMPTS

router = ApiRouter(tags=["nodes"], route_class=ReadingRoute)

NodeId = Annotated[int, Path(ge=1, le=2**62)]
Name = Annotated[str, Path(pattern=NAME_PATTERN)]
_Drained: TypeAlias = Mapping[int, frozenset[int]]
_MAX_WAIT_S = 60.0
_OF_TOKEN = ("other_node", "other_pool")
_BODY: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}
}


@router.post("/nodes", openapi_extra=_BODY)
async def register_node(request: Request, master: MasterOf, identity: IdentityOf) -> Response:
    """Register a node, or a new session of one that is known by its key."""
    assert identity is not None
    facts = _decode(await request.body(), NodeFacts)
    _check_node_facts(facts)
    if not facts.address and request.client is not None:
        facts = msgspec.structs.replace(facts, address=request.client.host)
    try:
        session = await asyncio.wrap_future(master.nodes.register(facts, identity.token_id))
    except NodeRefusedError as error:
        raise _refusal(error) from error
    return _json(session)


@router.post("/nodes/{node_id}/poll", openapi_extra=_BODY)
async def poll_node(
    node_id: NodeId, request: Request, master: MasterOf, identity: IdentityOf
) -> Response:
    """Say which attempts a node has, and read what it has to do; waits for news."""
    assert identity is not None
    poll = _decode(await request.body(), NodePoll)
    wait_s = min(poll.wait_s, _MAX_WAIT_S, master.nodes.presence.leases.longest_wait_s)
    with master.nodes.presence.polls.listen(node_id) as changed:
        _hear_node(master, node_id, poll, identity.token_id)
        work = await asyncio.to_thread(_node_work, master, node_id, poll)
        if work.version == poll.after and wait_s > 0 and not master.is_closing:
            if await _wait(request, changed, wait_s):
                master.nodes.presence.note_cut_off(node_id, poll)
                return Response(status_code=204)  # to nobody
            # Another session may have begun meanwhile, and another token may be needed.
            _hear_node(master, node_id, poll, identity.token_id)
            # A node without attempts has nothing to do until it is told so: many idle nodes poll.
            if changed.is_set() or work.wanted or poll.attempts:
                work = await asyncio.to_thread(_node_work, master, node_id, poll)
    return _json(work)


@router.get("/nodes")
def list_nodes(master: MasterOf, include_local: Annotated[bool, Query()] = False) -> list[Node]:
    """List the nodes: their state, their slots, and what runs there.

    With `include_local`, the master's own machine comes first, as the node `local`, if it has
    slots.
    """
    with master.database.read() as connection:
        live = sorted(running_attempts(connection), key=lambda attempt: attempt.id)
        drained = all_drained(master, connection)
        pools = read_pools(connection)
        resting = master.reconciler.resting_nodes(connection, time.time())
    nodes = [_node_view(master, node, live, drained) for node in master.nodes.all()]
    if include_local and master.devices:
        pool = pool_of(DEFAULT_POOL, {}, pools)
        nodes = [_local_view(master, pool, live, drained), *nodes]
    return [node.model_copy(update={"rests_until": resting.get(node.id)}) for node in nodes]


@router.post("/nodes/{name}/drain", status_code=204)
async def drain_node(name: Name, wanted: DrainNode, master: MasterOf) -> None:
    """Place nothing more on a node; what runs there goes on elsewhere, or is finished.

    The master's own node is drained by all of its slots.
    """
    if name == LOCAL_NAME:
        what, slots = f"the node {name}", range(len(master.devices))
        await write_rows(
            master,
            lambda transaction: drain_slots(
                master, transaction, LOCAL_NODE, slots, what=what, finish=wanted.finish
            ),
        )
        return
    node = _node_named(master, name)

    def job(transaction: Transaction) -> None:
        master.nodes.set_draining(transaction, node.id, is_draining=True)
        for attempt in _live_attempts(transaction.connection):
            if node.id in slots_by_node(attempt) and not wanted.finish:
                master.changes.preempt(transaction, attempt, f"the node {name} is drained")

    await write_rows(master, job)


@router.post("/nodes/{name}/resume", status_code=204)
async def resume_node(name: Name, master: MasterOf) -> None:
    """Take a drained node back."""
    if name == LOCAL_NAME:
        slots = range(len(master.devices))
        await write_rows(
            master, lambda transaction: resume_slots(master, transaction, LOCAL_NODE, slots)
        )
        return
    node = _node_named(master, name)
    await write_rows(
        master,
        lambda transaction: master.nodes.set_draining(transaction, node.id, is_draining=False),
    )


@router.delete("/nodes/{name}", status_code=204)
async def forget_node(name: Name, master: MasterOf) -> None:
    """Forget a node that is lost, has left or is drained, and has no attempts."""
    node = _node_named(master, name)

    def job(transaction: Transaction) -> None:
        live = _live_attempts(transaction.connection)
        if any(node.id in slots_by_node(attempt) for attempt in live):
            raise ApiError(
                409,
                "in_use",
                f"The node {name!r} must have no attempts to be forgotten, but has some. Hint:"
                f" `paceline runner drain {name}`, and wait until they have left.",
            )
        if not (master.nodes.presence.is_lost(node.id) or node.is_draining):
            raise ApiError(
                409,
                "in_use",
                f"The node {name!r} must be lost, have left or be drained to be forgotten. Hint:"
                " stop its runner on that machine, by Ctrl-C or SIGTERM, and try again.",
            )
        master.nodes.forget(transaction, node.id)

    await write_rows(master, job)


async def _wait(request: Request, changed: asyncio.Event, wait_s: float) -> bool:
    """Wait for news; tell whether the connection was closed meanwhile."""
    news = asyncio.ensure_future(changed.wait())
    closed = asyncio.ensure_future(_await_close(request))
    try:
        await asyncio.wait({news, closed}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return closed.done() and not news.done()
    finally:
        for task in (news, closed):
            task.cancel()


async def _await_close(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _hear_node(master: Master, node_id: int, poll: NodePoll, token_id: int | None) -> None:
    try:
        master.nodes.hear(node_id, poll, token_id)
    except NodeRefusedError as error:
        raise _refusal(error, 403 if error.code == "other_token" else 409) from error
    except UnknownNodeError as error:
        raise ApiError(404, "unknown_node", str(error)) from error


def _node_work(master: Master, node_id: int, poll: NodePoll) -> NodeWork:
    work = work_for(master.database, master.changes, master.nodes, node_id, poll)
    # What runs there goes on.
    if not (work.wanted or poll.attempts):
        try:
            master.nodes.check_pool(node_id)
        except NodeRefusedError as error:
            raise _refusal(error) from error
    return work


def _refusal(error: NodeRefusedError, status: int = 409) -> ApiError:
    """Return the answer to a runner that is refused, 403 if its token is for something else."""
    return ApiError(403 if error.code in _OF_TOKEN else status, error.code, str(error))


def _node_named(master: Master, name: str) -> RegisteredNode:
    for node in master.nodes.all():
        if node.name == name:
            return node
    known = ", ".join(node.name for node in master.nodes.all()) or "none"
    raise ApiError(404, "not_found", f"There is no node {name!r}. The nodes are: {known}.")


def _live_attempts(connection: Connection) -> list[Row[Any]]:
    attempts = tables.attempts
    query = select(attempts).where(
        attempts.c.state.in_(LIVE_ATTEMPTS), attempts.c.node_id.is_not(None)
    )
    return list(connection.execute(query.order_by(attempts.c.id)).all())


def _node_view(
    master: Master, node: RegisteredNode, live: list[Row[Any]], drained: _Drained
) -> Node:
    use = _use_of_node(node.id, node.facts, live, drained)
    return Node(
        **_told_by_node(node.facts),
        **use,
        id=node.id,
        state=_node_state(master, node, has_attempts=bool(use["attempts"])),
        pool=node.facts.pool,
        registered_at=node.registered_at,
        seen_at=master.nodes.seen_at(node.id),
    )


def _local_view(master: Master, pool: str, live: list[Row[Any]], drained: _Drained) -> Node:
    """Return the master's own machine as a node; it is drained if all of its slots are."""
    use = _use_of_node(LOCAL_NODE, master.machine, live, drained)
    state: NodeState = "ready"
    if use["num_slots_drained"] == len(master.devices):
        state = "draining" if use["num_slots_used"] else "drained"
    return Node(
        **_told_by_node(master.machine),
        **use,
        id=LOCAL_NODE,
        state=state,
        pool=pool,
        registered_at=master.started_at,
        seen_at=time.time(),
    )


def _told_by_node(facts: NodeFacts) -> dict[str, Any]:
    names = ("name", "labels", "devices", "device_kind", "device_memory_bytes", "num_cores",
             "memory_bytes", "version", "python_version", "address")  # fmt: skip
    return {name: getattr(facts, name) for name in names}


def _use_of_node(
    node_id: int, facts: NodeFacts, live: list[Row[Any]], drained: _Drained
) -> dict[str, Any]:
    own = {row.id: slots for row in live if (slots := slots_by_node(row).get(node_id))}
    held = [(node_id, slots) for slots in own.values()]
    return {
        "attempts": list(own),
        "num_slots_used": sum(map(len, own.values())),
        **count_drained(drained, {node_id: len(facts.devices)}, held),
    }


def _node_state(master: Master, node: RegisteredNode, *, has_attempts: bool) -> NodeState:
    presence = master.nodes.presence
    if presence.has_left(node.id):
        return "left"
    if presence.is_lost(node.id):
        return "lost"
    if presence.heard_at(node.id) is None or presence.is_cut_off(node.id):
        return "away"
    if node.is_draining:
        return "draining" if has_attempts else "drained"
    return "ready"


def _check_node_facts(facts: NodeFacts) -> None:
    for name, value in (("name", facts.name), ("pool", facts.pool)):
        if not re.fullmatch(NAME_PATTERN, value):
            raise ApiError(
                422,
                "invalid_request",
                f"`{name}` must be up to 63 letters, digits, dots, hyphens and underscores, but got"
                f" {value!r}.",
            )
    if not re.fullmatch(r"[A-Za-z0-9.:%_-]{0,255}", facts.address):
        raise ApiError(
            422,
            "invalid_request",
            f"`address` must be a host name or an IP address, but got {facts.address!r}.",
        )
    if not facts.devices:
        raise ApiError(422, "invalid_request", "`devices` must have an entry, but is empty.")
    sizes = facts.device_memory_bytes
    if len(sizes) not in (0, len(facts.devices)) or any(not 0 <= one < 2**62 for one in sizes):
        raise ApiError(
            422,
            "invalid_request",
            f"`device_memory_bytes` must have a size for each of {len(facts.devices)} devices, but"
            f" got {sizes}.",
        )


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(422, "invalid_request", str(error)) from error


def _json(message: Any) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
