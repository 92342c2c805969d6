"""How many workers a group is formed with, between a least and a most number, and when it grows.

Pure: it reads no clock and starts no process. A group asks `ElasticSize.decide` while no workers
run, `ElasticSize.next_size` right after a checkpoint was committed, and `GrowthAttempts` whether to
try to grow again.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLimits:
    """Bounds of the number of workers, and how long a group waits for them.

    Attributes:
        least: Below so many workers the group is not formed.
        most: The most that it is formed with; `math.inf` for no bound.
        max_wait_s: How long to wait for the least number, in seconds, before giving up.
        first_delay_s: How long to wait before looking again for the first time, in seconds. Each
            further delay is twice as long.
        longest_delay_s: The longest of these delays, in seconds.
        multiple: The number of workers is a multiple of it, as so many divide a model; or 1.

    Raises:
        TypeError: A number of workers is no integer.
        ValueError: A value is out of range.
    """

    least: int
    most: float
    max_wait_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    multiple: int = 1

    def __post_init__(self) -> None:
        for value in (self.least, self.most):
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not is_number and value != math.inf:
                raise TypeError(f"A number of workers must be an integer, but got {value!r}.")
        if not 1 <= self.least <= self.most or self.least == math.inf:
            raise ValueError(
                "The least number of workers must be at least 1 and not above the most, but got"
                f" {self.least!r} and {self.most!r}."
            )
        if any(n not in (1, math.inf) and n % self.multiple for n in (self.least, self.most)):
            raise ValueError(
                f"A number of workers must be 1 or a multiple of {self.multiple}, but got"
                f" {self.least!r} and {self.most!r}."
            )
        if not self.max_wait_s >= 0:
            raise ValueError(f"`max_wait_s` must be at least 0, but got {self.max_wait_s!r}.")
        if not 0 < self.first_delay_s <= self.longest_delay_s:
            raise ValueError(
                "`first_delay_s` must be above 0 and not above `longest_delay_s`, but got"
                f" {self.first_delay_s!r} and {self.longest_delay_s!r}."
            )

    @classmethod
    def of(cls, num_workers: Any, **others: Any) -> "ElasticLimits":
        """Return the limits for a number of workers, or for a pair of the least and the most.

        Args:
            num_workers: Such as 4, (2, 8) or (4, math.inf).
            others: Further attributes.

        Raises:
            TypeError: `num_workers` is neither.
            ValueError: A value is out of range.
        """
        is_pair = isinstance(num_workers, (tuple, list)) and len(num_workers) == 2
        least, most = num_workers if is_pair else (num_workers, num_workers)
        return cls(least=least, most=most, **others)

    @property
    def num_asked_for(self) -> int:
        """The most, or the least if that is no bound."""
        return self.least if self.most == math.inf else int(self.most)


class Form(NamedTuple):
    """That a group is to be formed with so many workers."""

    num_workers: int


class Wait(NamedTuple):
    """That there are too few workers for the moment; times are in seconds.

    Attributes:
        delay_s: When to ask again.
        wanted: The least number of workers.
        available: How many could run.
        waited_s: For how long there have been too few.
        is_new: Whether this delay begins now; who asks before its end is told the rest of it.
    """

    delay_s: float
    wanted: int
    available: int
    waited_s: float
    is_new: bool = True


class GiveUp(NamedTuple):
    """That there have been too few workers for too long; times are in seconds."""

    wanted: int
    available: int
    waited_s: float


class ElasticSize:
    """The number of a group's workers over its generations.

    Times are seconds of any clock that only goes forward. A decision to form is taken for carried
    out; if that fails, or the workers end, say so by `end`.

    Args:
        limits: How many there may be.

    Attributes:
        num_workers: The workers of the present generation; 0 if there is none.
        num_useful: More workers than this would have nothing to do; None if that is not known.
    """

    def __init__(self, limits: ElasticLimits) -> None:
        self.limits = limits
        self.num_workers = 0
        self.num_useful: int | None = None
        self._short_since: float | None = None
        self._due = 0.0
        self._delay_s = limits.first_delay_s

    def decide(self, capacity: int, now: float) -> Form | Wait | GiveUp:
        """Tell what to do while no workers run.

        Args:
            capacity: How many workers could run at this moment.
            now: The time.
        """
        assert not self.num_workers, "A group must have ended before it is formed again."
        limits = self.limits
        if capacity >= limits.least:
            self._short_since = None
            self._delay_s = limits.first_delay_s
            self.num_workers = self.wanted(capacity)
            return Form(self.num_workers)
        if self._short_since is None:
            self._short_since = self._due = now
        waited_s = now - self._short_since
        left_s = limits.max_wait_s - waited_s
        if left_s <= 0:
            return GiveUp(limits.least, capacity, waited_s)
        is_new = now >= self._due
        if is_new:
            self._due = now + min(self._delay_s, left_s)
            self._delay_s = min(2 * self._delay_s, limits.longest_delay_s)
        return Wait(self._due - now, limits.least, capacity, waited_s, is_new)

    def end(self) -> None:
        """Note that no workers run any more, whatever the reason."""
        self.num_workers = 0

    def next_size(self, capacity: int, num_leaving: int = 0) -> int | None:
        """Return with how many workers to form again from the checkpoint just committed, if at all.

        With more of them if they can run, and without those that are on leaving nodes. The present
        ones are ended for it, which is no loss. A group of a fixed size leaves such nodes only if
        all of its workers can run elsewhere.

        Args:
            capacity: How many workers could run at this moment: the present ones that are on no
                leaving node, and others.
            num_leaving: How many of the present ones are on nodes that will be taken away.
        """
        if not self.num_workers or capacity < self.limits.least:
            return None
        wanted = self.wanted(capacity)
        return wanted if num_leaving or wanted > self.num_workers else None

    def wanted(self, capacity: int) -> int:
        """Return how many workers to have if so many could run; the least number at the least."""
        useful = max(self.limits.least, self.num_useful or capacity)
        number = int(min(capacity, self.limits.most, useful))
        return max(self.limits.least, number - number % self.limits.multiple)


class GrowthAttempts:
    """When a group may attempt to grow, and when an attempt has failed.

    An attempt takes as long as it takes to reserve more workers, and fails if that is longer than
    the longest delay. A delay follows, each time twice as long; success makes it short again. Times
    are seconds of any clock that only goes forward.

    Args:
        limits: The delays, which are those between two looks for the least number of workers.
    """

    def __init__(self, limits: ElasticLimits) -> None:
        self._first_delay_s = self._delay_s = limits.first_delay_s
        self._longest_delay_s = limits.longest_delay_s
        self._began: float | None = None
        self._due = -math.inf

    def is_due(self, now: float) -> bool:
        """Tell whether no delay is left after a failed attempt."""
        return now >= self._due

    def begin(self, now: float) -> None:
        """Note that more workers are wanted; does nothing during an attempt."""
        if self._began is None:
            self._began = now

    def is_late(self, now: float) -> bool:
        """Tell whether an attempt takes too long."""
        return self._began is not None and now - self._began >= self._longest_delay_s

    def succeed(self) -> None:
        """Note that the group has all workers that it attempted to have."""
        self._began = None
        self._delay_s = self._first_delay_s

    def fail(self, now: float) -> float:
        """Note that the attempt was in vain, and return the delay until the next one."""
        self._began = None
        delay_s = self._delay_s
        self._due = now + delay_s
        self._delay_s = min(2 * delay_s, self._longest_delay_s)
        return delay_s
