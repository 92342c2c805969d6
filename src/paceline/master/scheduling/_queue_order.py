"""The order in which experiments wait, as numbers that people's moves change.

The trials of an experiment that was never moved wait at places that are their ids, whole numbers.
The trials of one that was moved all wait at one place between two whole numbers.
"""

import math
from collections.abc import Mapping


def moved(
    places: Mapping[int, float], experiment_id: int, *, ahead_of: float | None, behind: float | None
) -> dict[int, float]:
    """Return the changed places of moved experiments, once one of them is moved.

    Args:
        places: The places of all experiments that were moved before.
        experiment_id: The one that is moved.
        ahead_of: The place right before which it goes.
        behind: The place right after which it goes, if not ahead of one.
    """
    if ahead_of is not None:
        target, cell = ahead_of, math.ceil(ahead_of) - 1
    else:
        assert behind is not None
        target, cell = behind, math.floor(behind)
    # Those between the same two whole numbers, in order; they are spread anew, so that there is
    # always room between two of them.
    same = sorted(
        (place, other)
        for other, place in places.items()
        if cell < place < cell + 1 and other != experiment_id
    )
    if ahead_of is not None:
        index = sum(place < target for place, _ in same)
    else:
        index = sum(place <= target for place, _ in same)
    order = [other for _, other in same]
    order.insert(index, experiment_id)
    return {other: cell + (n + 1) / (len(order) + 1) for n, other in enumerate(order)}
