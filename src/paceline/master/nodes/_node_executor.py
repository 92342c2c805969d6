"""Attempts on all nodes behind one executor: the master's own, and those whose runners poll."""

from typing import Any

from sqlalchemy import Row, select

from paceline.master.executors import AttemptStatus, Executor, Launch
from paceline.master.nodes._node_registry import Nodes
from paceline.master.store import Database, read_members, slots_by_node, tables
from paceline.messages.attempts import runner_id, split_runner_id
from paceline.messages.node_runners import LOCAL_NODE
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
        self._has_others: dict[int, bool] = {}

    def start(self, launch: Launch) -> None:
        """Start an attempt's runner, or have its node do so."""
        spec = launch.spec
        node_id = self._place(runner_id(spec.attempt_id, spec.member))
        if node_id == LOCAL_NODE:
            self._local.start(launch)
        else:
            self._nodes.orders.start(node_id, launch)

    def status(self, attempt_id: int) -> AttemptStatus:
        """Tell whether a runner is at work; `attempt_id` is its number, see `runner_id`.

        What a dead runner leaves on a node is shipped there, so none is gone for the master.
        """
        node_id = self._place(attempt_id)
        if node_id == LOCAL_NODE:
            return self._local.status(attempt_id)
        attempt, member = split_runner_id(attempt_id)
        state = self._state(attempt, member)
        if state in (None, AttemptState.ENDED.value):
            return AttemptStatus.GONE
        has_it = self._nodes.presence.has_attempt(node_id, attempt)
        if has_it or self._nodes.orders.has_launch(node_id, attempt):
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
            self._nodes.orders.kill(node_id, split_runner_id(attempt_id)[0])

    def is_out_of_reach(self, attempt_id: int) -> bool:
        """Tell whether a runner's node is lost.

        While others of its attempt wait for its end, a node whose poll was cut off counts as lost.
        """
        node_id = self._place(attempt_id)
        if node_id == LOCAL_NODE:
            return self._local.is_out_of_reach(attempt_id)
        is_cut_off = self._has_others[attempt_id] and self._nodes.presence.is_cut_off(node_id)
        return is_cut_off or self._nodes.presence.is_lost(node_id)

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

    def _place(self, number: int) -> int:
        """Return the node of a runner."""
        if number not in self._node_of:
            attempt_id, member = split_runner_id(number)
            row = self._row(attempt_id)
            if len(self._node_of) >= _MAX_KNOWN:
                self._node_of.clear()
                self._has_others.clear()
            nodes = [] if row is None else [*slots_by_node(row)]
            self._node_of[number] = nodes[member] if member < len(nodes) else LOCAL_NODE
            self._has_others[number] = len(nodes) > 1
        return self._node_of[number]

    def _state(self, attempt_id: int, member: int) -> str | None:
        row = self._row(attempt_id)
        if row is None or row.members is None or row.state == AttemptState.ENDED.value:
            return None if row is None else str(row.state)
        return read_members(row)[member].state.value

    def _row(self, attempt_id: int) -> Row[Any] | None:
        attempts = tables.attempts
        with self._database.read() as connection:
            query = select(attempts).where(attempts.c.id == attempt_id)
            return connection.execute(query).first()
