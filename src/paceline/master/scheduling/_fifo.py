"""First come, first served."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A trial that wants to run, in the order of arrival."""

    trial_id: int
    experiment_id: int
    num_slots: int
    max_slots: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """An attempt that holds slots."""

    experiment_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Slots given to a trial."""

    trial_id: int
    slots: tuple[int, ...]


def place(
    waiting: Iterable[Waiting], holding: Iterable[Holding], all_slots: Iterable[int]
) -> list[Placement]:
    """Give free slots to waiting trials in order.

    A trial that does not fit holds up those behind it, so that a large one is never starved by
    small ones; one that only its experiment's own `max_slots` holds back does not, and neither does
    one that needs more slots than there are (this master may have fewer than the one before).
    """
    used_by: Counter[int] = Counter()
    taken: set[int] = set()
    for holder in holding:
        used_by[holder.experiment_id] += len(holder.slots)
        taken.update(holder.slots)
    existing = sorted(all_slots)
    free = [slot for slot in existing if slot not in taken]
    placements = []
    for trial in waiting:
        in_use = used_by[trial.experiment_id]
        if trial.max_slots is not None and in_use + trial.num_slots > trial.max_slots:
            continue
        if trial.num_slots > len(existing):
            continue
        if trial.num_slots > len(free):
            break
        slots, free = free[: trial.num_slots], free[trial.num_slots :]
        used_by[trial.experiment_id] += trial.num_slots
        placements.append(Placement(trial_id=trial.trial_id, slots=tuple(slots)))
    return placements
