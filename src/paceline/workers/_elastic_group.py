"""Warm workers that are formed, and formed again, with as many as can run."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from paceline._waiting import sleep
from paceline.workers._errors import NotEnoughWorkersError
from paceline.workers._policy import ElasticLimits, ElasticSize, GiveUp, Wait
from paceline.workers._pool import PendingCall, WorkerPool

logger = logging.getLogger(__name__)


class ElasticGroup(ABC):
    """The workers of a pool over their generations; they stay until `stop`.

    Subclasses say how their pool is made and what new workers do first.

    Args:
        limits: How many workers there may be.
        hint: What to do about too few of them, which the error says.
    """

    def __init__(self, limits: ElasticLimits, *, hint: str) -> None:
        self._hint = hint
        self._elastic = ElasticSize(limits)
        self._num_last = 0
        self._made_pool: WorkerPool | None = None

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
        pool = self._pool
        step = self._elastic.decide(self._capacity(), time.monotonic())
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
        pool.start(step.num_workers)
        try:
            self._set_up()
        except KeyboardInterrupt:
            # What may never be set up must take no calls.
            pool.stop(grace_s=0.0)
            raise
        return 0.0

    def growth(self) -> int | None:
        """Return with how many workers the group could go on, if these are more."""
        if not self.is_alive or self._elastic.num_workers >= self._limits.most:
            return None
        return self._elastic.growth(self._capacity())

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Have workers call a function; see `WorkerPool.submit`."""
        return self._pool.submit(function, args, ranks=ranks)

    def await_end(self) -> None:
        """Wait until workers of which one was lost have all ended."""
        if self._made_pool is not None:
            self._made_pool.await_end()

    def end_generation(self) -> None:
        """End the workers at once; others are to follow."""
        if self._made_pool is not None:
            self._made_pool.stop(grace_s=0.0)
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
