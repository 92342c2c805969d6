"""How many runners a pool lacks."""

from collections.abc import Mapping, Sequence

from paceline.master.scheduling import PoolNeed


def runner_groups(need: PoolNeed, num_slots: int) -> list[int]:
    """Return how many runners with so many slots the trials of a need fit on, in groups.

    A trial that is larger than one runner gets a group to itself.
    """
    groups, free = [], 0
    for size in need.sizes:
        if size > num_slots:
            groups.append(-(-size // num_slots))
        elif size <= free:
            free -= size
        else:
            groups.append(1)
            free = num_slots - size
    return groups


def missing_runners(
    groups: Sequence[int], num_idle: int, starting: Mapping[str, int]
) -> tuple[list[int], set[str]]:
    """Return how many runners are to be started together for each group that lacks some.

    A group gets idle runners first. The rest of it must start together, as those that wait one by
    one might never be there at once.

    Args:
        groups: How many runners each group needs.
        num_idle: How many runners are idle.
        starting: How many runners start together, by the name of their group.

    Returns:
        The numbers, and the groups of those that start and are needed.
    """
    missing, awaited, free = [], set(), dict(starting)
    for size in groups:
        num_taken = min(size, num_idle)
        num_idle -= num_taken
        size -= num_taken
        if not size:
            continue
        fitting = [name for name, num_free in free.items() if num_free >= size]
        if fitting:
            group = min(fitting, key=free.__getitem__)
            free[group] -= size
            awaited.add(group)
        else:
            missing.append(size)
    return missing, awaited
