"""Shares and quotas of users and projects, and how past use of slots fades."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline._cluster.master.scheduling.pools import Holding, QuotaLimits, Waiting

DEFAULT_HALF_LIFE_S = 7 * 86400.0
"""Half-life by which past use is kept for pools that have none yet."""
# A held slot counts like this part of a half-life of past use: slots given in one pass alternate
# between users, and in the long run past use decides.
_AHEAD = 0.01


def recent_use(num_slots: int, begin: float, end: float, half_life_s: float) -> float:
    """Return slot seconds at the moment `end`, of which each half-life before halves the worth.

    At most a half-life's worth counts per slot, however far the clock jumps.
    """
    age = max(end - begin, 0.0)
    return num_slots * half_life_s / math.log(2) * -math.expm1(-age / half_life_s * math.log(2))


def faded(use_s: float, at: float, now: float, half_life_s: float) -> float:
    """Return past use at another time; use from beyond a clock that was set back fades as well."""
    return float(use_s * 0.5 ** (abs(now - at) / half_life_s))


def as_slots(use_s: float, half_life_s: float) -> float:
    """Return recent use as a number of held slots, as fair shares compare both."""
    return use_s / (_AHEAD * half_life_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What users and projects may use of the slots, at one moment.

    Attributes:
        weights: Weights of users and groups; 1 for those not listed.
        past: Recent use of users and groups as slots, by pool.
        quotas: Limits by name of a user or group, or id of a project.
        groups: The groups of users that are in one; their names begin with `@`.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    past: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    quotas: Mapping[str | int, QuotaLimits] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)


NO_SHARING = Sharing()


class QuotaUse:
    """Slots in use by those who have quotas: users, their groups, and projects."""

    def __init__(self, sharing: Sharing = NO_SHARING, holding: Iterable[Holding] = ()) -> None:
        self._quotas = quotas = sharing.quotas
        self._groups = sharing.groups
        self._used: Counter[str | int] = Counter()
        for one in holding if quotas else ():
            self.add(one, one.num_slots)

    def add(self, one: Waiting | Holding, num_slots: int) -> None:
        """Count slots for a trial's user, group and project."""
        for owner in self._owners(one):
            self._used[owner] += num_slots

    def group_of(self, user: str) -> str | None:
        """Return the group of a user, if any."""
        return self._groups.get(user)

    def reached(self, trial: Waiting) -> QuotaLimits | None:
        """Return the quota that keeps a trial waiting, if one does."""
        for left, quota in self._left(trial):
            if quota.spent is not None or left < trial.num_slots:
                return quota
        return None

    def room(self, trial: Waiting) -> float:
        """Return how many slots a trial may get."""
        return min((left for left, _ in self._left(trial)), default=math.inf)

    def _left(self, trial: Waiting) -> Iterator[tuple[float, QuotaLimits]]:
        for owner in self._owners(trial) if self._quotas else ():
            quota = self._quotas.get(owner)
            if quota is not None:
                most = math.inf if quota.max_slots is None else quota.max_slots
                yield most - self._used[owner], quota

    def _owners(self, one: Waiting | Holding) -> tuple[str | int, ...]:
        group = self._groups.get(one.user)
        return (one.user, one.project) if group is None else (one.user, group, one.project)
