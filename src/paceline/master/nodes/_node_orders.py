"""What nodes are to do: start the runners of attempts, and kill some."""

import threading
from collections.abc import Callable, Mapping

from paceline.master.executors import Launch


class NodeOrders:
    """The launches and kills of all nodes, until their attempts have ended; for any thread.

    Args:
        tell: Called with the id of a node that has another order.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._launches: dict[int, dict[int, Launch]] = {}
        self._kills: dict[int, set[int]] = {}

    def start(self, node_id: int, launch: Launch) -> None:
        """Have a node start an attempt; a second time changes nothing."""
        with self._lock:
            self._launches.setdefault(node_id, {})[launch.spec.attempt_id] = launch
        self._tell(node_id)

    def kill(self, node_id: int, attempt_id: int) -> None:
        """Have a node kill the runner of an attempt."""
        with self._lock:
            self._kills.setdefault(node_id, set()).add(attempt_id)
        self._tell(node_id)

    def has_launch(self, node_id: int, attempt_id: int) -> bool:
        """Tell whether a launch of an attempt waits for a node, or was taken."""
        with self._lock:
            return attempt_id in self._launches.get(node_id, ())

    def launches(self, node_id: int) -> Mapping[int, Launch]:
        """Return the launches that wait for a node, and those that it has taken."""
        with self._lock:
            return dict(self._launches.get(node_id, {}))

    def kills(self, node_id: int) -> list[int]:
        """Return the attempts whose runners a node is to kill."""
        with self._lock:
            return sorted(self._kills.get(node_id, ()))

    def clean(self, keep: set[int]) -> None:
        """Forget the orders of attempts that have ended."""
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
