"""Workers of a pool, between a least and a most number: formed, formed again, grown."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from paceline._base.process_and_network import sleep
from paceline._training.workers import worker_failures as failures
from paceline._training.workers.worker_pools import WorkerPool

logger = logging.getLogger(__name__)


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
        multiple: The number of workers is a multiple of this, as so many divide a model; or 1.

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
        """Upper bound of the number of workers, or the lower bound if the upper is infinite."""
        return self.least if self.most == math.inf else int(self.most)


class Form(NamedTuple):
    """Decision to form a group with a number of workers."""

    num_workers: int


class Wait(NamedTuple):
    """Decision to wait, as too few workers can run for now; times are in seconds.

    Attributes:
        delay_s: When to ask again.
        wanted: The least number of workers.
        available: How many could run.
        waited_s: For how long there have been too few.
        is_new: Whether this delay begins now; a caller before its end gets the rest.
    """

    delay_s: float
    wanted: int
    available: int
    waited_s: float
    is_new: bool = True


class GiveUp(NamedTuple):
    """Decision to give up, as too few workers could run for too long; times are in seconds."""

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
        """Return the next step while no workers run: form, wait or give up.

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
        """Note the end of all workers, whatever the reason."""
        self.num_workers = 0

    def next_size(self, capacity: int, num_leaving: int = 0) -> int | None:
        """Return the new number of workers, or None to stay.

        Workers form again from the checkpoint just committed: more of them if they can run, and
        none on leaving nodes. The present ones are ended for that, which is no loss. A group of a
        fixed size leaves such nodes only if all of its workers can run elsewhere.

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
        """Note a wish for more workers; does nothing during an attempt."""
        if self._began is None:
            self._began = now

    def is_late(self, now: float) -> bool:
        """Tell whether an attempt takes too long."""
        return self._began is not None and now - self._began >= self._longest_delay_s

    def succeed(self) -> None:
        """Note a success: the group has all workers of the attempt."""
        self._began = None
        self._delay_s = self._first_delay_s

    def fail(self, now: float) -> float:
        """Note a failed attempt, and return the delay until the next, in seconds."""
        self._began = None
        delay_s = self._delay_s
        self._due = now + delay_s
        self._delay_s = min(2 * delay_s, self._longest_delay_s)
        return delay_s


T = TypeVar("T")
PoolT = TypeVar("PoolT", bound=WorkerPool)

# How often to look for more workers that must be reserved, in seconds.
_PREPARE_INTERVAL_S = 1.0
# How long an elastic group waits for room that seemed to be free, in seconds.
_PLACEMENT_S = 60.0


class Workers(Generic[PoolT]):
    """The workers of a pool over its generations: how many there are, and when they start.

    The pool is the back end: it has the processes, on this machine or elsewhere, and takes calls
    for them. Subclasses say what new workers do first. Workers stay until `stop`.

    Args:
        limits: How many workers there may be.
        make_pool: Makes the pool, which is not started yet; called again after `stop`.
        hint: The advice for too few workers, for the error.

    Attributes:
        num_formed: How often workers were started and set up.
    """

    def __init__(self, limits: ElasticLimits, make_pool: Callable[[], PoolT], *, hint: str) -> None:
        self._make_pool = make_pool
        self._hint = hint
        self._elastic = ElasticSize(limits)
        self._attempts = GrowthAttempts(limits)
        self._num_grown: int | None = None
        self._is_lacking = False
        self._is_misled = False
        self._prepare_at = 0.0
        self._told_leaving: Sequence[int] = ()
        self._num_last = 0
        self._made_pool: PoolT | None = None
        self._is_set_up = False
        self.num_formed = 0

    def _set_up(self) -> None:
        """Prepare the newly started workers, before any call."""

    def _capacity(self) -> int:
        """Return how many workers could run at this moment, the living ones included."""
        return self.pool.capacity()

    @property
    def _limits(self) -> ElasticLimits:
        return self._elastic.limits

    @property
    def pool(self) -> PoolT:
        """The pool of the workers."""
        if self._made_pool is None:
            self._made_pool = self._make_pool()
        return self._made_pool

    @property
    def is_alive(self) -> bool:
        """Whether all workers are there, are set up and take calls."""
        return self._made_pool is not None and self._made_pool.is_alive and self._is_set_up

    @property
    def num_present(self) -> int:
        """How many workers the present generation has; 0 if there is none."""
        return self._elastic.num_workers

    def form(self) -> None:
        """Start the workers and set them up, once there are enough.

        Raises:
            NotEnoughWorkersError: There were too few for too long.
            WorkerFailedError: One was lost meanwhile.
            WorkerStartError: One cannot be started.
            ResourcesError: The Ray cluster can never run the least number of workers.
            Exception: The workers' error during their setup.
        """
        while delay_s := self.try_form():
            sleep(delay_s)

    def try_form(self) -> float:
        """Start the workers and set them up, if there are enough; else return a delay in seconds.

        Raises:
            Exception: As `form`.
        """
        self._elastic.end()
        step = self._elastic.decide(self._certain_capacity(), time.monotonic())
        if isinstance(step, GiveUp):
            raise failures.NotEnoughWorkersError(
                f"At least {step.wanted} worker(s) must be able to run, but no more than"
                f" {step.available} could at last, after a wait of {step.waited_s:.3g} s. Hint:"
                f" {self._hint}",
                step.wanted,
                step.available,
            )
        if isinstance(step, Wait):
            if step.is_new:
                _log_wait(step, self._limits.max_wait_s)
            return step.delay_s
        if self._num_last not in (0, step.num_workers):
            logger.warning(
                "Going on with %d worker(s) instead of %d.", step.num_workers, self._num_last
            )
        self._num_last = step.num_workers
        wanted, self._num_grown = self._num_grown, None
        try:
            self._start(step.num_workers)
        except failures.PlacementError as error:
            is_fixed = self._limits.least == self._limits.most
            if is_fixed and isinstance(error, failures.PlacementTimeoutError):
                # Placement timeout of a fixed size: the group has waited its full time already.
                raise failures.NotEnoughWorkersError(
                    f"{error} Hint: {self._hint}", step.num_workers, self._capacity()
                ) from error
            if step.num_workers == self._limits.least:
                raise
            logger.warning("%s Starting with %d worker(s).", error, self._limits.least)
            self._is_misled = True
            return self.try_form()
        except (failures.WorkerFailedError, failures.WorkerStartError):
            if wanted is not None:
                self._attempts.fail(time.monotonic())
            raise
        if not self._is_lacking and step.num_workers >= (wanted or 0):
            self._attempts.succeed()
        if step.num_workers >= self._limits.most:
            self.pool.cancel_reservation()
        return 0.0

    def prepare_growth(self) -> bool:
        """Reserve more workers, where needed, so `next_size` can count on them.

        It hardly waits, and looks once a second however often it is called.

        Returns:
            Whether it has found now that the workers are to leave nodes with the next checkpoint.
        """
        now = time.monotonic()
        if self._made_pool is None or not self._made_pool.needs_reservation:
            return False
        if now < self._prepare_at:
            return False
        self._prepare_at = now + _PREPARE_INTERVAL_S
        return self.next_size() is not None and bool(self._told_leaving)

    def next_size(self) -> int | None:
        """Return the new number of workers, or None to stay.

        Call it after a commit. The new ones are more, which can be started for certain, or those
        without the nodes that will be taken away. Where others must be reserved, this begins it;
        call it again.
        """
        present, now = self.num_present, time.monotonic()
        if not present or not self.is_alive:
            return None
        num_leaving = self._count_leaving()
        num_staying = present - num_leaving
        can_grow = num_staying < self._limits.most and self._attempts.is_due(now)
        if not can_grow and not num_leaving:
            return None
        if can_grow:
            self._request()
        capacity = self._capacity() if can_grow else num_staying
        wanted = self._elastic.next_size(capacity, num_leaving) or num_staying
        if wanted > num_staying:
            self._attempts.begin(now)
        certain = min(wanted, self.pool.reserve(wanted))
        if certain <= num_staying and self._attempts.is_late(now):
            delay_s = self._attempts.fail(now)
            self.pool.cancel_reservation()
            logger.info("More workers could not be reserved: trying again in %.3g s.", delay_s)
        self._num_grown = certain if certain > num_staying else None
        return self._elastic.next_size(certain, num_leaving)

    def _count_leaving(self) -> int:
        """Return the number of present workers on nodes announced to be taken away."""
        leaving = self.pool.leaving_ranks()
        if leaving and leaving != self._told_leaving:
            logger.warning(
                "The node(s) of rank(s) %s will be taken away: going on without them after the"
                " next checkpoint, if at least %d worker(s) can run then.",
                ", ".join(map(str, leaving)),
                self._limits.least,
            )
        self._told_leaving = leaving
        return len(leaving)

    def _certain_capacity(self) -> int:
        """Return the capacity to rely on: reserved places, or all places if those are too few."""
        capacity = self._capacity()
        if self._is_misled:
            # Least number only: the free room was misjudged; further workers are reserved later.
            self._is_misled = False
            capacity = min(capacity, self._limits.least)
        if capacity < self._limits.least:
            self._request()
            return capacity
        wanted = self._elastic.wanted(capacity)
        _log_spare(wanted, capacity, self._limits)
        certain = self.pool.reserve(wanted)
        self._is_lacking = self._limits.least <= certain < wanted
        if self._is_lacking:
            self._attempts.begin(time.monotonic())
        # Without enough of them the start waits for the others.
        return min(capacity, certain) if certain >= self._limits.least else capacity

    def _request(self) -> None:
        """Have room made for all workers, where a cluster can."""
        if self.pool.needs_reservation:
            self.pool.request(self._num_wanted)

    @property
    def _num_wanted(self) -> int:
        """How many workers there are to be if all can run."""
        most = self._limits.most
        if most == math.inf:
            most = self._elastic.num_useful or self._limits.least
        return self._elastic.wanted(int(most))

    def _start(self, num_workers: int) -> None:
        pool, limits = self.pool, self._limits
        # Instead of waiting for long, an elastic group starts with fewer workers.
        is_fixed = limits.least == limits.most
        pool.placement_timeout_s = limits.max_wait_s if is_fixed else _PLACEMENT_S
        self._is_set_up = False
        if not pool.is_alive:
            # This process as a worker may be there already.
            pool.start(num_workers)
        try:
            self._set_up()
        except KeyboardInterrupt:
            # Workers without a complete set-up must take no calls.
            pool.stop(grace_s=0.0)
            raise
        self._is_set_up = True
        self.num_formed += 1

    def call_until_done(self, step: Callable[[], T], recover: Callable[[Exception], None]) -> T:
        """Do something with the workers, again after each loss, and return its value.

        Args:
            step: The work to do; it forms the workers if they are not alive.
            recover: Called with the error of a loss; raises if they do not start again.

        Raises:
            Exception: The error of the step or of `recover`.
        """
        while True:
            try:
                return step()
            except (failures.WorkerFailedError, failures.WorkerStartError) as error:
                if not self.pool.can_restart:
                    raise
                recover(error)

    def drain(self, timeout_s: float) -> None:
        """Wait until output printed so far was shown, for at most `timeout_s` seconds."""
        if self._made_pool is not None:
            self._made_pool.drain(timeout_s)

    def await_end(self) -> None:
        """Wait until all workers have ended, after the loss of any of them."""
        if self._made_pool is not None:
            self._made_pool.await_end()

    def end_generation(self) -> None:
        """End the workers at once; others are to follow."""
        if self._made_pool is not None:
            self._made_pool.stop(grace_s=0.0, is_restart=True)
        self._elastic.end()

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time."""
        if self._made_pool is not None:
            self._made_pool.shutdown(force)
            self._made_pool = None
        self._elastic.end()


def _log_wait(step: Wait, max_wait_s: float) -> None:
    logger.warning(
        "At least %d worker(s) must be able to run, but %d can: looking again in %.3g s (waited"
        " %.3g s of %.3g s).",
        step.wanted,
        step.available,
        step.delay_s,
        step.waited_s,
        max_wait_s,
    )


def _log_spare(num_workers: int, capacity: int, limits: ElasticLimits) -> None:
    num_spare = min(capacity, limits.most) - num_workers
    if limits.multiple > 1 and 0 < num_spare < limits.multiple:
        logger.warning(
            "%d worker(s) could run, but %d start, as the number must be a multiple of %d (the"
            " ranks that divide a model); the others wait for more.",
            capacity,
            num_workers,
            limits.multiple,
        )
