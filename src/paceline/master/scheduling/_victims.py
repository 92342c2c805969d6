"""Which attempts leave so that a trial fits: as few as possible, and the youngest of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from paceline.master.scheduling._scheduling_types import Holding, Part
from paceline.master.scheduling._slot_placement import FreeSlots

UsableSlots = Callable[[Holding], Sequence[Part]]
"""Returns the parts of an attempt that others may use once it has left."""


def choose_victims(
    levels: Iterator[Iterable[Holding]], free: FreeSlots, num_slots: int, usable: UsableSlots
) -> tuple[Holding, ...] | None:
    """Return attempts whose slots make room on one node; None if none do.

    Attempts of a level are chosen only if those of the levels before do not suffice. Then there
    are as few as possible, and of equally few those that come first.
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
        if attempt[1] + most >= missing:
            chosen.append(attempt)
            missing -= attempt[1]
    return chosen


def choose_victims_until(
    levels: Iterator[Iterable[Holding]], suffices: Callable[[Sequence[Holding]], bool]
) -> tuple[Holding, ...] | None:
    """Return attempts that together suffice, in the order of the levels; None if none do.

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
    for one in reversed(chosen):
        others = [other for other in needed if other is not one]
        if suffices(others):
            needed = others
    return needed
