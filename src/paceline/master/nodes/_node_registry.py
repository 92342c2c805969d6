"""The nodes that have registered: their sessions, their polls and their leases."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from paceline.master._waiting_requests import WaitingRequests
from paceline.master.auth import StoredToken
from paceline.master.experiments import DEFAULT_LEASE_S, Leases, live_attempts, read_pools
from paceline.master.nodes._node_orders import NodeOrders
from paceline.master.nodes._registered_node import (
    NodeRefusedError,
    RegisteredNode,
    UnknownNodeError,
    check_node_version,
    nodes_that_join,
    stored_node,
)
from paceline.master.nodes._token_bindings import (
    check_key_of_bound,
    check_node_of_token,
    check_pool_of_known,
    check_pool_of_token,
    is_as_before,
)
from paceline.master.scheduling import NodeSlots
from paceline.master.store import Database, Transaction, keep_ids, new_id, slots_by_node, tables
from paceline.messages.node_runners import (
    DEFAULT_POOL,
    STARTER_LABEL,
    NodeFacts,
    NodePoll,
    NodeSession,
)

logger = logging.getLogger(__name__)

# How long a lost node is listed: one that may come back, and one whose token is over.
_LOST_KEPT_S = 7 * 24 * 3600.0
_ENDED_KEPT_S = 600.0
_LOOK_INTERVAL_S = 60.0


@dataclass(slots=True)
class _Heard:
    """What this master has heard of a node since it started."""

    number: int = 0
    is_ready: bool = False
    is_cut_off: bool = False
    has_left: bool = False
    seen_at: float | None = None
    attempts: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    # Of all sessions that this master has heard.
    ever: set[int] = field(default_factory=set)
    # The newest poll when the node was doubted: only a later one tells that it stays.
    doubted: int = -1
    # Attempts that ended while the node had them, of which it was told.
    told: frozenset[int] = frozenset()


class Nodes:
    """All nodes but the master's own; for any thread.

    Args:
        database: Where nodes are stored.
        cluster_id: The identity of the master's home.
        lease_s: How long a node may be silent until it is lost, in seconds.
        token_of: Returns a token by its id, None if there is none.
        wake: Called when slots may have become free or lost.
    """

    def __init__(
        self,
        database: Database,
        cluster_id: str,
        lease_s: float = DEFAULT_LEASE_S,
        token_of: Callable[[int], StoredToken | None] = lambda _: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._cluster_id = cluster_id
        self._token_of = token_of
        self._started_at = time.time()
        self._next_look = 0.0
        self._stored_seen: dict[int, float | None] = {}
        self._wake = wake
        self._lock = threading.RLock()
        self.leases = Leases(lease_s)
        self.polls = WaitingRequests()
        with database.read() as connection:
            rows = connection.execute(select(tables.nodes))
            self._nodes = {row.id: stored_node(row) for row in rows}
        self._heard = {id_: _Heard(has_left=node.has_left) for id_, node in self._nodes.items()}
        # Grows with each change of a node's work; another number than before the master started.
        self._versions = dict.fromkeys(self._nodes, int(time.time()))
        self.orders = NodeOrders(self.tell)
        for id_ in self._nodes:
            self.leases.begin(id_)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the server's event loop."""
        self.polls.attach(loop)
        self.leases.attach(loop)

    # ---- registering and polling --------------------------------------------------------

    def register(self, facts: NodeFacts, token_id: int | None) -> "Future[NodeSession]":
        """Register a node, or a new session of one; the future raises `NodeRefusedError`.

        Args:
            facts: What the node's runner says.
            token_id: The token of the runner; None is the home's own.
        """
        check_node_version(facts)
        token = self._token(token_id)
        check_node_of_token(token, facts)

        def job(transaction: Transaction) -> NodeSession:
            pools = read_pools(transaction.connection)
            # As stored: another runner may have registered in this transaction.
            row = transaction.connection.execute(
                select(tables.nodes).where(tables.nodes.c.name == facts.name)
            ).first()
            known = None if row is None else stored_node(row)
            with self._lock:
                self._check_owner(known, facts, token_id)
            # What runs there may end there, if labels of pools have changed since it began.
            if known is None or not (
                is_as_before(known.facts, facts) and _is_at_work(transaction.connection, known.id)
            ):
                check_pool_of_token(token, facts, pools)
            if known is not None:
                check_pool_of_known(token, known.facts, facts, pools)
            connection, nodes, now = transaction.connection, tables.nodes, time.time()
            values: dict[str, Any] = {
                "name": facts.name, "key": facts.key, "token_id": token_id,
                "facts": msgspec.to_builtins(facts), "registered_at": now, "seen_at": now,
                "has_left": False,
            }  # fmt: skip
            if known is None:
                values |= {"session": 1, "is_draining": False}
                values["id"] = new_id(connection, nodes)
                connection.execute(insert(nodes).values(**values))
            else:
                values |= {"session": known.session + 1, "is_draining": known.is_draining}
                values["id"] = known.id
                connection.execute(update(nodes).where(nodes.c.id == known.id).values(**values))
            node = RegisteredNode(**values | {"facts": facts})
            transaction.after_commit(lambda: self._remember(node))
            return NodeSession(
                node_id=node.id,
                session=node.session,
                cluster_id=self._cluster_id,
                lease_s=self.leases.length_s,
            )

        return self._database.write(job)

    def hear(self, node_id: int, poll: NodePoll, token_id: int | None) -> None:
        """Take a poll: renew the node's lease, and note which attempts it has.

        Raises:
            NodeRefusedError: Another session has begun, or the token is that of another node.
            UnknownNodeError: There is no such node.
        """
        with self._lock:
            node = self._nodes.get(node_id)
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
            heard = self._heard[node_id]
            if poll.number < heard.number:
                return
            was_ready = heard.is_ready and not self.leases.is_over(node_id)
            self.leases.begin(node_id)
            self.leases.renew(node_id)
            heard.number, heard.seen_at = poll.number, time.time()
            heard.is_cut_off = False
            # With attempts it is waited for: their runners may have something to tell.
            self._note_left(node_id, has_left=poll.is_leaving and not poll.attempts)
            heard.attempts, heard.alive = frozenset(poll.attempts), frozenset(poll.alive)
            heard.ever |= heard.attempts
        if not was_ready:
            self._wake()

    def check_pool(self, node_id: int) -> None:
        """Refuse a node that is in another pool than that of its token.

        It was not when it registered, but labels of pools may have changed since.

        Raises:
            NodeRefusedError: It is in another one.
        """
        node = self.get(node_id)
        # Only among those that name no pool, labels choose.
        if node is None or node.facts.pool != DEFAULT_POOL:
            return
        token = self._token(node.token_id)
        if token is not None and token.pool is not None:
            with self._database.read() as connection:
                pools = read_pools(connection)
            check_pool_of_token(token, node.facts, pools)

    def tell_of_pools(self) -> None:
        """Answer the polls of nodes that may be in another pool now than that of their token."""
        for node in self.all():
            if node.facts.pool == DEFAULT_POOL and self.only_pool(node) is not None:
                self.tell(node.id)

    def is_newest(self, node_id: int, poll: NodePoll) -> bool:
        """Tell whether no later poll of a node was heard: an earlier one knows less."""
        with self._lock:
            node, heard = self._nodes.get(node_id), self._heard.get(node_id)
            if node is None or heard is None:
                return False
            return (poll.session, poll.number) == (node.session, heard.number)

    def note_cut_off(self, node_id: int, poll: NodePoll) -> None:
        """Note that the connection of a poll was closed before the answer.

        The node gets no attempts until it polls again.
        """
        with self._lock:
            heard = self._heard.get(node_id)
            if heard is None or not self.is_newest(node_id, poll):
                return
            heard.is_cut_off, heard.is_ready = True, False
        self._wake()

    def note_ended(self, node_id: int) -> None:
        """Note that a runner whose connection was closed has ended, as its starter knows."""
        with self._lock:
            heard = self._heard.get(node_id)
            if heard is not None and heard.is_cut_off:
                self._note_left(node_id, has_left=True)
        self._wake()

    def note_ready(self, node_id: int, poll: NodePoll, *, is_ready: bool) -> None:
        """Note whether a node may get attempts, by what it said in a poll."""
        with self._lock:
            heard = self._heard.get(node_id) or _Heard()
            if poll.number <= heard.doubted:
                return
            changed = heard.is_ready != is_ready
            heard.is_ready = is_ready
        if changed:
            self._wake()

    def doubt(self, node_id: int) -> None:
        """Give a node no attempts until it polls again, which it is asked to do now."""
        with self._lock:
            heard = self._heard.get(node_id)
            if heard is None:
                return
            heard.is_ready, heard.doubted = False, heard.number
        self.tell(node_id)

    # ---- attempts -----------------------------------------------------------------------

    def tell(self, node_id: int) -> None:
        """Answer the poll of a node that waits: its work has changed."""
        with self._lock:
            self._versions[node_id] = self._versions.get(node_id, 0) + 1
        self.polls.notify(node_id)

    def clean(self, keep: set[int]) -> None:
        """Forget the launches and kills of attempts that have ended, and tell the nodes of it."""
        with self._lock:
            for node_id, heard in self._heard.items():
                ended = heard.attempts - keep
                if ended - heard.told:
                    self.tell(node_id)
                heard.told = ended
        self.orders.clean(keep)

    def has_attempt(self, node_id: int, attempt_id: int) -> bool:
        """Tell whether a node has said in its newest poll that it has an attempt."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and attempt_id in heard.attempts

    def had_attempt(self, node_id: int, attempt_id: int) -> bool:
        """Tell whether a node has ever said that it has an attempt."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and attempt_id in heard.ever

    def reported_alive(self, node_id: int) -> frozenset[int]:
        """Return the attempts whose runners are at work on a node, by its newest poll."""
        with self._lock:
            return self._heard[node_id].alive

    def version(self, node_id: int) -> int:
        """Return the version of a node's work."""
        with self._lock:
            return self._versions.get(node_id, 0)

    # ---- what others see ----------------------------------------------------------------

    def get(self, node_id: int) -> RegisteredNode | None:
        """Return a node, None if there is none of this id."""
        with self._lock:
            return self._nodes.get(node_id)

    def all(self) -> list[RegisteredNode]:
        """Return all nodes in the order of their ids."""
        with self._lock:
            return sorted(self._nodes.values(), key=lambda node: node.id)

    def has_left(self, node_id: int) -> bool:
        """Tell whether a node has said that it leaves, and has not come back."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and heard.has_left

    def is_lost(self, node_id: int) -> bool:
        """Tell whether a node has left or was silent for too long, or is unknown."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is None or heard.has_left or self.leases.is_over(node_id)

    def is_cut_off(self, node_id: int) -> bool:
        """Tell whether the connection of a node's newest poll was closed before the answer."""
        with self._lock:
            return self._heard.get(node_id, _Heard(is_cut_off=True)).is_cut_off

    def was_heard(self, node_id: int) -> bool:
        """Tell whether this master has heard of a node since it started."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and heard.seen_at is not None

    def seen_at(self, node_id: int) -> float | None:
        """Return when this master, or one before it, last heard of a node: seconds since the epoch.

        Of what was heard by masters before, only what preceded a loss is stored.
        """
        with self._lock:
            heard, node = self._heard.get(node_id), self._nodes.get(node_id)
            if heard is not None and heard.seen_at is not None:
                return heard.seen_at
            return None if node is None else node.seen_at

    def slots(self) -> list[NodeSlots]:
        """Return the slots of all nodes that are not lost."""
        with self._lock:
            present = [node for node in self.all() if not self.is_lost(node.id)]
            joining = nodes_that_join(present)
            return [
                node.slots(
                    can_join=node.id in joining,
                    is_open=self._heard[node.id].is_ready and not node.is_draining,
                    only_pool=self.only_pool(node),
                )
                for node in present
            ]

    def only_pool(self, node: RegisteredNode) -> str | None:
        """Return the pool that the token of a node is for, None if it is for any."""
        token = self._token(node.token_id)
        return None if token is None else token.pool

    def set_draining(self, transaction: Transaction, node_id: int, *, is_draining: bool) -> None:
        """Drain a node or take it back, after the commit of a transaction.

        Raises:
            UnknownNodeError: There is no such node.
        """
        node = self.get(node_id)
        if node is None:
            raise UnknownNodeError(f"There is no node {node_id}.")
        nodes = tables.nodes
        transaction.connection.execute(
            update(nodes).where(nodes.c.id == node_id).values(is_draining=is_draining)
        )
        transaction.after_commit(lambda: self._replace(node_id, is_draining))

    def forget(self, transaction: Transaction, node_id: int) -> None:
        """Forget a node after the commit of a transaction; its runner has to register again."""
        nodes, connection = tables.nodes, transaction.connection
        keep_ids(connection, nodes)
        connection.execute(delete(nodes).where(nodes.c.id == node_id))
        drained = tables.drained_slots
        connection.execute(delete(drained).where(drained.c.node_id == node_id))
        transaction.after_commit(lambda: self._drop(node_id))

    def look(self, transaction: Transaction) -> None:
        """Store when lost nodes were heard of, and forget those that nobody waits for; seldom."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_INTERVAL_S
        self._store_seen(transaction)
        ids = self._forgettable(time.time())
        if not ids:
            return
        connection, drained = transaction.connection, tables.drained_slots.c.node_id
        used = {id_ for one in live_attempts(connection) for id_ in slots_by_node(one)}
        used |= set(connection.execute(select(drained)).scalars())
        for node_id in ids:
            if node_id not in used:
                logger.info("The node %s is forgotten: it is lost.", self._nodes[node_id].name)
                self.forget(transaction, node_id)

    def _forgettable(self, now: float) -> list[int]:
        """Return the nodes that are lost for long.

        One whose token can no longer be used, as that of a job that has ended, is waited for less.
        Drained ones stay, so that they come back as such. Those that a token is for stay as well,
        as long as it can be used: by it, no other machine gets their name.
        """
        with self._lock:
            return [
                node.id
                for node in self.all()
                if self.is_lost(node.id)
                and not node.is_draining
                and now > self._last_sign(node) + self._kept_s(node)
            ]

    def _last_sign(self, node: RegisteredNode) -> float:
        # Of those that were lost before this master came, nobody knows when.
        return max(self.seen_at(node.id) or self._started_at, node.registered_at)

    def _kept_s(self, node: RegisteredNode) -> float:
        if not self._can_be_used(node.token_id):
            return _ENDED_KEPT_S
        token = self._token(node.token_id)
        is_for_any = token is None or token.node is None or STARTER_LABEL in node.facts.labels
        return _LOST_KEPT_S if is_for_any else math.inf

    # ---- helpers ------------------------------------------------------------------------

    def _token(self, token_id: int | None) -> StoredToken | None:
        return None if token_id is None else self._token_of(token_id)

    def _can_be_used(self, token_id: int | None) -> bool:
        token = self._token(token_id)
        return token_id is None or (token is not None and token.is_usable)

    def _note_left(self, node_id: int, *, has_left: bool) -> None:
        """Note that a node leaves or has come back; stored soon, for the next master."""
        heard = self._heard[node_id]
        if heard.has_left == has_left:
            return
        heard.has_left = has_left
        values = {"has_left": has_left, "seen_at": heard.seen_at}
        query = update(tables.nodes).where(tables.nodes.c.id == node_id).values(**values)
        self._database.write(lambda transaction: transaction.connection.execute(query))

    def _store_seen(self, transaction: Transaction) -> None:
        """Store when nodes that are lost were last heard of; once, as each change is recorded."""
        with self._lock:
            seen = {id_: heard.seen_at for id_, heard in self._heard.items() if self.is_lost(id_)}
            new = {id_: at for id_, at in seen.items() if at and at != self._stored_seen.get(id_)}
            self._log_changes(lost_before=self._stored_seen.keys(), lost=seen.keys())
            self._stored_seen = seen
        for node_id, seen_at in new.items():
            query = update(tables.nodes).where(tables.nodes.c.id == node_id)
            transaction.connection.execute(query.values(seen_at=seen_at))

    def _log_changes(self, *, lost_before: Collection[int], lost: Collection[int]) -> None:
        for node_id, node in self._nodes.items():
            if node_id in lost and node_id not in lost_before:
                seen_at = self.seen_at(node_id)
                when = "nobody knows when" if seen_at is None else time.ctime(seen_at)
                has_left = self._heard[node_id].has_left
                how = "has left" if has_left else "is lost: it gives no sign of life"
                logger.info("The node %s %s. It was last heard of: %s.", node.name, how, when)
            elif node_id in lost_before and node_id not in lost:
                logger.info("The node %s is back.", node.name)

    def _check_owner(
        self, known: RegisteredNode | None, facts: NodeFacts, token_id: int | None
    ) -> None:
        """Refuse a name that another machine or another token has and may still use.

        If it came by a token for this node alone, another machine is refused until the node is
        forgotten.
        """
        if facts.name == "local":
            raise NodeRefusedError("name_taken", "The node 'local' is the master's own machine.")
        if known is None:
            return
        before, token = self._token(known.token_id), self._token(token_id)
        is_bound = token is not None and token.node is not None
        if before is not None and before.node is not None:
            check_key_of_bound(known.facts, facts)
        remembered = self._nodes.get(known.id)
        has_just_registered = remembered is None or remembered.session != known.session
        if self.is_lost(known.id) and not has_just_registered:
            return
        if known.key != facts.key:
            way_out = (
                f"if that is not your machine, revoke its token or `paceline runner drain"
                f" {facts.name}`, and then `paceline runner forget {facts.name}`"
                if is_bound
                else "choose another name by `--name`, or wait until that one is lost"
            )
            raise NodeRefusedError(
                "name_taken",
                f"The name {facts.name!r} belongs to a runner with another directory on"
                f" {known.facts.host!r}, which is not lost. Hint: {way_out}.",
            )
        if is_bound:
            return  # A new token of the same machine.
        if known.token_id not in (token_id, None) and self._can_be_used(known.token_id):
            raise NodeRefusedError(
                "other_token",
                f"The node {facts.name!r} belongs to another token. Hint: use that one, or revoke"
                " it.",
            )

    def _remember(self, node: RegisteredNode) -> None:
        num_slots, pool = len(node.facts.devices), node.facts.pool
        logger.info("The node %s registers: pool %s, %d slot(s).", node.name, pool, num_slots)
        with self._lock:
            self._nodes[node.id] = node
            ever = self._heard[node.id].ever if node.id in self._heard else set()
            self._heard[node.id] = _Heard(ever=ever)
            self._versions.setdefault(node.id, int(time.time()))
            self.leases.end(node.id)
            self.leases.begin(node.id)
        # A poll of the session before is answered, and its sender told that it is over.
        self.tell(node.id)

    def _replace(self, node_id: int, is_draining: bool) -> None:
        with self._lock:
            self._nodes[node_id] = replace(self._nodes[node_id], is_draining=is_draining)
        self._wake()

    def _drop(self, node_id: int) -> None:
        with self._lock:
            for known in (self._nodes, self._heard, self._versions):
                known.pop(node_id, None)
            self.leases.end(node_id)
        self.orders.forget(node_id)
        self.polls.notify(node_id)


def _is_at_work(connection: Connection, node_id: int) -> bool:
    return any(node_id in slots_by_node(attempt) for attempt in live_attempts(connection))
