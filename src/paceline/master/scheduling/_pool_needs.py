"""How many more slots each pool could use: for executors that start runners by need."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.master.scheduling._scheduling_types import Holding, Reason, SchedulingResult

# What these lack is no node.
_NO_NODE_HELPS = frozenset(
    {
        Reason.MAX_SLOTS,
        Reason.MAX_TRIALS,
        Reason.POOL_LIMIT,
        Reason.PREEMPTING,
        Reason.PAUSING,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNeed:
    """What the waiting trials of a pool lack.

    `sizes` has the number of slots of each of them, in the order in which they get some.
    """

    sizes: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Return the slots that all of them need."""
        return sum(self.sizes)


def needs_node(result: SchedulingResult) -> bool:
    """Tell whether a trial waits for what another node would give."""
    return result.reason is not None and result.reason not in _NO_NODE_HELPS


def needs_of(
    results: Iterable[SchedulingResult], holding: Iterable[Holding]
) -> dict[str, PoolNeed]:
    """Return of each pool what further nodes would be used for; pools that need none are absent.

    The limits of experiments count: of one that may use three more slots, trials for three do.
    """
    used: Counter[int] = Counter()
    num_trials: Counter[int] = Counter()
    for holder in holding:
        used[holder.experiment_id] += holder.num_slots
        num_trials[holder.experiment_id] += 1
    sizes: dict[str, list[int]] = defaultdict(list)
    for result in results:
        trial = result.waiting
        if result.reason in _NO_NODE_HELPS:
            continue
        used[trial.experiment_id] += trial.num_slots
        num_trials[trial.experiment_id] += 1
        if _is_beyond(trial.max_slots, used[trial.experiment_id]) or _is_beyond(
            trial.max_trials, num_trials[trial.experiment_id]
        ):
            used[trial.experiment_id] -= trial.num_slots
            num_trials[trial.experiment_id] -= 1
        elif result.reason is not None:
            sizes[trial.pool].append(trial.num_slots)
    return {pool: PoolNeed(sizes=tuple(found)) for pool, found in sizes.items()}


def _is_beyond(limit: int | None, number: int) -> bool:
    return limit is not None and number > limit
