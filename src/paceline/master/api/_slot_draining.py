"""Draining slots: one, or all of the master's own machine."""

from collections.abc import Collection

from sqlalchemy import delete, insert

from paceline.master._master import Master
from paceline.master.experiments import drained_slots, live_attempts
from paceline.master.store import Transaction, slots_by_node, tables


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
