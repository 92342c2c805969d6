"""Registry of nodes: registration, presence and removal."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._base.process_and_network import LOOPBACK_HOSTS
from paceline._cluster.master.authentication import StoredToken, Tokens
from paceline._cluster.master.executors import Machines, Place
from paceline._cluster.master.experiments.attempts import DEFAULT_LEASE_S, live_attempts
from paceline._cluster.master.experiments.scheduler_input import read_pools
from paceline._cluster.master.nodes.node_presence import NodeOrders, NodePresence
from paceline._cluster.master.nodes.registration_checks import (
    NodeRefusedError,
    RegisteredNode,
    check_bound_key,
    check_name_owner,
    check_node_version,
    check_pool_of_known,
    check_token_node,
    check_token_pool,
    is_as_before,
    version_problem,
)
from paceline._cluster.master.scheduling.pools import NodeSlots
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import slots_by_node
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.row_ids_and_counts import keep_ids, new_id, update_row
from paceline._cluster.master.waiting import Wakeups
from paceline._cluster.messages.runner_messages import (
    DEFAULT_POOL,
    PROTOCOL,
    NodeFacts,
    NodePoll,
    NodeSession,
)

logger = logging.getLogger(__name__)


class UnknownNodeError(LookupError):
    """Raised for an unknown node: its runner must register."""


def nodes_that_join(nodes: Iterable[RegisteredNode]) -> set[int]:
    """Return the ids of nodes reachable by other nodes, for trials on several nodes.

    A loopback address, as that of a node behind a tunnel, leads to the machine that asks. So nodes
    that have one reach each other only if all nodes are on one machine.
    """
    found = [node for node in nodes if node.facts.address]
    has_one_host = len({node.facts.host for node in found}) == 1
    return {node.id for node in found if has_one_host or not _is_loopback(node.facts.address)}


def _is_loopback(address: str) -> bool:
    return address in LOOPBACK_HOSTS or address.startswith("127.")


def stored_node(row: sa.Row[Any]) -> RegisteredNode:
    """Return the node of a row of the table."""
    facts = msgspec.convert(row.facts, NodeFacts)
    return RegisteredNode(**dict(row._mapping) | {"facts": facts})


# A node that was there so long ago is expected to come back.
_RETURNS_WITHIN_S = 300.0


class Nodes(Machines):
    """Nodes that have registered, beside the master's own machine; for any thread.

    Args:
        database: Where nodes are stored.
        cluster_id: The identity of the master's home.
        tokens: The tokens of runners.
        wakeups: Woken when slots may have become free or lost.
        devices: One entry per slot of the master's machine: "cpu" or a GPU's id.
        lease_s: How long a node may be silent until it is lost, in seconds.

    Attributes:
        presence: Which of them are there, and what they have said.
        orders: What they are to do.
        pool_slots: What the runners may have that are started for pools.
    """

    def __init__(
        self,
        database: Database,
        cluster_id: str,
        tokens: Tokens,
        wakeups: Wakeups,
        devices: Iterable[str] = (),
        lease_s: float = DEFAULT_LEASE_S,
    ) -> None:
        super().__init__(devices)
        self.pool_slots: list[NodeSlots] = []
        self._database = database
        self._cluster_id = cluster_id
        self._tokens = tokens
        self._wakeups = wakeups
        # Held before that of `presence`.
        self._lock = threading.RLock()
        self.presence = NodePresence(lease_s, database, wakeups)
        self.orders = NodeOrders(self.presence)
        with database.read() as connection:
            rows = connection.execute(sa.select(tables.nodes))
            self._nodes = {row.id: stored_node(row) for row in rows}
        for node in self._nodes.values():
            self.presence.begin(node.id, node.session, has_left=node.has_left)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the server's event loop."""
        self.presence.attach(loop)

    # ---- registering and polling --------------------------------------------------------

    def register(self, facts: NodeFacts, token_id: int | None) -> "Future[NodeSession]":
        """Register a node, or a node's new session; the future raises `NodeRefusedError`.

        Args:
            facts: The facts of the node's runner.
            token_id: The token of the runner; None is the home's own.
        """
        token = self._token(token_id)
        check_token_node(token, facts)

        def job(transaction: Transaction) -> NodeSession:
            connection = transaction.connection
            # Stored row: another runner may have registered in this transaction.
            row = connection.execute(
                sa.select(tables.nodes).where(tables.nodes.c.name == facts.name)
            ).first()
            known = None if row is None else stored_node(row)
            # With attempts at work it comes back, lets them finish, and gets no others.
            if (
                known is None
                or facts.protocol != PROTOCOL
                or not is_as_before(known.facts, facts)
                or not _is_at_work(connection, known.id)
            ):
                check_node_version(facts)
            self._check_name(known, facts, token_id)
            self._check_pools(connection, known, facts, token)
            node = _stored_registration(connection, known, facts, token_id)
            transaction.after_commit(lambda: self._remember(node))
            return NodeSession(
                node_id=node.id,
                session=node.session,
                cluster_id=self._cluster_id,
                lease_s=self.presence.leases.length_s,
            )

        return self._database.write(job)

    def hear(self, node_id: int, poll: NodePoll, token_id: int | None) -> None:
        """Handle a poll: renew the node's lease, and store its reported attempts.

        Raises:
            NodeRefusedError: Another session has begun, or the token belongs to another node.
            UnknownNodeError: There is no such node.
        """
        with self._lock:
            node = self._nodes.get(node_id)
            # A session beyond the stored one: the database was restored from a backup.
            if node is None or node.key != poll.key or poll.session > node.session:
                raise UnknownNodeError(f"There is no node {node_id} with this key.")
            if node.token_id != token_id:
                raise NodeRefusedError("other_token", f"Node {node_id} belongs to another token.")
            if poll.session < node.session:
                raise NodeRefusedError(
                    "session_over",
                    f"Another runner has registered as {node.name!r}. Hint: give each machine a"
                    " name of its own (`paceline runner --name`), and start one runner there.",
                )
            self.presence.hear(node_id, poll)

    def check_pool(self, node_id: int) -> None:
        """Refuse a node outside its token's pool.

        It was not when it registered, but labels of pools may have changed since.

        Raises:
            NodeRefusedError: It is in another one.
        """
        node = self.get(node_id)
        # Labels decide only for nodes without a named pool.
        if node is None or node.facts.pool != DEFAULT_POOL:
            return
        token = self._token(node.token_id)
        if token is not None and token.pool is not None:
            with self._database.read() as connection:
                pools = read_pools(connection)
            check_token_pool(token, node.facts, pools)

    def notify_pool_change(self) -> None:
        """Answer the polls of nodes with a pool-bound token, as their pool may have changed."""
        for node in self.all():
            if node.facts.pool == DEFAULT_POOL and self.only_pool(node) is not None:
                self.presence.tell(node.id)

    def clean(self, keep: set[int]) -> None:
        """Forget launches and kills of ended attempts, and notify the nodes."""
        self.presence.notify_ended_attempts(keep)
        self.orders.clean(keep)

    # ---- views for other parts ----------------------------------------------------------------

    def get(self, node_id: int) -> RegisteredNode | None:
        """Return a node, None if there is none of this id."""
        with self._lock:
            return self._nodes.get(node_id)

    def all(self) -> list[RegisteredNode]:
        """Return all nodes in the order of their ids."""
        with self._lock:
            return sorted(self._nodes.values(), key=lambda node: node.id)

    def seen_at(self, node_id: int) -> float | None:
        """Return a node's last contact with this or an earlier master in epoch seconds.

        From earlier masters, only the sign of life before a loss is stored.
        """
        with self._lock:
            node, heard_at = self._nodes.get(node_id), self.presence.heard_at(node_id)
            return heard_at if node is None or heard_at is not None else node.seen_at

    def place(self, node_id: int | None) -> Place:
        """Return where the attempts of a node run; None or 0 is the master's own machine.

        Raises:
            LookupError: There is no such node.
        """
        node = self.get(node_id) if node_id else None
        if node is None:
            return super().place(node_id)
        facts = node.facts
        return Place(
            name=node.name,
            devices=tuple(facts.devices),
            num_cores=facts.num_cores,
            python=facts.python,
            address=facts.address,
        )

    def slots(self) -> list[NodeSlots]:
        """Return the slots of all present machines, the master's own first."""
        with self._lock:
            present = [node for node in self.all() if not self.presence.is_lost(node.id)]
            joining = nodes_that_join(present)
            return super().slots() + [
                node.slots(
                    can_join=node.id in joining,
                    is_open=self.presence.is_ready(node.id) and not node.is_draining,
                    only_pool=self.only_pool(node),
                    is_drained=node.is_draining,
                    problem=self.problem(node),
                    owner=self.owner(node),
                )
                for node in present
            ]

    def returning_slots(self) -> list[NodeSlots]:
        """Return the slots of absent nodes seen within the last minutes."""
        with self._lock:
            return [
                node.slots(
                    can_join=False,
                    is_open=False,
                    only_pool=self.only_pool(node),
                    owner=self.owner(node),
                )
                for node in self.all()
                if not node.is_draining
                and (self.presence.is_lost(node.id) or self.presence.is_cut_off(node.id))
                and (self.seen_at(node.id) or 0.0) > time.time() - _RETURNS_WITHIN_S
            ]

    def possible_slots(self) -> list[NodeSlots]:
        """Return the slots of all present, lost and startable machines."""
        # Address as evidence of joining: mutual reachability is known for present nodes only.
        others = [
            node.slots(can_join=bool(node.facts.address), only_pool=self.only_pool(node))
            for node in self.all()
        ]
        return [*super().slots(), *others, *self.pool_slots]

    def only_pool(self, node: RegisteredNode) -> str | None:
        """Return the pool of a node's token, None if not bound to a pool."""
        token = self.token(node)
        return None if token is None else token.pool

    def owner(self, node: RegisteredNode) -> str:
        """Return the user of a node, by its token and by the name of its Unix user; or nobody."""
        token = self.token(node)
        return node.facts.unix_user if token and token.user == node.facts.unix_user else ""

    def problem(self, node: RegisteredNode) -> str:
        """Return why a node rests: its version, or what its last check found; empty if it works."""
        return version_problem(node.facts) or self.presence.problem(node.id)

    def token(self, node: RegisteredNode) -> StoredToken | None:
        """Return a node's token, None if deleted or the home's own."""
        return self._token(node.token_id)

    def set_draining(self, transaction: Transaction, node_id: int, *, is_draining: bool) -> None:
        """Drain a node or take the node back, after the commit of a transaction.

        Raises:
            UnknownNodeError: There is no such node.
        """
        node = self.get(node_id)
        if node is None:
            raise UnknownNodeError(f"There is no node {node_id}.")
        update_row(transaction.connection, tables.nodes, node_id, is_draining=is_draining)
        transaction.after_commit(lambda: self._replace(node_id, is_draining))

    def forget(self, transaction: Transaction, node_id: int) -> None:
        """Forget a node after the commit of a transaction; its runner has to register again."""
        nodes, connection = tables.nodes, transaction.connection
        keep_ids(connection, nodes)
        connection.execute(sa.delete(nodes).where(nodes.c.id == node_id))
        drained = tables.drained_slots
        connection.execute(sa.delete(drained).where(drained.c.node_id == node_id))
        transaction.after_commit(lambda: self._drop(node_id))

    # ---- helpers ------------------------------------------------------------------------

    def _token(self, token_id: int | None) -> StoredToken | None:
        return None if token_id is None else self._tokens.get(token_id)

    def _check_name(
        self, known: RegisteredNode | None, facts: NodeFacts, token_id: int | None
    ) -> None:
        """Refuse a name still usable by another machine or token.

        If it came by a token for this node alone, another machine is refused until the node is
        forgotten.
        """
        if facts.name == "local":
            raise NodeRefusedError("name_taken", "The node 'local' is the master's own machine.")
        if known is None:
            return
        before = self._token(known.token_id)
        if before is not None and before.node is not None:
            check_bound_key(known.facts, facts)
        with self._lock:
            remembered = self._nodes.get(known.id)
            has_just_registered = remembered is None or remembered.session != known.session
            if self.presence.is_lost(known.id) and not has_just_registered:
                return
        is_other = known.token_id not in (token_id, None)
        check_name_owner(
            known.facts,
            facts,
            self._token(token_id),
            has_other_token=is_other and before is not None and before.is_usable,
        )

    def _check_pools(
        self,
        connection: sa.Connection,
        known: RegisteredNode | None,
        facts: NodeFacts,
        token: StoredToken | None,
    ) -> None:
        pools = read_pools(connection)
        # Exception for running attempts: they may finish even if label changes moved the node.
        if known is None or not (
            is_as_before(known.facts, facts) and _is_at_work(connection, known.id)
        ):
            check_token_pool(token, facts, pools)
        if known is not None:
            check_pool_of_known(token, known.facts, facts, pools)

    def _remember(self, node: RegisteredNode) -> None:
        num_slots, pool = len(node.facts.devices), node.facts.pool
        logger.info("The node %s registers: pool %s, %d slot(s).", node.name, pool, num_slots)
        with self._lock:
            self._nodes[node.id] = node
            self.presence.begin(node.id, node.session)

    def _replace(self, node_id: int, is_draining: bool) -> None:
        with self._lock:
            self._nodes[node_id] = replace(self._nodes[node_id], is_draining=is_draining)
        self._wakeups.wake()

    def _drop(self, node_id: int) -> None:
        with self._lock:
            self._nodes.pop(node_id, None)
            self.presence.forget(node_id)
        self.orders.forget(node_id)


def _stored_registration(
    connection: sa.Connection, known: RegisteredNode | None, facts: NodeFacts, token_id: int | None
) -> RegisteredNode:
    """Store a new node, or a new session of a known node."""
    nodes, now = tables.nodes, time.time()
    values: dict[str, Any] = {
        "name": facts.name, "key": facts.key, "token_id": token_id,
        "facts": msgspec.to_builtins(facts), "registered_at": now, "seen_at": now,
        "has_left": False,
    }  # fmt: skip
    if known is None:
        values |= {"id": new_id(connection, nodes), "session": 1, "is_draining": False}
        connection.execute(sa.insert(nodes).values(**values))
    else:
        values |= {"session": known.session + 1, "is_draining": known.is_draining}
        update_row(connection, nodes, known.id, **values)
        values["id"] = known.id
    return RegisteredNode(**values | {"facts": facts})


def _is_at_work(connection: sa.Connection, node_id: int) -> bool:
    return any(node_id in slots_by_node(attempt) for attempt in live_attempts(connection))
