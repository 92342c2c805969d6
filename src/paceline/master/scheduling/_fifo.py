"""First come, first served."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """Why a waiting trial gets no slots."""

    SLOTS_IN_USE = "slots_in_use"
    BEHIND_OTHERS = "behind_others"
    MAX_SLOTS = "max_slots"
    TOO_LARGE = "too_large"


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
class SlotAssignment:
    """Slots given to a trial."""

    trial_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingResult:
    """Result for a waiting trial: its slots, or the reason why it gets none."""

    waiting: Waiting
    slots: tuple[int, ...] = ()
    reason: Reason | None = None


def assign_slots(
    waiting: Iterable[Waiting], holding: Iterable[Holding], all_slots: Iterable[int]
) -> list[SlotAssignment]:
    """Give free slots to waiting trials in order.

    A trial that does not fit holds up those behind it, so that a large one is never starved by
    small ones; one that only its experiment's own `max_slots` holds back does not, and neither does
    one that needs more slots than there are (this master may have fewer than the one before).
    """
    assignments = []
    for result in decide(waiting, holding, all_slots):
        if result.reason is Reason.SLOTS_IN_USE:
            break
        if result.slots:
            trial_id = result.waiting.trial_id
            assignments.append(SlotAssignment(trial_id=trial_id, slots=result.slots))
    return assignments


def decide(
    waiting: Iterable[Waiting], holding: Iterable[Holding], all_slots: Iterable[int]
) -> Iterator[SchedulingResult]:
    """Yield for each waiting trial, in order, what it gets and why it gets nothing."""
    used_by: Counter[int] = Counter()
    taken: set[int] = set()
    for holder in holding:
        used_by[holder.experiment_id] += len(holder.slots)
        taken.update(holder.slots)
    existing = sorted(all_slots)
    free = [slot for slot in existing if slot not in taken]
    is_held_up = False
    for trial in waiting:
        in_use = used_by[trial.experiment_id]
        if trial.max_slots is not None and in_use + trial.num_slots > trial.max_slots:
            yield SchedulingResult(waiting=trial, reason=Reason.MAX_SLOTS)
        elif trial.num_slots > len(existing):
            yield SchedulingResult(waiting=trial, reason=Reason.TOO_LARGE)
        elif is_held_up:
            yield SchedulingResult(waiting=trial, reason=Reason.BEHIND_OTHERS)
        elif trial.num_slots > len(free):
            is_held_up = True
            yield SchedulingResult(waiting=trial, reason=Reason.SLOTS_IN_USE)
        else:
            slots, free = free[: trial.num_slots], free[trial.num_slots :]
            used_by[trial.experiment_id] += trial.num_slots
            yield SchedulingResult(waiting=trial, slots=tuple(slots))
