"""Nodes on which one trial after another fails: they rest, if there are others that do not."""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.master.scheduling import NodeSlots

NUM_TRIALS = 3
WITHIN_S = 60.0
REST_S = 600.0


@dataclass(slots=True)
class _Failures:
    """The last failures on a node: when, and of which trials."""

    recent: deque[tuple[float, int]] = field(default_factory=deque)
    rests_until: float = 0.0


class FailingNodes:
    """Which nodes fail; for any thread. Times are in seconds since the epoch.

    A node fails if attempts of three different trials failed on it within a minute, and none has
    succeeded there since. Forgotten when the master ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[int, _Failures] = {}

    def note_failure(self, node_id: int, trial_id: int, now: float) -> None:
        """Note that an attempt of a trial failed on a node, without a checkpoint."""
        with self._lock:
            failures = self._failures.setdefault(node_id, _Failures())
            failures.recent.append((now, trial_id))
            while failures.recent[0][0] < now - WITHIN_S:
                failures.recent.popleft()
            if len({trial for _, trial in failures.recent}) >= NUM_TRIALS:
                failures.rests_until = now + REST_S

    def note_success(self, node_id: int) -> None:
        """Note that an attempt did its work on a node, or stored a checkpoint there."""
        with self._lock:
            self._failures.pop(node_id, None)

    def all(self, now: float) -> dict[int, float]:
        """Return the nodes that fail, and until when they rest if others do not fail."""
        with self._lock:
            return {
                node_id: failures.rests_until
                for node_id, failures in self._failures.items()
                if now < failures.rests_until <= now + REST_S
            }


def resting_nodes(
    failing: Mapping[int, float], nodes: Iterable[NodeSlots], returning: Iterable[NodeSlots]
) -> dict[int, float]:
    """Return the failing nodes that rest: if all of a pool fail, the cause is not in the nodes.

    Args:
        failing: The nodes that fail, and until when they would rest.
        nodes: The nodes that are there, in their pools.
        returning: Those that were there a moment ago.
    """
    if not failing:
        return {}
    nodes = [*nodes]
    good = {
        node.pool
        for node in [*(one for one in nodes if one.is_open), *returning]
        if node.node_id not in failing and set(node.slots) - node.drained
    }
    return {
        node.node_id: failing[node.node_id]
        for node in nodes
        if node.node_id in failing and node.pool in good
    }
