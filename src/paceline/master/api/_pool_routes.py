"""Routes of pools and single slots: how they are shared, and what gets nothing."""

import time
from typing import Annotated

from fastapi import Path
from sqlalchemy import delete, insert

from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, write_rows
from paceline.master.api._slot_routes import (
    all_drained,
    count_drained,
    drain_slots,
    resume_slots,
)
from paceline.master.experiments import read_pools
from paceline.master.scheduling import PoolSettings
from paceline.master.starters import PoolRunners
from paceline.master.store import Transaction, tables
from paceline.messages.node_runners import LOCAL_NAME, LOCAL_NODE, NAME_PATTERN
from paceline.messages.nodes_and_slots import DrainNode
from paceline.messages.pools_and_queue import Pool, SetPool

router = ApiRouter(tags=["nodes"], route_class=ReadingRoute)

Name = Annotated[str, Path(pattern=NAME_PATTERN)]
SlotNumber = Annotated[int, Path(ge=0, le=2**31 - 1)]


@router.get("/pools")
def list_pools(master: MasterOf) -> list[Pool]:
    """List the pools that have nodes or settings, or whose runners the master starts."""
    with master.database.read() as connection:
        cluster = master.reconciler.cluster(connection, time.time())
        drained = all_drained(master, connection)
    started = master.pool_runners
    names = {node.pool for node in cluster.nodes} | set(cluster.pools) | set(started.names())
    pools = []
    for name in sorted(names):
        nodes = [node for node in cluster.nodes if node.pool == name]
        sizes = {node.node_id: len(node.slots) for node in nodes}
        held = [part for one in cluster.holding for part in one.parts if part[0] in sizes]
        settings = cluster.pools.get(name, PoolSettings())
        pools.append(
            Pool(
                name=name,
                policy=settings.policy.value,
                max_slots=settings.max_slots,
                labels=dict(settings.labels),
                num_nodes=len(nodes),
                num_slots=sum(sizes.values()),
                num_slots_used=sum(len(slots) for _, slots in held),
                **count_drained(drained, sizes, held),
                failure=started.failure(name),
                detail=_describe_absent(started, name, len(nodes)),
            )
        )
    return pools


@router.put("/pools/{name}", status_code=204)
async def set_pool(name: Name, wanted: SetPool, master: MasterOf) -> None:
    """Say how a pool is shared, and which nodes belong to it by their labels."""

    def job(transaction: Transaction) -> None:
        _forget(transaction, name)
        transaction.connection.execute(
            insert(tables.pools).values(name=name, **wanted.model_dump())
        )
        _tell(transaction, master)

    await write_rows(master, job)


@router.delete("/pools/{name}", status_code=204)
async def reset_pool(name: Name, master: MasterOf) -> None:
    """Share a pool as one of which nothing was said: first come, first served."""

    def job(transaction: Transaction) -> None:
        if name not in read_pools(transaction.connection):
            raise ApiError(404, "not_found", f"The pool {name!r} has no settings.")
        _forget(transaction, name)
        _tell(transaction, master)

    await write_rows(master, job)


@router.post("/nodes/{name}/slots/{slot}/drain", status_code=204)
async def drain_slot(name: Name, slot: SlotNumber, wanted: DrainNode, master: MasterOf) -> None:
    """Place nothing more on a slot; what runs there goes on elsewhere, or is finished."""
    node_id = _node_with_slot(master, name, slot)

    def job(transaction: Transaction) -> None:
        what = f"the slot {slot} of the node {name}"
        drain_slots(master, transaction, node_id, [slot], what=what, finish=wanted.finish)

    await write_rows(master, job)


@router.post("/nodes/{name}/slots/{slot}/resume", status_code=204)
async def resume_slot(name: Name, slot: SlotNumber, master: MasterOf) -> None:
    """Take a drained slot back."""
    node_id = _node_with_slot(master, name, slot)

    await write_rows(master, lambda transaction: resume_slots(master, transaction, node_id, [slot]))


def _tell(transaction: Transaction, master: Master) -> None:
    transaction.after_commit(master.changes.wake)
    transaction.after_commit(master.nodes.tell_of_pools)


def _forget(transaction: Transaction, name: str) -> None:
    transaction.connection.execute(delete(tables.pools).where(tables.pools.c.name == name))


def _describe_absent(started: PoolRunners, name: str, num_nodes: int) -> str | None:
    if name in started.names() or num_nodes:
        return started.describe_absent(name, num_nodes)
    return f"No node has joined it. Hint: paceline runner --pool {name}"


def _node_with_slot(master: Master, name: str, slot: int) -> int:
    """Return the id of a node that has a slot, or answer 404."""
    nodes = {LOCAL_NAME: (LOCAL_NODE, len(master.devices))}
    nodes |= {node.name: (node.id, len(node.facts.devices)) for node in master.nodes.all()}
    if name not in nodes:
        known = ", ".join(nodes)
        raise ApiError(404, "not_found", f"There is no node {name!r}. The nodes are: {known}.")
    node_id, number = nodes[name]
    if slot >= number:
        raise ApiError(
            404,
            "not_found",
            f"The node {name!r} must have the slot {slot}, but has {number}, counted from 0.",
        )
    return node_id
