"""Route of the slots, and draining them: one, or all of a node."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.experiments import drained_slots, live_attempts, read_pools
from paceline.master.scheduling import in_pools, pool_of
from paceline.master.store import Transaction, slots_by_node, tables
from paceline.messages.node_runners import DEFAULT_POOL, LOCAL_NAME, LOCAL_NODE
from paceline.messages.nodes_and_slots import Slot
from paceline.messages.states import LIVE_ATTEMPTS

router = ApiRouter(tags=["master"], route_class=ReadingRoute)


@router.get("/slots")
def list_slots(master: MasterOf) -> list[Slot]:
    """List the slots of all nodes and who uses them; those of lost nodes only if used."""
    with master.database.read() as connection:
        users = {
            (node_id, slot): row
            for row in running_attempts(connection)
            for node_id, slots in slots_by_node(row).items()
            for slot in slots
        }
        drained, pools = drained_slots(connection), read_pools(connection)
    nodes = [(LOCAL_NODE, LOCAL_NAME, False, master.devices, pool_of(DEFAULT_POOL, {}, pools))]
    for node in master.nodes.all():
        own = node.slots(can_join=False, only_pool=master.nodes.only_pool(node))
        [found] = in_pools([own], pools)
        is_closed = node.is_draining or not found.is_open
        nodes.append((node.id, node.name, is_closed, node.facts.devices, found.pool))
    return [
        Slot(
            id=slot,
            node=name,
            device=device,
            pool=pool,
            is_drained=is_draining or slot in drained.get(node_id, ()),
            trial_id=user.trial_id if user else None,
            experiment_id=user.experiment_id if user else None,
            attempt_id=user.id if user else None,
        )
        for node_id, name, is_draining, devices, pool in nodes
        for slot, device in enumerate(devices)
        if (user := users.get((node_id, slot)))
        or node_id == LOCAL_NODE
        or not master.nodes.is_lost(node_id)
    ]


def running_attempts(connection: Connection) -> list[Row[Any]]:
    """Return the attempts that may have slots."""
    attempts = tables.attempts
    query = select(attempts).where(attempts.c.state.in_(LIVE_ATTEMPTS))
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
        what: What is drained, for those who are told to leave.
        finish: Let what runs there end there.
    """
    connection = transaction.connection
    for slot in set(slots) - drained_slots(connection).get(node_id, frozenset()):
        connection.execute(insert(tables.drained_slots).values(node_id=node_id, slot=slot))
    for attempt in live_attempts(connection):
        if not finish and set(slots) & set(slots_by_node(attempt).get(node_id, ())):
            master.changes.preempt(transaction, attempt, f"{what} is drained")
    transaction.after_commit(master.changes.wake)


def resume_slots(
    master: Master, transaction: Transaction, node_id: int, slots: Collection[int]
) -> None:
    """Take drained slots of a node back."""
    drained = tables.drained_slots
    transaction.connection.execute(
        delete(drained).where(drained.c.node_id == node_id, drained.c.slot.in_(slots))
    )
    transaction.after_commit(master.changes.wake)
