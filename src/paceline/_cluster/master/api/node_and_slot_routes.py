"""Routes of nodes: registering and polling for runners, listing and draining for people."""

import asyncio
import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
import sqlalchemy as sa
from fastapi import Path, Query, Request, Response

from paceline._cluster.master.api.access_guard import IdentityOf
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.attempts import live_attempts
from paceline._cluster.master.experiments.scheduler_input import drained_slots, read_pools
from paceline._cluster.master.master import Master
from paceline._cluster.master.nodes.node_registry import UnknownNodeError
from paceline._cluster.master.nodes.node_work import work_for
from paceline._cluster.master.nodes.registration_checks import NodeRefusedError, RegisteredNode
from paceline._cluster.master.scheduling.pools import NodeSlots, PoolSettings, in_pools, pool_of
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import slots_by_node
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.quotas import read_reservations
from paceline._cluster.master.store.reach import current_reach
from paceline._cluster.messages import runner_messages as messages
from paceline._cluster.messages.master_models import DrainNode, Node, NodeState, Slot
from paceline._cluster.messages.states import LIVE_ATTEMPTS, LIVE_TRIALS

slot_router = ApiRouter(tags=["master"], route_class=ReadingRoute)


@slot_router.get("/slots")
def list_slots(master: MasterOf) -> list[Slot]:
    """List the slots of all nodes and who uses them; slots of lost nodes only if used."""
    seen = seen_trials(master)
    with master.database.read(everything=True) as connection:
        users = {
            (node_id, slot): row
            for row in running_attempts(connection)
            for node_id, slots in slots_by_node(row).items()
            for slot in slots
        }
        drained, pools = all_drained(master, connection), read_pools(connection)
    nodes = [(messages.LOCAL_NODE, master.machine, pool_of(messages.DEFAULT_POOL, {}, pools))]
    registered = master.nodes.all()
    found = _nodes_in_pools(master, registered, pools)
    nodes += [(node.id, node.facts, own.pool) for node, own in zip(registered, found, strict=True)]
    return [
        Slot(
            id=slot,
            node=facts.name,
            device=device,
            memory_bytes=memory or None,
            pool=pool,
            is_drained=slot in drained.get(node_id, ()),
            is_used=(node_id, slot) in users,
            **_told_of_user(users.get((node_id, slot)), seen),
        )
        for node_id, facts, pool in nodes
        for slot, (device, memory) in enumerate(_devices(facts))
        if (node_id, slot) in users
        or node_id == messages.LOCAL_NODE
        or not master.nodes.presence.is_lost(node_id)
    ]


def _told_of_user(user: sa.Row[Any] | None, seen: frozenset[int] | None) -> dict[str, int | None]:
    """Return the ids of an attempt that has a slot, if the sender sees its trial."""
    if user is None or (seen is not None and user.trial_id not in seen):
        return {"trial_id": None, "experiment_id": None, "attempt_id": None}
    ids = {"trial_id": user.trial_id, "experiment_id": user.experiment_id}
    return {**ids, "attempt_id": user.id}


def seen_trials(master: Master) -> frozenset[int] | None:
    """Return the live trials that the sender sees; None for all."""
    reach = current_reach()
    if reach is None or reach.sees is None:
        return None
    trials = tables.trials.c
    with master.database.read() as connection:
        query = sa.select(trials.id).where(trials.state.in_(LIVE_TRIALS))
        return frozenset(connection.execute(query).scalars())


def all_drained(master: Master, connection: sa.Connection) -> dict[int, frozenset[int]]:
    """Return the slots closed to attempts, by node.

    These are single drained slots, and all slots of nodes that are drained or outside the pool of
    their token.
    """
    drained = drained_slots(connection)
    for node in _nodes_in_pools(master, master.nodes.all(), read_pools(connection)):
        if not node.is_open:
            drained[node.node_id] = frozenset(node.slots)
    return drained


def _nodes_in_pools(
    master: Master, nodes: Iterable[RegisteredNode], pools: Mapping[str, PoolSettings]
) -> list[NodeSlots]:
    return in_pools(
        [
            node.slots(
                can_join=False,
                is_open=not node.is_draining,
                only_pool=master.nodes.only_pool(node),
            )
            for node in nodes
        ],
        pools,
    )


def count_drained(
    drained: Mapping[int, frozenset[int]],
    nodes: Mapping[int, int],
    held: Iterable[tuple[int, Collection[int]]],
) -> dict[str, int]:
    """Return how many slots are drained, and how many of these attempts hold, by field of a model.

    Args:
        drained: The slots that get no attempts, by node.
        nodes: The number of slots of the nodes to count.
        held: Nodes with slots that an attempt has there.
    """
    counted = {
        node_id: {slot for slot in drained.get(node_id, ()) if slot < number}
        for node_id, number in nodes.items()
    }
    leaving = {(node_id, slot) for node_id, slots in held for slot in slots}
    return {
        "num_slots_drained": sum(map(len, counted.values())),
        "num_slots_draining": sum(slot in counted.get(node_id, ()) for node_id, slot in leaving),
    }


def _devices(facts: messages.NodeFacts) -> Iterable[tuple[str, int]]:
    sizes = facts.device_memory_bytes or [0] * len(facts.devices)
    return zip(facts.devices, sizes, strict=False)


def running_attempts(connection: sa.Connection) -> list[sa.Row[Any]]:
    """Return the live attempts; any of them may hold slots."""
    attempts = tables.attempts
    query = sa.select(attempts).where(attempts.c.state.in_(LIVE_ATTEMPTS))
    return list(connection.execute(query).all())


def drain_slots(
    master: Master,
    transaction: Transaction,
    node_id: int,
    slots: Collection[int],
    *,
    what: str,
    finish: bool,
) -> None:
    """Place nothing more on slots of a node.

    Args:
        master: The master.
        transaction: Everything happens in it, or nothing.
        node_id: The node.
        slots: Which of its slots.
        what: The drained object, for attempts that are asked to leave.
        finish: Let running attempts end there.
    """
    connection = transaction.connection
    for slot in set(slots) - drained_slots(connection).get(node_id, frozenset()):
        connection.execute(sa.insert(tables.drained_slots).values(node_id=node_id, slot=slot))
    for attempt in live_attempts(connection):
        if not finish and set(slots) & set(slots_by_node(attempt).get(node_id, ())):
            master.changes.preempt(transaction, attempt, f"{what} is drained")
    transaction.after_commit(master.changes.wakeups.wake)


def resume_slots(
    master: Master, transaction: Transaction, node_id: int, slots: Collection[int]
) -> None:
    """Take drained slots of a node back."""
    drained = tables.drained_slots
    transaction.connection.execute(
        sa.delete(drained).where(drained.c.node_id == node_id, drained.c.slot.in_(slots))
    )
    transaction.after_commit(master.changes.wakeups.wake)


node_router = ApiRouter(tags=["nodes"], route_class=ReadingRoute)

NodeId = Annotated[int, Path(ge=1, le=2**62)]
Name = Annotated[str, Path(pattern=messages.NAME_PATTERN)]
_Drained: TypeAlias = Mapping[int, frozenset[int]]
_MAX_WAIT_S = 60.0
_OF_TOKEN = ("other_node", "other_pool")
_BODY: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}
}


@node_router.post("/nodes", openapi_extra=_BODY)
async def register_node(request: Request, master: MasterOf, identity: IdentityOf) -> Response:
    """Register a node, or a new session of a node known by its key."""
    assert identity is not None
    facts = _decode(await request.body(), messages.NodeFacts)
    _check_node_facts(facts)
    if not facts.address and request.client is not None:
        facts = msgspec.structs.replace(facts, address=request.client.host)
    try:
        session = await asyncio.wrap_future(master.nodes.register(facts, identity.token_id))
    except NodeRefusedError as error:
        raise _refusal(error) from error
    return _json(session)


@node_router.post("/nodes/{node_id}/poll", openapi_extra=_BODY)
async def poll_node(
    node_id: NodeId, request: Request, master: MasterOf, identity: IdentityOf
) -> Response:
    """Report a node's attempts and read its orders; waits for changes."""
    assert identity is not None
    poll = _decode(await request.body(), messages.NodePoll)
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
            # A node without attempts has nothing to do until it is informed: many idle nodes poll.
            if changed.is_set() or work.wanted or poll.attempts:
                work = await asyncio.to_thread(_node_work, master, node_id, poll)
    return _json(work)


@node_router.get("/nodes")
def list_nodes(master: MasterOf, include_local: Annotated[bool, Query()] = False) -> list[Node]:
    """List the nodes with their state, slots and running attempts.

    With `include_local`, the master's own machine comes first, as the node `local`, if it has
    slots.
    """
    seen = seen_trials(master)
    with master.database.read(everything=True) as connection:
        live = sorted(running_attempts(connection), key=lambda attempt: attempt.id)
        drained = all_drained(master, connection)
        pools = read_pools(connection)
        resting = master.reconciler.resting_nodes(connection, time.time())
        reserved = read_reservations(connection, time.time())
    nodes = [_node_view(master, node, live, drained) for node in master.nodes.all()]
    if include_local and master.devices:
        pool = pool_of(messages.DEFAULT_POOL, {}, pools)
        nodes = [_local_view(master, pool, live, drained), *nodes]
    hidden = {row.id for row in live if seen is not None and row.trial_id not in seen}
    return [
        node.model_copy(
            update={
                "rests_until": resting.get(node.id),
                "attempts": [one for one in node.attempts if one not in hidden],
                "reservations": [one for one in reserved if one.node == node.name],
            }
        )
        for node in nodes
    ]


@node_router.post("/nodes/{name}/drain", status_code=204)
async def drain_node(name: Name, wanted: DrainNode, master: MasterOf) -> None:
    """Close a node to new attempts; running attempts move to other nodes, or finish.

    The master's own node is drained by all of its slots.
    """
    if name == messages.LOCAL_NAME:
        what, slots = f"the node {name}", range(len(master.devices))
        await write_rows(
            master,
            lambda transaction: drain_slots(
                master, transaction, messages.LOCAL_NODE, slots, what=what, finish=wanted.finish
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


@node_router.post("/nodes/{name}/resume", status_code=204)
async def resume_node(name: Name, master: MasterOf) -> None:
    """Take back a drained node, or one that rests after failures."""
    if name == messages.LOCAL_NAME:
        slots = range(len(master.devices))
        await write_rows(
            master,
            lambda transaction: resume_slots(master, transaction, messages.LOCAL_NODE, slots),
        )
        return
    node = _node_named(master, name)
    await write_rows(
        master,
        lambda transaction: master.nodes.set_draining(transaction, node.id, is_draining=False),
    )
    master.changes.failing_nodes.note_success(node.id)


@node_router.delete("/nodes/{name}", status_code=204)
async def forget_node(name: Name, master: MasterOf) -> None:
    """Forget a lost, departed or drained node without attempts."""
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
    """Wait for news; return whether the connection was closed meanwhile."""
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


def _hear_node(master: Master, node_id: int, poll: messages.NodePoll, token_id: int | None) -> None:
    try:
        master.nodes.hear(node_id, poll, token_id)
    except NodeRefusedError as error:
        raise _refusal(error, 403 if error.code == "other_token" else 409) from error
    except UnknownNodeError as error:
        raise ApiError(404, "unknown_node", str(error)) from error


def _node_work(master: Master, node_id: int, poll: messages.NodePoll) -> messages.NodeWork:
    work = work_for(master.database, master.changes, master.nodes, node_id, poll)
    # Pool check for idle nodes only: running attempts may finish after a change of pool.
    if not (work.wanted or poll.attempts):
        try:
            master.nodes.check_pool(node_id)
        except NodeRefusedError as error:
            raise _refusal(error) from error
    return work


def _refusal(error: NodeRefusedError, status: int = 409) -> ApiError:
    """Return the error for a refused runner; 403 if its token is bound to something else."""
    return ApiError(403 if error.code in _OF_TOKEN else status, error.code, str(error))


def _node_named(master: Master, name: str) -> RegisteredNode:
    for node in master.nodes.all():
        if node.name == name:
            return node
    known = ", ".join(node.name for node in master.nodes.all()) or "none"
    raise ApiError(404, "not_found", f"There is no node {name!r}. The nodes are: {known}.")


def _live_attempts(connection: sa.Connection) -> list[sa.Row[Any]]:
    attempts = tables.attempts
    query = sa.select(attempts).where(
        attempts.c.state.in_(LIVE_ATTEMPTS), attempts.c.node_id.is_not(None)
    )
    return list(connection.execute(query.order_by(attempts.c.id)).all())


def _node_view(
    master: Master, node: RegisteredNode, live: list[sa.Row[Any]], drained: _Drained
) -> Node:
    use = _node_use(node.id, node.facts, live, drained)
    return Node(
        **_told_by_node(node.facts),
        **use,
        id=node.id,
        state=_node_state(master, node, has_attempts=bool(use["attempts"])),
        pool=node.facts.pool,
        registered_at=node.registered_at,
        seen_at=master.nodes.seen_at(node.id),
        problem=master.nodes.problem(node),
    )


def _local_view(master: Master, pool: str, live: list[sa.Row[Any]], drained: _Drained) -> Node:
    """Return the master's machine as a node; drained if all of its slots are drained."""
    use = _node_use(messages.LOCAL_NODE, master.machine, live, drained)
    state: NodeState = "ready"
    if use["num_slots_drained"] == len(master.devices):
        state = "draining" if use["num_slots_used"] else "drained"
    return Node(
        **_told_by_node(master.machine),
        **use,
        id=messages.LOCAL_NODE,
        state=state,
        pool=pool,
        registered_at=master.started_at,
        seen_at=time.time(),
    )


def _told_by_node(facts: messages.NodeFacts) -> dict[str, Any]:
    names = ("name", "labels", "devices", "device_kind", "device_memory_bytes", "num_cores",
             "memory_bytes", "version", "python_version", "address", "unix_user")  # fmt: skip
    return {name: getattr(facts, name) for name in names}


def _node_use(
    node_id: int, facts: messages.NodeFacts, live: list[sa.Row[Any]], drained: _Drained
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


def _check_node_facts(facts: messages.NodeFacts) -> None:
    for name, value in (("name", facts.name), ("pool", facts.pool)):
        if not re.fullmatch(messages.NAME_PATTERN, value):
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
