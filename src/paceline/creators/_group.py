"""The workers of a trainer: formed, formed again, and called."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.creators import _worker
from paceline.creators._errors import TrainingFailedError
from paceline.creators._spec import ReplicaSpec
from paceline.workers import (
    Elastic,
    ElasticLimits,
    GiveUp,
    LocalPool,
    RayPool,
    ResourcesError,
    Wait,
    WorkerFailedError,
    WorkerPool,
    WorkerStartError,
    is_told,
    num_cores,
)

logger = logging.getLogger(__name__)

# An optimizer loads the latter, which would take each worker more than a second.
_PRELOAD = ("paceline.creators._worker", "torch._dynamo")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How workers are started.

    Attributes:
        num_workers: How many were asked for.
        cluster: "local" or "ray".
        cpus_per_worker: The cores of each, or None to share them.
        heartbeat_timeout_s: How long one may give no sign of life, in seconds.
    """

    num_workers: int
    cluster: str
    cpus_per_worker: int | None
    heartbeat_timeout_s: float


class ReplicaGroup:
    """The workers of a trainer; they stay until `stop`.

    At first there must be as many as were asked for. When some were lost, it goes on with what can
    be started.

    Args:
        settings: How they are started.
        spec: What each of them makes.

    Raises:
        ResourcesError: The workers want more than there is.
    """

    def __init__(self, settings: GroupSettings, spec: ReplicaSpec) -> None:
        self._num_last = num_workers = settings.num_workers
        self._spec = spec
        self._elastic = Elastic(ElasticLimits.of(num_workers))
        self._pool = _make_pool(settings, spec)

    @property
    def is_alive(self) -> bool:
        """Whether all workers are there and take calls."""
        return self._pool.is_alive

    @property
    def num_workers(self) -> int:
        """How many workers there are, or were at last."""
        return self._num_last

    def form(self) -> None:
        """Start the workers, once there are enough, and have them make their replicas.

        Raises:
            TrainingFailedError: There were too few for too long.
            WorkerFailedError: One was lost meanwhile.
            WorkerStartError: One cannot be started.
            Exception: What a creator raised.
        """
        self._elastic.end()
        while True:
            step = self._elastic.decide(self._pool.capacity(), time.monotonic())
            if isinstance(step, GiveUp):
                raise TrainingFailedError(
                    f"At least {step.wanted} worker(s) must be able to run, but no more than"
                    f" {step.available} could, after a wait of {step.waited_s:.3g} s. Hint: free"
                    " resources, or a smaller `num_workers`."
                )
            if not isinstance(step, Wait):
                break
            if step.is_new:
                logger.warning(
                    "At least %d worker(s) must be able to run, but %d can: looking again in"
                    " %.3g s.",
                    step.wanted,
                    step.available,
                    step.delay_s,
                )
            time.sleep(step.delay_s)
        if step.num_workers != self._num_last:
            logger.warning(
                "Going on with %d worker(s) instead of %d.", step.num_workers, self._num_last
            )
        self._num_last = step.num_workers
        self._pool.start(step.num_workers)
        self.call(_worker.set_up, self._spec)
        # What was asked for could run, so fewer are a loss that may pass.
        self._elastic.limits = ElasticLimits(least=1, most=self._spec.num_shards)

    def growth(self) -> int | None:
        """Return with how many workers the group could go on, if these are more."""
        if self._num_last == self._spec.num_shards:
            return None
        return self._elastic.growth(self._pool.capacity())

    def call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Have workers call a function, and return what they returned, in rank order.

        Raises:
            WorkerFailedError: A worker was lost.
            Exception: What the function raised on the rank that failed first.
        """
        try:
            values = self._pool.submit(function, args, ranks=ranks).wait()
        except KeyboardInterrupt:
            # Nobody knows how far the workers are.
            self.stop(force=True)
            raise
        assert values is not None
        return values

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time."""
        self._pool.shutdown(force)
        self._elastic.end()


def is_loss(error: Exception) -> bool:
    """Tell whether a worker was lost, and not that the user's function raised an exception."""
    return isinstance(error, (WorkerFailedError, WorkerStartError)) and not is_told(error)


def _make_pool(settings: GroupSettings, spec: ReplicaSpec) -> WorkerPool:
    num_workers, cpus = settings.num_workers, settings.cpus_per_worker
    if settings.cluster == "local":
        if cpus is not None and num_workers * cpus > num_cores():
            raise ResourcesError(
                f"{num_workers} worker(s) with `num_cpus_per_worker`={cpus} need"
                f" {num_workers * cpus} CPU core(s), but this machine has {num_cores()}. Hint:"
                " fewer workers, or less for each."
            )
        return LocalPool(
            num_workers,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            collective_timeout_s=spec.timeout_s,
            threads_per_worker=cpus,
            preload=_PRELOAD,
        )
    pool = RayPool(
        num_workers,
        cpus_per_worker=1 if cpus is None else cpus,
        gpus_per_worker=None if spec.use_gpu == "auto" else float(spec.use_gpu),
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        collective_timeout_s=spec.timeout_s,
        threads_per_worker=cpus,
        preload=_PRELOAD,
        strategy="SPREAD",
    )
    pool.check_possible()
    return pool
