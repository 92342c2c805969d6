"""Route of the slots, and draining them: one, or all of a node."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.experiments import drained_slots, live_attempts, read_pools
from paceline.master.nodes import RegisteredNode
from paceline.master.scheduling import NodeSlots, PoolSettings, in_pools, pool_of
from paceline.master.store import Transaction, slots_by_node, tables
from paceline.messages.node_runners import DEFAULT_POOL, LOCAL_NODE, NodeFacts
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
        drained, pools = all_drained(master, connection), read_pools(connection)
    nodes = [(LOCAL_NODE, master.machine, pool_of(DEFAULT_POOL, {}, pools))]
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
            trial_id=user.trial_id if user else None,
            experiment_id=user.experiment_id if user else None,
            attempt_id=user.id if user else None,
        )
        for node_id, facts, pool in nodes
        for slot, (device, memory) in enumerate(_devices(facts))
        if (user := users.get((node_id, slot)))
        or node_id == LOCAL_NODE
        or not master.nodes.presence.is_lost(node_id)
    ]


def all_drained(master: Master, connection: Connection) -> dict[int, frozenset[int]]:
    """Return the slots that get no attempts, by node.

    They are single ones, and all of nodes that are drained, or not in the pool of their token.
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


def _devices(facts: NodeFacts) -> Iterable[tuple[str, int]]:
    sizes = facts.device_memory_bytes or [0] * len(facts.devices)
    return zip(facts.devices, sizes, strict=False)


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
