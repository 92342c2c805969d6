"""Work of a node: the difference between wanted and reported attempts."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.executors import AttemptStatus, Executor, Launch
from paceline._cluster.master.experiments.attempt_runners import end_runner
from paceline._cluster.master.experiments.attempts import live_attempts, read_attempt
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.nodes.node_registry import Nodes
from paceline._cluster.master.nodes.registration_checks import RegisteredNode
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import read_members, slots_by_node
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.messages import runner_messages as messages
from paceline._cluster.messages.states import LIVE_ATTEMPTS, AttemptState, ExitReason

logger = logging.getLogger(__name__)

# Reasons set by the master itself: processes of these ended attempts can still be alive.
_TAKEN_AWAY = (ExitReason.RUNNER_LOST.value, ExitReason.NOT_FORMED.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Live:
    """Attempt wanted on a node, or the node's part of an attempt."""

    attempt_id: int
    member: int
    has_begun: bool
    has_others: bool


def work_for(
    database: Database, changes: StateChanges, nodes: Nodes, node_id: int, poll: messages.NodePoll
) -> messages.NodeWork:
    """Return the work for a polling node, and end the attempts lost by the node.

    An attempt that began on the node and is gone from it is never started again. A node that
    leaves starts none.
    """
    # First, so that changes during the read of the database reach the next answer.
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
        messages.NodeLaunch(spec=offer.spec, info=offer.info, secrets=dict(offer.secrets))
        for one in missing
        if one not in lost and (offer := offers.get(one.attempt_id)) is not None
    ]
    return messages.NodeWork(
        version=version,
        wanted=[one.attempt_id for one in live if one not in lost],
        launches=launches,
        kill=[id_ for id_ in nodes.orders.kills(node_id) if id_ in has],
        strays=has_strays,
    )


def _was_taken_away(connection: sa.Connection, attempt_ids: set[int]) -> bool:
    attempts = tables.attempts.c
    ended = connection.execute(
        sa.select(attempts.exit).where(attempts.id.in_(attempt_ids), attempts.exit.is_not(None))
    ).scalars()
    # Other ended attempts are no strays: a runner reporting its own end leaves by itself, soon.
    return any(end["reason"] in _TAKEN_AWAY for end in ended)


def _live_on_node(connection: sa.Connection, node_id: int) -> list[_Live]:
    """Return the attempts wanted on a node."""
    attempts = tables.attempts.c
    query = sa.select(tables.attempts).where(
        attempts.state.in_(LIVE_ATTEMPTS),
        sa.or_(attempts.node_id == node_id, attempts.members.is_not(None)),
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
    """Preempt attempts spanning several nodes, so their nodes leave together."""
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
            end = messages.AttemptEnd(
                reason=ExitReason.RUNNER_LOST,
                code=None,
                signal=None,
                time=time.time(),
                detail="its node has it no more",
            )
            end_runner(changes, transaction, one.attempt_id, one.member, end, is_lost=True)

    database.write(job).result()


_MAX_KNOWN = 10_000


class NodeExecutor(Executor):
    """Executor passing each attempt to the local executor, or offering the attempt to its node.

    Args:
        local: Starts attempts on the master's machine.
        nodes: All other nodes.
        database: Says on which node an attempt was placed.
    """

    def __init__(self, local: Executor, nodes: Nodes, database: Database) -> None:
        self._local = local
        self._nodes = nodes
        self._database = database
        self._node_of: dict[int, int] = {}
        self._has_others: dict[int, bool] = {}

    def start(self, launch: Launch) -> None:
        """Start an attempt's runner, or have its node do so."""
        spec = launch.spec
        node_id = self._place(messages.runner_id(spec.attempt_id, spec.member))
        if node_id == messages.LOCAL_NODE:
            self._local.start(launch)
        else:
            self._nodes.orders.start(node_id, launch)

    def status(self, attempt_id: int) -> AttemptStatus:
        """Return whether a runner is at work; `attempt_id` is its number, see `runner_id`.

        The node ships a dead runner's records, so no runner there is gone for the master.
        """
        node_id = self._place(attempt_id)
        if node_id == messages.LOCAL_NODE:
            return self._local.status(attempt_id)
        attempt, member = messages.split_runner_id(attempt_id)
        state = self._state(attempt, member)
        if state in (None, AttemptState.ENDED.value):
            return AttemptStatus.GONE
        has_it = self._nodes.presence.has_attempt(node_id, attempt)
        if has_it or self._nodes.orders.has_launch(node_id, attempt):
            return AttemptStatus.ALIVE
        is_new = state == AttemptState.PENDING.value
        return AttemptStatus.NOT_STARTED if is_new else AttemptStatus.ALIVE

    def ship(self, attempt_id: int) -> None:
        """Send a departed local runner's unsent reports; other nodes do so by themselves."""
        if self._place(attempt_id) == messages.LOCAL_NODE:
            self._local.ship(attempt_id)

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner, or have its node do so."""
        node_id = self._place(attempt_id)
        if node_id == messages.LOCAL_NODE:
            self._local.kill_runner(attempt_id)
        else:
            self._nodes.orders.kill(node_id, messages.split_runner_id(attempt_id)[0])

    def is_out_of_reach(self, attempt_id: int) -> bool:
        """Return whether a runner's node is lost.

        While others of its attempt wait for its end, a node whose poll was cut off counts as lost.
        """
        node_id = self._place(attempt_id)
        if node_id == messages.LOCAL_NODE:
            return self._local.is_out_of_reach(attempt_id)
        is_cut_off = self._has_others[attempt_id] and self._nodes.presence.is_cut_off(node_id)
        return is_cut_off or self._nodes.presence.is_lost(node_id)

    def sign_of_life(self, attempt_id: int) -> object:
        """Return a local runner's sign of life; None on other nodes, known by requests only."""
        is_local = self._place(attempt_id) == messages.LOCAL_NODE
        return self._local.sign_of_life(attempt_id) if is_local else None

    def clean(self, keep: set[int]) -> None:
        """Remove ended attempts' leftovers here; nodes do so after notification of the end."""
        self._local.clean(keep)
        self._nodes.clean(keep)

    def close(self) -> None:
        """Release the resources of this process."""
        self._local.close()

    def _place(self, number: int) -> int:
        """Return the node of a runner."""
        if number not in self._node_of:
            attempt_id, member = messages.split_runner_id(number)
            row = self._row(attempt_id)
            if len(self._node_of) >= _MAX_KNOWN:
                self._node_of.clear()
                self._has_others.clear()
            nodes = [] if row is None else [*slots_by_node(row)]
            self._node_of[number] = nodes[member] if member < len(nodes) else messages.LOCAL_NODE
            self._has_others[number] = len(nodes) > 1
        return self._node_of[number]

    def _state(self, attempt_id: int, member: int) -> str | None:
        row = self._row(attempt_id)
        if row is None or row.members is None or row.state == AttemptState.ENDED.value:
            return None if row is None else str(row.state)
        return read_members(row)[member].state.value

    def _row(self, attempt_id: int) -> sa.Row[Any] | None:
        attempts = tables.attempts
        with self._database.read() as connection:
            query = sa.select(attempts).where(attempts.c.id == attempt_id)
            return connection.execute(query).first()


# How long a lost node is listed: one that may come back, and one whose token is over.
_LOST_KEPT_S = 7 * 24 * 3600.0
_ENDED_KEPT_S = 600.0
_LOOK_INTERVAL_S = 60.0


class LostNodes:
    """Bookkeeping of lost nodes: stores their last contact, and forgets stale nodes.

    Args:
        nodes: All nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._started_at = time.time()
        self._next_look = 0.0
        self._stored_seen: dict[int, float | None] = {}

    def look(self, transaction: Transaction) -> None:
        """Process the lost nodes, at most once per interval."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_INTERVAL_S
        self._store_seen(transaction)
        forgettable = self._forgettable(time.time())
        if not forgettable:
            return
        connection, drained = transaction.connection, tables.drained_slots.c.node_id
        used = {id_ for one in live_attempts(connection) for id_ in slots_by_node(one)}
        used |= set(connection.execute(sa.select(drained)).scalars())
        for node in forgettable:
            if node.id not in used:
                logger.info("The node %s is forgotten: it is lost.", node.name)
                self._nodes.forget(transaction, node.id)

    def _store_seen(self, transaction: Transaction) -> None:
        """Store the last contact of lost nodes, once per loss, because changes are recorded."""
        nodes, presence, before = self._nodes.all(), self._nodes.presence, self._stored_seen
        seen = {node.id: presence.heard_at(node.id) for node in nodes if presence.is_lost(node.id)}
        for node in nodes:
            self._log_change(node, was_lost=node.id in before, is_lost=node.id in seen)
            if node.id in seen.keys() - before.keys() and not presence.has_left(node.id):
                seen_at = self._nodes.seen_at(node.id)
                transaction.emit("node_lost", 0, node=node.name, seen_at=seen_at)
        for node_id, seen_at in seen.items():
            if seen_at and seen_at != before.get(node_id):
                query = sa.update(tables.nodes).where(tables.nodes.c.id == node_id)
                transaction.connection.execute(query.values(seen_at=seen_at))
        self._stored_seen = seen

    def _log_change(self, node: RegisteredNode, *, was_lost: bool, is_lost: bool) -> None:
        if is_lost and not was_lost:
            seen_at = self._nodes.seen_at(node.id)
            when = "nobody knows when" if seen_at is None else time.ctime(seen_at)
            has_left = self._nodes.presence.has_left(node.id)
            how = "has left" if has_left else "is lost: it gives no sign of life"
            logger.info("The node %s %s. It was last heard of: %s.", node.name, how, when)
        elif was_lost and not is_lost:
            logger.info("The node %s is back.", node.name)

    def _forgettable(self, now: float) -> list[RegisteredNode]:
        """Return the nodes lost for so long as to be forgotten.

        A node whose token is no longer usable, as after the end of a job, is forgotten sooner.
        Drained nodes stay, so that they come back as drained. Nodes with a usable token
        stay as well: it keeps other machines from their name.
        """
        return [
            node
            for node in self._nodes.all()
            if self._nodes.presence.is_lost(node.id)
            and not node.is_draining
            and now > self._last_sign(node) + self._kept_s(node)
        ]

    def _last_sign(self, node: RegisteredNode) -> float:
        # Start time as substitute: for nodes lost before this master, the time is unknown.
        return max(self._nodes.seen_at(node.id) or self._started_at, node.registered_at)

    def _kept_s(self, node: RegisteredNode) -> float:
        token = self._nodes.token(node)
        if node.token_id is not None and (token is None or not token.is_usable):
            return _ENDED_KEPT_S
        is_for_any = (
            token is None or token.node is None or messages.STARTER_LABEL in node.facts.labels
        )
        return _LOST_KEPT_S if is_for_any else math.inf
