"""What a node has to do: compare what the database wants there with what the node has."""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, or_, select

from paceline.master.experiments import StateChanges, end_runner, read_attempt
from paceline.master.nodes._node_registry import Nodes
from paceline.master.store import Database, Transaction, read_members, tables
from paceline.messages.attempts import AttemptEnd
from paceline.messages.node_runners import NodeLaunch, NodePoll, NodeWork
from paceline.messages.states import LIVE_ATTEMPTS, AttemptState, ExitReason

# Of an attempt that ended so for the master, processes can be alive.
_TAKEN_AWAY = (ExitReason.RUNNER_LOST.value, ExitReason.NOT_FORMED.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Live:
    """An attempt that a node is to have, or its part of one."""

    attempt_id: int
    member: int
    has_begun: bool
    has_others: bool


def work_for(
    database: Database, changes: StateChanges, nodes: Nodes, node_id: int, poll: NodePoll
) -> NodeWork:
    """Return the work of a node that has polled, and end attempts that it has lost.

    An attempt that began there and is there no more is never started again. A node that leaves
    starts none.
    """
    # First, so that what changes while the database is read is told by the next answer.
    version = nodes.presence.version(node_id)
    with database.read() as connection:
        live = _live_on_node(connection, node_id)
        others = set(poll.alive) - {one.attempt_id for one in live}
        has_strays = bool(others) and _was_taken_away(connection, others)
    if poll.is_leaving:
        _leave_with_others(database, changes, nodes, node_id, live)
    has = set(poll.attempts)
    missing = [one for one in live if one.attempt_id not in has]
    lost = []
    # Whoever does not wait for an answer any more may have begun attempts since it asked.
    if nodes.presence.is_newest(node_id, poll):
        lost = [
            one
            for one in missing
            if poll.is_leaving
            or one.has_begun
            or nodes.presence.had_attempt(node_id, one.attempt_id)
        ]
        nodes.presence.note_ready(node_id, poll, is_ready=not has_strays and not poll.is_leaving)
    if lost:
        _end_lost(database, changes, lost)
    offers = nodes.orders.launches(node_id)
    launches = [
        NodeLaunch(spec=offer.spec, info=offer.info, secrets=dict(offer.secrets))
        for one in missing
        if one not in lost and (offer := offers.get(one.attempt_id)) is not None
    ]
    return NodeWork(
        version=version,
        wanted=[one.attempt_id for one in live if one not in lost],
        launches=launches,
        kill=[id_ for id_ in nodes.orders.kills(node_id) if id_ in has],
        strays=has_strays,
    )


def _was_taken_away(connection: Connection, attempt_ids: set[int]) -> bool:
    attempts = tables.attempts.c
    ended = connection.execute(
        select(attempts.exit).where(attempts.id.in_(attempt_ids), attempts.exit.is_not(None))
    ).scalars()
    # One that has just told of its own end leaves by itself, and soon.
    return any(end["reason"] in _TAKEN_AWAY for end in ended)


def _live_on_node(connection: Connection, node_id: int) -> list[_Live]:
    """Return the attempts that are wanted on a node."""
    attempts = tables.attempts.c
    query = select(tables.attempts).where(
        attempts.state.in_(LIVE_ATTEMPTS),
        or_(attempts.node_id == node_id, attempts.members.is_not(None)),
    )
    found = []
    for row in connection.execute(query.order_by(attempts.id)):
        members = read_members(row)
        if not members:
            has_begun = row.state != AttemptState.PENDING.value
            found.append(_Live(attempt_id=row.id, member=0, has_begun=has_begun, has_others=False))
        found += [
            _Live(
                attempt_id=row.id,
                member=number,
                has_begun=one.begun_at is not None,
                has_others=True,
            )
            for number, one in enumerate(members)
            if one.node_id == node_id and one.exit is None
        ]
    return found


def _leave_with_others(
    database: Database, changes: StateChanges, nodes: Nodes, node_id: int, live: list[_Live]
) -> None:
    """Preempt the attempts that run on other nodes as well; those leave together."""
    shared = [one.attempt_id for one in live if one.has_others]
    node = nodes.get(node_id)
    if not shared or node is None:
        return

    def job(transaction: Transaction) -> None:
        for attempt_id in shared:
            attempt = read_attempt(transaction.connection, attempt_id)
            changes.preempt(transaction, attempt, f"the runner of {node.name} is stopped")

    database.write(job).result()


def _end_lost(database: Database, changes: StateChanges, lost: list[_Live]) -> None:
    def job(transaction: Transaction) -> None:
        for one in lost:
            end = AttemptEnd(
                reason=ExitReason.RUNNER_LOST,
                code=None,
                signal=None,
                time=time.time(),
                detail="its node has it no more",
            )
            end_runner(changes, transaction, one.attempt_id, one.member, end, is_lost=True)

    database.write(job).result()
