"""The workers of a trainer whose own process is one of them, as an outer launcher started it."""

import logging
from collections.abc import Callable
from typing import TypeVar

from paceline.core import DistributedContext
from paceline.train._group import GroupSettings, InlineGroup, InWorker, TrainGroup
from paceline.train._spec import Job
from paceline.workers import (
    ElasticLimits,
    JoinedPool,
    PendingCall,
    WorkerOutput,
    WorkerPool,
    shards_of_launcher,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class JoinedGroup(TrainGroup):
    """All processes that srun, mpirun, torchrun or another launcher has started.

    Each runs the whole script, and functions in its own process as its rank. The chief decides
    where a run writes, and it alone has callbacks. Lost workers are not started again here: the
    script goes on from its last checkpoint when the launcher starts it again.

    Args:
        settings: What workers are set up with. The launcher's number of processes counts.
        output: Where lines go.
    """

    can_restart = False

    def __init__(self, settings: GroupSettings, output: WorkerOutput) -> None:
        self._joined_pool = JoinedPool(timeout_s=settings.config.timeout_s)
        self._is_set_up = False
        size = self._joined_pool.num_workers
        if settings.num_workers != size:
            logger.warning(
                "The launcher has started %d processes, each of which is one worker, however many"
                " are asked for (%d).",
                size,
                settings.num_workers,
            )
        settings.limits = ElasticLimits.of(size)
        super().__init__(settings, settings.limits, output)

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self._joined_pool.num_workers

    @property
    def is_alive(self) -> bool:
        """Whether this process is set up beside the others, and no call has failed."""
        return self._joined_pool.is_alive and self._is_set_up

    @property
    def num_shards(self) -> int:
        """The shards of a global batch of a run that begins here."""
        return shards_of_launcher() or self.num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0; it joins the others for that."""
        return self._join().rank == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """Return on every rank what the chief has chosen.

        Raises:
            DistributedPeerError: The chief could not choose.
            Exception: What `choose` raised here.
        """
        distributed = self._join()
        try:
            return distributed.broadcast(choose() if distributed.rank == 0 else None)  # type: ignore[return-value] # the chief's
        except Exception as error:
            distributed.fail(error)
            self._joined_pool.shutdown()
            raise

    def run(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Run a train function here, and return the end of all ranks."""
        # None begins to write before all know what was there already.
        self._joined_pool.distributed.allgather(None)
        return self.submit(InWorker("run_job"), (job, on_report))

    def try_form(self) -> float:
        """Join the other processes, unless that was done, and set this one up; return 0."""
        self._join()
        self._set_up()
        return 0.0

    def stop(self, *, force: bool = False) -> None:
        """Leave the others."""
        super().stop(force=force)
        self._joined_pool.shutdown()
        self._is_set_up = False

    def _make_pool(self) -> WorkerPool:
        return self._joined_pool

    def _set_up(self) -> None:
        settings = self.settings
        call = self.submit(
            InWorker("set_up_joined"),
            (
                settings.config,
                settings.resources.gpus,
                settings.hook,
                settings.instance,
                self._joined_pool.distributed,
            ),
        )
        self.facts = call.wait() or ()
        self._is_set_up = True

    def _join(self) -> DistributedContext:
        if not self._joined_pool.is_alive:
            self._joined_pool.start()
        return self._joined_pool.distributed


def make_group(settings: GroupSettings, output: WorkerOutput) -> TrainGroup:
    """Return the workers that a trainer's settings ask for."""
    if settings.cluster == "joined":
        return JoinedGroup(settings, output)
    if settings.limits is None:
        return InlineGroup(settings, output)
    return TrainGroup(settings, settings.limits, output)
