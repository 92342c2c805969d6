"""Placement of trials: the fitting node with the fewest free slots, else as few as suffice."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from paceline._cluster.master.scheduling.pools import Holding, NodeSlots, Part


class FreeSlots:
    """Free slots of a pool's nodes; the nodes are found by how many they have."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        # The order in which nodes were added: of several that fit equally well, the first is taken.
        self._rank: dict[int, int] = {}
        self._nodes: list[int] = []
        # Heaps of node ranks by number of free slots, with outdated entries removed lazily.
        self._ranks: dict[int, list[int]] = {}
        # How many of the nodes that can join others have each number of free slots.
        self._joining: dict[int, int] = {}
        self._can_join: set[int] = set()

    def add(self, node_id: int, slots: Iterable[int], *, can_join: bool = False) -> None:
        """Add free slots of a node; `can_join` counts only at the node's first call."""
        if node_id not in self._rank:
            if can_join:
                self._can_join.add(node_id)
            self._rank[node_id] = len(self._nodes)
            self._nodes.append(node_id)
            self._set(node_id, sorted(slots))
        else:
            self._set(node_id, sorted({*self._free[node_id], *slots}))

    def remove(self, node_id: int, slots: Iterable[int]) -> None:
        """Remove slots of a node; absent slots are ignored."""
        if node_id in self._free:
            gone = set(slots)
            self._set(node_id, [slot for slot in self._free[node_id] if slot not in gone])

    @contextmanager
    def without(self, node_ids: Iterable[int]) -> Iterator[None]:
        """Hide some nodes within the context: they have no free slots."""
        hidden = {node_id: self._free[node_id] for node_id in node_ids if node_id in self._free}
        for node_id in hidden:
            self._set(node_id, [])
        try:
            yield
        finally:
            for node_id, free in hidden.items():
                self._set(node_id, free)

    def keep(self, node_id: int) -> None:
        """Give no slot of a node any more."""
        if node_id in self._free:
            self._set(node_id, [])

    def num_free(self, node_id: int) -> int:
        """Return the number of free slots of a node."""
        return len(self._free.get(node_id, ()))

    def take(self, num_slots: int, *, allow_uneven: bool = False) -> list[Part] | None:
        """Take slots of a single node, else of several; None if they do not fit.

        Args:
            num_slots: The number of slots in all.
            allow_uneven: Whether one of several nodes may give more than another.
        """
        sizes = self._sizes(num_slots, allow_uneven)
        if sizes is None:
            return None
        found: list[tuple[int, list[int]]] = []
        passed_over: list[tuple[int, list[int]]] = []
        while len(found) < len(sizes):
            node_id = self._find(sizes[len(found)])
            assert node_id is not None
            free = self._free[node_id]
            is_fitting = len(sizes) == 1 or node_id in self._can_join
            (found if is_fitting else passed_over).append((node_id, free))
            # Empty entry for now: the next search must not find the node again.
            self._set(node_id, [])
        parts = []
        for (node_id, free), size in zip(found, sizes, strict=True):
            self._set(node_id, free[size:])
            parts.append((node_id, tuple(free[:size])))
        for node_id, free in passed_over:
            self._set(node_id, free)
        return parts

    def fits(self, num_slots: int, *, allow_uneven: bool = False) -> bool:
        """Return whether `take` would find so many slots."""
        return self._sizes(num_slots, allow_uneven) is not None

    def fits_one(self, num_slots: int) -> bool:
        """Return whether a single node has the number of slots."""
        return self._find(num_slots) is not None

    def _sizes(self, num_slots: int, allow_uneven: bool) -> list[int] | None:
        """Return how many slots each of the nodes is to give, the largest number first."""
        if self._find(num_slots) is not None:
            return [num_slots]
        counts = sorted(
            ((size, n) for size, n in self._joining.items() if n and size), reverse=True
        )
        if sum(size * number for size, number in counts) < num_slots:
            return None
        for num_nodes in range(2, num_slots + 1):
            size = num_slots // num_nodes
            if num_slots % num_nodes == 0 and num_nodes <= sum(n for s, n in counts if s >= size):
                return [size] * num_nodes
        return list(_filled(counts, num_slots)) if allow_uneven else None

    def _find(self, num_slots: int) -> int | None:
        for number in sorted(n for n, ranks in self._ranks.items() if n >= num_slots and ranks):
            ranks = self._ranks[number]
            while ranks:
                node_id = self._nodes[ranks[0]]
                if len(self._free[node_id]) == number:
                    return node_id
                # Outdated entry: the node has another number of free slots by now.
                heapq.heappop(ranks)
        return None

    def _set(self, node_id: int, free: list[int]) -> None:
        if node_id in self._can_join:
            if node_id in self._free:
                self._joining[len(self._free[node_id])] -= 1
            self._joining[len(free)] = self._joining.get(len(free), 0) + 1
        self._free[node_id] = free
        heapq.heappush(self._ranks.setdefault(len(free), []), self._rank[node_id])


def _filled(counts: Iterable[tuple[int, int]], num_slots: int) -> Iterator[int]:
    """Yield how many slots nodes give if the largest are used up first."""
    for size, number in counts:
        for _ in range(number):
            if num_slots <= 0:
                return
            yield min(size, num_slots)
            num_slots -= size


def fits_nodes(nodes: Iterable[NodeSlots], num_slots: int, *, allow_uneven: bool = False) -> bool:
    """Return whether a trial could run on some nodes if they were free."""
    free = FreeSlots()
    for node in nodes:
        free.add(node.node_id, set(node.slots) - node.drained, can_join=node.can_join)
    return free.fits(num_slots, allow_uneven=allow_uneven)


UsableSlots = Callable[[Holding], Sequence[Part]]
"""Returns the parts of an attempt that others may use once it has left."""


def choose_victims(
    levels: Iterator[Iterable[Holding]], free: FreeSlots, num_slots: int, usable: UsableSlots
) -> tuple[Holding, ...] | None:
    """Return attempts to preempt for room on a single node; None if there are none.

    Attempts of a level are chosen only if the levels before do not suffice. Then as
    few as possible are chosen, and among equally few the first ones.
    """
    on_node: dict[int, list[tuple[int, int, Holding]]] = defaultdict(list)
    gained: dict[int, int] = defaultdict(int)
    place = 0
    for level in levels:
        for one in level:
            for node_id, slots in usable(one):
                size = len(slots)
                if size == 0:
                    continue
                missing = num_slots - free.num_free(node_id)
                if size >= missing:
                    return (one,)
                on_node[node_id].append((place, size, one))
                gained[node_id] += size
                place += 1
        found = [
            _fewest_victims(attempts, num_slots - free.num_free(node_id))
            for node_id, attempts in on_node.items()
            if gained[node_id] >= num_slots - free.num_free(node_id)
        ]
        if found:
            best = min(found, key=lambda chosen: (len(chosen), [place for place, _, _ in chosen]))
            return tuple(one for _, _, one in best)
    return None


def _fewest_victims(
    attempts: Sequence[tuple[int, int, Holding]], missing: int
) -> list[tuple[int, int, Holding]]:
    """Return as few attempts as give so many slots; of equally few the earliest."""
    left = sorted((size for _, size, _ in attempts), reverse=True)
    number, total = 0, 0
    while total < missing:
        total += left[number]
        number += 1
    chosen: list[tuple[int, int, Holding]] = []
    for index, attempt in enumerate(attempts):
        if len(chosen) == number:
            break
        others = sorted((size for _, size, _ in attempts[index + 1 :]), reverse=True)
        most = sum(others[: number - len(chosen) - 1])
        # An early attempt is taken if the later ones can give the rest.
        if attempt[1] + most >= missing:
            chosen.append(attempt)
            missing -= attempt[1]
    return chosen


def choose_victims_until(
    levels: Iterator[Iterable[Holding]], suffices: Callable[[Sequence[Holding]], bool]
) -> tuple[Holding, ...] | None:
    """Return attempts sufficient together, in the order of the levels; None if none are.

    None of them can be left out.
    """
    chosen: list[Holding] = []
    for level in levels:
        for one in level:
            chosen.append(one)
            if suffices(chosen):
                return tuple(_needed_victims(chosen, suffices))
    return None


def _needed_victims(
    chosen: list[Holding], suffices: Callable[[Sequence[Holding]], bool]
) -> list[Holding]:
    needed = list(chosen)
    # The last ones are spared first.
    for one in reversed(chosen):
        others = [other for other in needed if other is not one]
        if suffices(others):
            needed = others
    return needed
