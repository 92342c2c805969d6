"""Nodes that are lost: when they were last heard of, and for how long they are listed."""

import logging
import math
import time

from sqlalchemy import select, update

from paceline.master.experiments import live_attempts
from paceline.master.nodes._node_registry import Nodes
from paceline.master.nodes._registered_node import RegisteredNode
from paceline.master.store import Transaction, slots_by_node, tables
from paceline.messages.node_runners import STARTER_LABEL

logger = logging.getLogger(__name__)

# How long a lost node is listed: one that may come back, and one whose token is over.
_LOST_KEPT_S = 7 * 24 * 3600.0
_ENDED_KEPT_S = 600.0
_LOOK_INTERVAL_S = 60.0


class LostNodes:
    """Store when lost nodes were heard of, and forget those that nobody waits for.

    Args:
        nodes: All nodes.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._started_at = time.time()
        self._next_look = 0.0
        self._stored_seen: dict[int, float | None] = {}

    def look(self, transaction: Transaction) -> None:
        """Look which nodes are lost; seldom."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_INTERVAL_S
        self._store_seen(transaction)
        forgettable = self._forgettable(time.time())
        if not forgettable:
            return
        connection, drained = transaction.connection, tables.drained_slots.c.node_id
        used = {id_ for one in live_attempts(connection) for id_ in slots_by_node(one)}
        used |= set(connection.execute(select(drained)).scalars())
        for node in forgettable:
            if node.id not in used:
                logger.info("The node %s is forgotten: it is lost.", node.name)
                self._nodes.forget(transaction, node.id)

    def _store_seen(self, transaction: Transaction) -> None:
        """Store when nodes that are lost were last heard of; once, as each change is recorded."""
        nodes, presence, before = self._nodes.all(), self._nodes.presence, self._stored_seen
        seen = {node.id: presence.heard_at(node.id) for node in nodes if presence.is_lost(node.id)}
        for node in nodes:
            self._log_change(node, was_lost=node.id in before, is_lost=node.id in seen)
        for node_id, seen_at in seen.items():
            if seen_at and seen_at != before.get(node_id):
                query = update(tables.nodes).where(tables.nodes.c.id == node_id)
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
        """Return the nodes that are lost for long.

        One whose token can no longer be used, as that of a job that has ended, is waited for less.
        Drained ones stay, so that they come back as such. Those that a token is for stay as well,
        as long as it can be used: by it, no other machine gets their name.
        """
        return [
            node
            for node in self._nodes.all()
            if self._nodes.presence.is_lost(node.id)
            and not node.is_draining
            and now > self._last_sign(node) + self._kept_s(node)
        ]

    def _last_sign(self, node: RegisteredNode) -> float:
        # Of those that were lost before this master came, nobody knows when.
        return max(self._nodes.seen_at(node.id) or self._started_at, node.registered_at)

    def _kept_s(self, node: RegisteredNode) -> float:
        token = self._nodes.token(node)
        if node.token_id is not None and (token is None or not token.is_usable):
            return _ENDED_KEPT_S
        is_for_any = token is None or token.node is None or STARTER_LABEL in node.facts.labels
        return _LOST_KEPT_S if is_for_any else math.inf
