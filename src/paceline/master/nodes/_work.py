"""What a node has to do: compare what the database wants there with what the node has."""

import time

from sqlalchemy import select

from paceline.master.experiments import StateChanges, end_attempt
from paceline.master.nodes._nodes import Nodes
from paceline.master.store import Database, Transaction, tables
from paceline.messages.attempts import AttemptEnd
from paceline.messages.nodes import NodeLaunch, NodePoll, NodeWork
from paceline.messages.states import LIVE_ATTEMPTS, AttemptState, ExitReason


def work_for(
    database: Database, changes: StateChanges, nodes: Nodes, node_id: int, poll: NodePoll
) -> NodeWork:
    """Return the work of a node that has polled, and end attempts that it has lost.

    An attempt that began there and is there no more is never started again. A node that leaves
    starts none.
    """
    # First, so that what changes while the database is read is told by the next answer.
    version = nodes.version(node_id)
    attempts = tables.attempts.c
    with database.read() as connection:
        live = connection.execute(
            select(attempts.id, attempts.state).where(
                attempts.node_id == node_id, attempts.state.in_(LIVE_ATTEMPTS)
            )
        ).all()
        others = set(poll.alive) - {row.id for row in live}
        ended = connection.execute(
            select(attempts.exit).where(attempts.id.in_(others), attempts.exit.is_not(None))
        ).scalars()
        # One that has just told of its own end leaves by itself, and soon.
        has_strays = any(end["reason"] == ExitReason.RUNNER_LOST.value for end in ended)
    has = set(poll.attempts)
    missing = [row for row in live if row.id not in has]
    lost = []
    # Whoever does not wait for an answer any more may have begun attempts since it asked.
    if nodes.is_newest(node_id, poll):
        lost = [
            row.id
            for row in missing
            if poll.is_leaving
            or row.state != AttemptState.PENDING.value
            or nodes.had_attempt(node_id, row.id)
        ]
        nodes.note_ready(node_id, is_ready=not has_strays and not poll.is_leaving)
    if lost:
        _end_lost(database, changes, lost)
    offers = nodes.launches(node_id)
    launches = [
        NodeLaunch(spec=offer.spec, info=offer.info, secrets=dict(offer.secrets))
        for row in missing
        if row.id not in lost and (offer := offers.get(row.id)) is not None
    ]
    return NodeWork(
        version=version,
        wanted=[row.id for row in live if row.id not in lost],
        launches=launches,
        kill=[id_ for id_ in nodes.kills(node_id) if id_ in has],
        strays=has_strays,
    )


def _end_lost(database: Database, changes: StateChanges, lost: list[int]) -> None:
    def job(transaction: Transaction) -> None:
        for attempt_id in lost:
            end = AttemptEnd(
                reason=ExitReason.RUNNER_LOST,
                code=None,
                signal=None,
                time=time.time(),
                detail="its node has it no more",
            )
            end_attempt(changes, transaction, attempt_id, end)

    database.write(job).result()
