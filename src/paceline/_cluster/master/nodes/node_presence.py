"""Presence of nodes: their polls, leases and reported attempts; and their orders."""

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from paceline._cluster.master.executors import Launch
from paceline._cluster.master.experiments.attempts import Leases
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.waiting import WaitingRequests, Wakeups
from paceline._cluster.messages.runner_messages import NodePoll


@dataclass(slots=True)
class _Heard:
    """State of a node as heard by this master since its start."""

    session: int
    number: int = 0
    is_ready: bool = False
    problem: str = ""
    is_cut_off: bool = False
    has_left: bool = False
    seen_at: float | None = None
    attempts: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    # Attempts reported in any session with this master.
    ever: set[int] = field(default_factory=set)
    # The newest poll when the node was doubted: only a later one shows that it stays.
    doubted: int = -1
    # Attempts that ended while the node had them, and whose end it knows.
    told: frozenset[int] = frozenset()


class NodePresence:
    """Presence of nodes by their newest polls; callable from any thread.

    Args:
        lease_s: How long a node may be silent until it is lost, in seconds.
        database: Where it is stored, for the next master, that a node has left or is back.
        wakeups: Woken when slots may have become free or lost.
    """

    def __init__(self, lease_s: float, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups
        self._lock = threading.RLock()
        self._heard: dict[int, _Heard] = {}
        # Grows with each change of a node's work; another number than before the master started.
        self._versions: dict[int, int] = {}
        self.leases = Leases(lease_s)
        self.polls = WaitingRequests()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the server's event loop."""
        self.polls.attach(loop)
        self.leases.attach(loop)

    def begin(self, node_id: int, session: int, *, has_left: bool = False) -> None:
        """Start expecting the polls of a node, or of its new session.

        A poll of the session before gets the answer that its session is over.

        Args:
            node_id: The node.
            session: The number of its session.
            has_left: Whether it has said that it leaves.
        """
        with self._lock:
            before = self._heard.get(node_id)
            ever = set() if before is None else before.ever
            self._heard[node_id] = _Heard(session=session, has_left=has_left, ever=ever)
            # Higher than the versions of an earlier master, for which the node may still wait.
            self._versions.setdefault(node_id, int(time.time()))
            self.leases.end(node_id)
            self.leases.begin(node_id)
        self.tell(node_id)

    def forget(self, node_id: int) -> None:
        """Forget a node; its poll is answered."""
        with self._lock:
            self._heard.pop(node_id, None)
            self._versions.pop(node_id, None)
            self.leases.end(node_id)
        self.polls.notify(node_id)

    # ---- polls --------------------------------------------------------------------------

    def hear(self, node_id: int, poll: NodePoll) -> None:
        """Handle a poll of the current session: renew the lease, store reported attempts."""
        with self._lock:
            heard = self._heard[node_id]
            # Outdated poll: requests of a session may overtake each other.
            if poll.number < heard.number:
                return
            was_ready = heard.is_ready and not self.leases.is_over(node_id)
            self.leases.begin(node_id)
            self.leases.renew(node_id)
            heard.number, heard.seen_at = poll.number, time.time()
            heard.is_cut_off = False
            # Nodes with attempts are not gone yet: their runners may still have reports to send.
            self._note_left(node_id, has_left=poll.is_leaving and not poll.attempts)
            heard.attempts, heard.alive = frozenset(poll.attempts), frozenset(poll.alive)
            heard.ever |= heard.attempts
            was_well, heard.problem = not heard.problem, " ".join(_printable(poll.problem))
        if not was_ready or was_well == bool(heard.problem):
            self._wakeups.wake()

    def is_newest(self, node_id: int, poll: NodePoll) -> bool:
        """Return whether a poll is the node's newest; older polls know less."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and (poll.session, poll.number) == (
                heard.session,
                heard.number,
            )

    def note_cut_off(self, node_id: int, poll: NodePoll) -> None:
        """Record the closing of a poll's connection before the answer.

        The node gets no attempts until it polls again.
        """
        with self._lock:
            if not self.is_newest(node_id, poll):
                return
            heard = self._heard[node_id]
            heard.is_cut_off, heard.is_ready = True, False
        self._wakeups.wake()

    def note_ended(self, node_id: int) -> None:
        """Record the end of a disconnected runner, reported by its starter."""
        with self._lock:
            heard = self._heard.get(node_id)
            if heard is not None and heard.is_cut_off:
                self._note_left(node_id, has_left=True)
        self._wakeups.wake()

    def note_ready(self, node_id: int, poll: NodePoll, *, is_ready: bool) -> None:
        """Record a node's readiness for attempts according to a poll."""
        with self._lock:
            heard = self._heard.get(node_id)
            if heard is None or poll.number <= heard.doubted:
                return
            changed = heard.is_ready != is_ready
            heard.is_ready = is_ready
        if changed:
            self._wakeups.wake()

    def doubt(self, node_id: int) -> None:
        """Give a node no attempts until its next poll, and request the poll now."""
        with self._lock:
            heard = self._heard.get(node_id)
            if heard is None:
                return
            heard.is_ready, heard.doubted = False, heard.number
        self.tell(node_id)

    def tell(self, node_id: int) -> None:
        """Answer the waiting poll of a node, because its work has changed."""
        with self._lock:
            self._versions[node_id] = self._versions.get(node_id, 0) + 1
        self.polls.notify(node_id)

    def notify_ended_attempts(self, keep: set[int]) -> None:
        """Notify the nodes still holding ended attempts.

        Args:
            keep: The attempts that have not.
        """
        with self._lock:
            for node_id, heard in self._heard.items():
                ended = heard.attempts - keep
                if ended - heard.told:
                    self.tell(node_id)
                heard.told = ended

    def version(self, node_id: int) -> int:
        """Return the version of a node's work."""
        with self._lock:
            return self._versions.get(node_id, 0)

    # ---- queries of other parts ----------------------------------------------------------------

    def has_attempt(self, node_id: int, attempt_id: int) -> bool:
        """Return whether a node's newest poll reports an attempt."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and attempt_id in heard.attempts

    def had_attempt(self, node_id: int, attempt_id: int) -> bool:
        """Return whether a node has ever reported an attempt."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and attempt_id in heard.ever

    def reported_alive(self, node_id: int) -> frozenset[int]:
        """Return the attempts with active runners on a node, by its newest poll."""
        with self._lock:
            return self._heard[node_id].alive

    def is_ready(self, node_id: int) -> bool:
        """Return whether a node may get attempts, by its newest poll."""
        with self._lock:
            return self._heard[node_id].is_ready

    def problem(self, node_id: int) -> str:
        """Return what a node lacks for new attempts, by its newest poll; empty for nothing."""
        with self._lock:
            heard = self._heard.get(node_id)
            return "" if heard is None else heard.problem

    def has_left(self, node_id: int) -> bool:
        """Return whether a node has announced leaving and has not come back."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is not None and heard.has_left

    def is_lost(self, node_id: int) -> bool:
        """Return whether a node has left or was silent for too long, or is unknown."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is None or heard.has_left or self.leases.is_over(node_id)

    def is_cut_off(self, node_id: int) -> bool:
        """Return whether the connection of a node's newest poll was closed before the answer."""
        with self._lock:
            heard = self._heard.get(node_id)
            return heard is None or heard.is_cut_off

    def heard_at(self, node_id: int) -> float | None:
        """Return the time of a node's last poll to this master in epoch seconds, None without."""
        with self._lock:
            heard = self._heard.get(node_id)
            return None if heard is None else heard.seen_at

    def _note_left(self, node_id: int, *, has_left: bool) -> None:
        heard = self._heard[node_id]
        if heard.has_left != has_left:
            heard.has_left = has_left
            values = {"has_left": has_left, "seen_at": heard.seen_at}
            query = sa.update(tables.nodes).where(tables.nodes.c.id == node_id).values(**values)
            # Nobody waits for the commit.
            self._database.write(lambda transaction: transaction.connection.execute(query))


def _printable(text: str) -> list[str]:
    """Return the words of a stranger's text without what a terminal would obey."""
    return "".join(one if one.isprintable() else " " for one in text).split()


class NodeOrders:
    """The launches and kills of all nodes, until their attempts have ended; for any thread.

    Args:
        presence: Answers the poll of a node that has another order.
    """

    def __init__(self, presence: NodePresence) -> None:
        self._presence = presence
        self._lock = threading.Lock()
        self._launches: dict[int, dict[int, Launch]] = {}
        self._kills: dict[int, set[int]] = {}

    def start(self, node_id: int, launch: Launch) -> None:
        """Have a node start an attempt; a second time changes nothing."""
        with self._lock:
            self._launches.setdefault(node_id, {})[launch.spec.attempt_id] = launch
        self._presence.tell(node_id)

    def kill(self, node_id: int, attempt_id: int) -> None:
        """Have a node kill the runner of an attempt."""
        with self._lock:
            self._kills.setdefault(node_id, set()).add(attempt_id)
        self._presence.tell(node_id)

    def has_launch(self, node_id: int, attempt_id: int) -> bool:
        """Tell whether a launch of an attempt waits for a node, or was taken."""
        with self._lock:
            return attempt_id in self._launches.get(node_id, ())

    def launches(self, node_id: int) -> Mapping[int, Launch]:
        """Return the launches offered to a node, whether waiting or taken."""
        with self._lock:
            return dict(self._launches.get(node_id, {}))

    def kills(self, node_id: int) -> list[int]:
        """Return the attempts with runners to be killed by a node."""
        with self._lock:
            return sorted(self._kills.get(node_id, ()))

    def clean(self, keep: set[int]) -> None:
        """Forget the orders for ended attempts."""
        with self._lock:
            for launches in self._launches.values():
                for attempt_id in launches.keys() - keep:
                    del launches[attempt_id]
            for kills in self._kills.values():
                kills &= keep

    def forget(self, node_id: int) -> None:
        """Forget the orders of a node."""
        with self._lock:
            self._launches.pop(node_id, None)
            self._kills.pop(node_id, None)
