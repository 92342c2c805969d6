"""The workers of a trainer: formed, formed again, and called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.creators import _worker
from paceline.creators._spec import ReplicaSpec
from paceline.workers import (
    ElasticGroup,
    ElasticLimits,
    LocalPool,
    RayPool,
    ResourcesError,
    WorkerPool,
    num_cores,
)

# An optimizer loads the latter, which would take each worker more than a second.
_PRELOAD = ("paceline.creators._worker", "torch._dynamo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroupSettings:
    """Settings for the start of workers.

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


class ReplicaGroup(ElasticGroup):
    """The workers of a trainer, each with its replica; they stay until `stop`.

    At first there must be as many as were asked for. When some were lost, it goes on with what can
    be started.

    Args:
        settings: How they are started.
        spec: What each of them makes.

    Raises:
        ResourcesError: The workers want more than there is.
    """

    def __init__(self, settings: ReplicaGroupSettings, spec: ReplicaSpec) -> None:
        limits = ElasticLimits.of(settings.num_workers)
        super().__init__(limits, hint="free resources, or a smaller `num_workers`.")
        self._settings = settings
        self._spec = spec
        _check_possible(self._pool, settings)

    @property
    def num_workers(self) -> int:
        """How many workers there are, or were at last."""
        return self._num_last or self._settings.num_workers

    @property
    def is_local(self) -> bool:
        """Whether all workers are processes of this machine."""
        return self._settings.cluster == "local"

    def call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Have workers call a function, and return what they returned, in rank order.

        Raises:
            WorkerFailedError: A worker was lost.
            Exception: What the function raised on the rank that failed first.
        """
        try:
            values = self.submit(function, args, ranks=ranks).wait()
        except KeyboardInterrupt:
            # Nobody knows how far the workers are.
            self.stop(force=True)
            raise
        assert values is not None
        return values

    def _set_up(self) -> None:
        self.call(_worker.set_up, self._spec)
        # What was asked for could run, so fewer are a loss that may pass.
        self._elastic.limits = ElasticLimits(least=1, most=self._spec.num_shards)

    def _make_pool(self) -> WorkerPool:
        settings, spec = self._settings, self._spec
        cpus = settings.cpus_per_worker
        if settings.cluster == "local":
            return LocalPool(
                settings.num_workers,
                heartbeat_timeout_s=settings.heartbeat_timeout_s,
                collective_timeout_s=spec.timeout_s,
                threads_per_worker=cpus,
                preload=_PRELOAD,
            )
        return RayPool(
            settings.num_workers,
            cpus_per_worker=1 if cpus is None else cpus,
            gpus_per_worker=None if spec.use_gpu == "auto" else float(spec.use_gpu),
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            collective_timeout_s=spec.timeout_s,
            threads_per_worker=cpus,
            preload=_PRELOAD,
            strategy="SPREAD",
        )


def _check_possible(pool: WorkerPool, settings: ReplicaGroupSettings) -> None:
    if isinstance(pool, RayPool):
        pool.check_possible()
        return
    num_workers, cpus = settings.num_workers, settings.cpus_per_worker
    if cpus is not None and num_workers * cpus > num_cores():
        raise ResourcesError(
            f"{num_workers} worker(s) with `num_cpus_per_worker`={cpus} need"
            f" {num_workers * cpus} CPU core(s), but this machine has {num_cores()}. Hint:"
            " fewer workers, or less for each."
        )
