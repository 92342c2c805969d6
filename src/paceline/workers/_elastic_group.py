"""Warm workers that are formed, and formed again, with as many as can run."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline._waiting import sleep
from paceline.workers._elastic_size import ElasticLimits, ElasticSize, GiveUp, GrowthAttempts, Wait
from paceline.workers._errors import (
    NotEnoughWorkersError,
    PlacementError,
    PlacementTimeoutError,
    WorkerFailedError,
    WorkerStartError,
)
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._worker_pool import WorkerPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often to look for more workers that must be reserved, in seconds.
_PREPARE_INTERVAL_S = 1.0
# How long an elastic group waits for room that seemed to be free, in seconds.
_PLACEMENT_S = 60.0


class ElasticGroup(ABC):
    """The workers of a pool over their generations; they stay until `stop`.

    Subclasses say how their pool is made and what new workers do first.

    Args:
        limits: How many workers there may be.
        hint: What to do about too few of them, which the error says.

    Attributes:
        can_restart: Whether workers can be started again; the driver's own process cannot.
        num_formed: How often workers were started and set up.
    """

    can_restart = True

    def __init__(self, limits: ElasticLimits, *, hint: str) -> None:
        self._hint = hint
        self._elastic = ElasticSize(limits)
        self._attempts = GrowthAttempts(limits)
        self._num_grown: int | None = None
        self._is_lacking = False
        self._is_misled = False
        self._prepare_at = 0.0
        self._told_leaving: Sequence[int] = ()
        self._num_last = 0
        self._made_pool: WorkerPool | None = None
        self.num_formed = 0

    @abstractmethod
    def _make_pool(self) -> WorkerPool:
        """Return a pool that was not started."""

    def _set_up(self) -> None:  # noqa: B027 - most groups have nothing to do here
        """Have the workers, which were just started, do what comes before all calls."""

    def _capacity(self) -> int:
        """Return how many workers could run at this moment, the living ones included."""
        return self._pool.capacity()

    @property
    def _limits(self) -> ElasticLimits:
        return self._elastic.limits

    @property
    def _pool(self) -> WorkerPool:
        if self._made_pool is None:
            self._made_pool = self._make_pool()
        return self._made_pool

    @property
    def is_alive(self) -> bool:
        """Whether all workers are there and take calls."""
        return self._made_pool is not None and self._made_pool.is_alive

    @property
    def is_chief(self) -> bool:
        """Whether this process conducts what the workers do."""
        return True

    def decide(self, choose: Callable[[], T]) -> T:
        """Return what was chosen, the same in all processes that conduct the workers."""
        return choose()

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
            Exception: What the workers raised as they were set up.
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
            raise NotEnoughWorkersError(
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
        except PlacementError as error:
            is_fixed = self._limits.least == self._limits.most
            if is_fixed and isinstance(error, PlacementTimeoutError):
                # It has waited as long as it may.
                raise NotEnoughWorkersError(
                    f"{error} Hint: {self._hint}", step.num_workers, self._capacity()
                ) from error
            if step.num_workers == self._limits.least:
                raise
            logger.warning("%s Starting with %d worker(s).", error, self._limits.least)
            self._is_misled = True
            return self.try_form()
        except (WorkerFailedError, WorkerStartError):
            if wanted is not None:
                self._attempts.fail(time.monotonic())
            raise
        if not self._is_lacking and step.num_workers >= (wanted or 0):
            self._attempts.succeed()
        if step.num_workers >= self._limits.most:
            self._pool.cancel_reservation()
        return 0.0

    def prepare_growth(self) -> bool:
        """Have other workers reserved, where that is needed, so that `next_size` finds them.

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
        """Return with how many workers to form again from the checkpoint just committed, if at all.

        These are more, which can be started for certain, or those that are left without the nodes
        that will be taken away. Where others must be reserved, this begins it; call it again.
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
        certain = min(wanted, self._pool.reserve(wanted))
        if certain <= num_staying and self._attempts.is_late(now):
            delay_s = self._attempts.fail(now)
            self._pool.cancel_reservation()
            logger.info("More workers could not be reserved: trying again in %.3g s.", delay_s)
        self._num_grown = certain if certain > num_staying else None
        return self._elastic.next_size(certain, num_leaving)

    def _count_leaving(self) -> int:
        """Return how many of the present workers are on nodes that will be taken away."""
        leaving = self._pool.leaving_ranks()
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
        """Return how many workers to count on: those that others may take only if there must be."""
        capacity = self._capacity()
        if self._is_misled:
            # What else can run is reserved later.
            self._is_misled = False
            capacity = min(capacity, self._limits.least)
        if capacity < self._limits.least:
            self._request()
            return capacity
        wanted = self._elastic.wanted(capacity)
        _log_spare(wanted, capacity, self._limits)
        certain = self._pool.reserve(wanted)
        self._is_lacking = self._limits.least <= certain < wanted
        if self._is_lacking:
            self._attempts.begin(time.monotonic())
        # Without enough of them the start waits for the others.
        return min(capacity, certain) if certain >= self._limits.least else capacity

    def _request(self) -> None:
        """Have room made for all workers, where a cluster can."""
        if self._pool.needs_reservation:
            self._pool.request(self._num_wanted)

    @property
    def _num_wanted(self) -> int:
        """How many workers there are to be if all can run."""
        most = self._limits.most
        if most == math.inf:
            most = self._elastic.num_useful or self._limits.least
        return self._elastic.wanted(int(most))

    def _start(self, num_workers: int) -> None:
        pool, limits = self._pool, self._limits
        # Instead of waiting for long, an elastic group starts with fewer workers.
        is_fixed = limits.least == limits.most
        pool.placement_timeout_s = limits.max_wait_s if is_fixed else _PLACEMENT_S
        pool.start(num_workers)
        try:
            self._set_up()
        except KeyboardInterrupt:
            # What may never be set up must take no calls.
            pool.stop(grace_s=0.0)
            raise
        self.num_formed += 1

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Have workers call a function; see `WorkerPool.submit`."""
        return self._pool.submit(function, args, ranks=ranks)

    def call_until_done(self, step: Callable[[], T], recover: Callable[[Exception], None]) -> T:
        """Do something with the workers, again after each loss, and return its value.

        Args:
            step: What to do; it forms the workers if they are not alive.
            recover: Called with the error of a loss; raises if they do not start again.

        Raises:
            Exception: What the step or `recover` raised.
        """
        while True:
            try:
                return step()
            except (WorkerFailedError, WorkerStartError) as error:
                if not self.can_restart:
                    raise
                recover(error)

    def drain(self, timeout_s: float) -> None:
        """Wait until what the workers have printed so far was shown, but not for longer."""
        if self._made_pool is not None:
            self._made_pool.drain(timeout_s)

    def await_end(self) -> None:
        """Wait until workers of which one was lost have all ended."""
        if self._made_pool is not None:
            self._made_pool.await_end()

    def end_for_others(self) -> bool:
        """End the workers as others are to follow; tell whether they have ended by now."""
        self.end_generation()
        return True

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
