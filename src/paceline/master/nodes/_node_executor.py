"""Attempts on all nodes behind one executor: the master's own, and those whose runners poll."""

from sqlalchemy import select

from paceline.master.executors import AttemptStatus, Executor, Launch
from paceline.master.nodes._nodes import Nodes
from paceline.master.store import Database, tables
from paceline.messages.nodes import LOCAL_NODE
from paceline.messages.states import AttemptState

_MAX_KNOWN = 10_000


class NodeExecutor(Executor):
    """Hand each attempt to the executor of the master's machine, or offer it to its node.

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

    def start(self, launch: Launch) -> None:
        """Start an attempt's runner, or have its node do so."""
        node_id = self._place(launch.spec.attempt_id)
        if node_id == LOCAL_NODE:
            self._local.start(launch)
        else:
            self._nodes.offer(node_id, launch)

    def status(self, attempt_id: int) -> AttemptStatus:
        """Tell whether an attempt's runner is at work.

        What a dead runner leaves on a node is shipped there, so none is gone for the master.
        """
        node_id = self._place(attempt_id)
        if node_id == LOCAL_NODE:
            return self._local.status(attempt_id)
        state = self._state(attempt_id)
        if state in (None, AttemptState.ENDED.value):
            return AttemptStatus.GONE
        has_it = self._nodes.has_attempt(node_id, attempt_id)
        if has_it or self._nodes.has_offer(node_id, attempt_id):
            return AttemptStatus.ALIVE
        is_new = state == AttemptState.PENDING.value
        return AttemptStatus.NOT_STARTED if is_new else AttemptStatus.ALIVE

    def ship(self, attempt_id: int) -> None:
        """Have what a dead or departed runner left behind sent; nodes do so by themselves."""
        if self._place(attempt_id) == LOCAL_NODE:
            self._local.ship(attempt_id)

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner, or have its node do so."""
        node_id = self._place(attempt_id)
        if node_id == LOCAL_NODE:
            self._local.kill_runner(attempt_id)
        else:
            self._nodes.kill(node_id, attempt_id)

    def is_out_of_reach(self, attempt_id: int) -> bool:
        """Tell whether the attempt's node is lost."""
        node_id = self._place(attempt_id)
        if node_id == LOCAL_NODE:
            return self._local.is_out_of_reach(attempt_id)
        return self._nodes.is_lost(node_id)

    def sign_of_life(self, attempt_id: int) -> object:
        """Return what changes while a runner lives; from nodes there are requests alone."""
        is_local = self._place(attempt_id) == LOCAL_NODE
        return self._local.sign_of_life(attempt_id) if is_local else None

    def clean(self, keep: set[int]) -> None:
        """Remove what ended attempts left here; nodes do so when they hear of the end."""
        self._local.clean(keep)
        self._nodes.clean(keep)

    def close(self) -> None:
        """Let go of what belongs to this process."""
        self._local.close()

    def _place(self, attempt_id: int) -> int:
        if attempt_id not in self._node_of:
            attempts = tables.attempts.c
            with self._database.read() as connection:
                query = select(attempts.node_id).where(attempts.id == attempt_id)
                found = connection.execute(query).scalar()
            if len(self._node_of) >= _MAX_KNOWN:
                self._node_of.clear()
            self._node_of[attempt_id] = found or LOCAL_NODE
        return self._node_of[attempt_id]

    def _state(self, attempt_id: int) -> str | None:
        attempts = tables.attempts.c
        with self._database.read() as connection:
            query = select(attempts.state).where(attempts.id == attempt_id)
            return connection.execute(query).scalar()
