"""Which node a trial gets: the fitting one with the fewest free slots."""

import heapq
from collections.abc import Iterable


class FreeSlots:
    """Free slots of a pool's nodes; the nodes are found by how many they have."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        # The order in which nodes were added: of several that fit equally well, the first is taken.
        self._rank: dict[int, int] = {}
        self._nodes: list[int] = []
        # Of each number of free slots the ranks of nodes that have it or had it, as a heap.
        self._ranks: dict[int, list[int]] = {}

    def add(self, node_id: int, slots: Iterable[int]) -> None:
        """Add free slots of a node."""
        if node_id not in self._rank:
            self._rank[node_id] = len(self._nodes)
            self._nodes.append(node_id)
        self._set(node_id, sorted({*self._free.get(node_id, ()), *slots}))

    def remove(self, node_id: int, slots: Iterable[int]) -> None:
        """Remove slots of a node; those that are not there do not matter."""
        if node_id in self._free:
            gone = set(slots)
            self._set(node_id, [slot for slot in self._free[node_id] if slot not in gone])

    def num_free(self, node_id: int) -> int:
        """Return the number of free slots of a node."""
        return len(self._free.get(node_id, ()))

    def take(self, num_slots: int) -> tuple[int, tuple[int, ...]] | None:
        """Take slots of one node and return its id and them; None if no node has so many."""
        node_id = self._find(num_slots)
        if node_id is None:
            return None
        free = self._free[node_id]
        self._set(node_id, free[num_slots:])
        return node_id, tuple(free[:num_slots])

    def fits(self, num_slots: int) -> bool:
        """Tell whether `take` would find so many slots."""
        return self._find(num_slots) is not None

    def _find(self, num_slots: int) -> int | None:
        for number in sorted(n for n, ranks in self._ranks.items() if n >= num_slots and ranks):
            ranks = self._ranks[number]
            while ranks:
                node_id = self._nodes[ranks[0]]
                if len(self._free[node_id]) == number:
                    return node_id
                # It has another number of free slots by now.
                heapq.heappop(ranks)
        return None

    def _set(self, node_id: int, free: list[int]) -> None:
        self._free[node_id] = free
        heapq.heappush(self._ranks.setdefault(len(free), []), self._rank[node_id])
