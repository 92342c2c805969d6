"""How many workers a group is formed with, when it waits for more, and when it grows.

Pure: it reads no clock and starts no process. Its owner asks `Elastic.decide` while no workers run,
tells it of ends, and asks `Elastic.growth` right after a checkpoint was committed.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLimits:
    """How many workers a group may have, and how long it waits for them.

    Attributes:
        least: Below so many workers the group is not formed.
        most: The most that it is formed with; `math.inf` for no bound.
        max_wait_s: How long to wait for the least number, in seconds, before giving up.
        first_delay_s: How long to wait before looking again for the first time, in seconds. Each
            further delay is twice as long.
        longest_delay_s: The longest of these delays, in seconds.

    Raises:
        TypeError: A number of workers is no integer.
        ValueError: A value is out of range.
    """

    least: int
    most: float
    max_wait_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0

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
        if not self.max_wait_s >= 0:
            raise ValueError(f"`max_wait_s` must be at least 0, but got {self.max_wait_s!r}.")
        if not 0 < self.first_delay_s <= self.longest_delay_s:
            raise ValueError(
                "`first_delay_s` must be above 0 and not above `longest_delay_s`, but got"
                f" {self.first_delay_s!r} and {self.longest_delay_s!r}."
            )

    @classmethod
    def of(cls, num_workers: Any, **waiting: float) -> "ElasticLimits":
        """Return the limits for a number of workers, or for a pair of the least and the most.

        Args:
            num_workers: Such as 4, (2, 8) or (4, math.inf).
            waiting: Further attributes.

        Raises:
            TypeError: `num_workers` is neither.
            ValueError: A value is out of range.
        """
        is_pair = isinstance(num_workers, (tuple, list)) and len(num_workers) == 2
        least, most = num_workers if is_pair else (num_workers, num_workers)
        return cls(least=least, most=most, **waiting)

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


class Elastic:
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

    def growth(self, capacity: int) -> int | None:
        """Return how many workers to go on with from the checkpoint just committed, if more.

        The present ones are ended for it, which is no loss.

        Args:
            capacity: How many workers could run at this moment, the present ones included.
        """
        if not self.num_workers or capacity < self.limits.least:
            return None
        wanted = self.wanted(capacity)
        return wanted if wanted > self.num_workers else None

    def wanted(self, capacity: int) -> int:
        """Return how many workers to have if so many could run; the least number at the least."""
        useful = max(self.limits.least, self.num_useful or capacity)
        return int(max(self.limits.least, min(capacity, self.limits.most, useful)))
