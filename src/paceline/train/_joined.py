"""The workers of a trainer whose own process is one of them, as an outer launcher started it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.train._group import Call, GroupSettings, InlineGroup, InWorker, TrainGroup
from paceline.train._output import WorkerOutput
from paceline.train._spec import Job
from paceline.workers import ElasticLimits, JoinedPool, shards_of_launcher

logger = logging.getLogger(__name__)

T = TypeVar("T")


class JoinedGroup(InlineGroup):
    """All processes that srun, mpirun, torchrun or another launcher has started.

    Each runs the whole script, and functions in its own process as its rank. The chief decides
    where a run writes, and it alone has callbacks. Lost workers are not started again here: the
    script goes on from its last checkpoint when the launcher starts it again.

    Args:
        settings: What workers are set up with. The launcher's number of processes counts.
    """

    def __init__(self, settings: GroupSettings) -> None:
        super().__init__(settings)
        self._pool = JoinedPool(timeout_s=settings.config.timeout_s)
        self._is_set_up = False
        self.facts: Sequence[Any] = ()
        size = self._pool.num_workers
        if settings.num_workers != size:
            logger.warning(
                "The launcher has started %d processes, each of which is one worker, however many"
                " are asked for (%d).",
                size,
                settings.num_workers,
            )
        settings.limits = ElasticLimits.of(size)

    @property
    def num_workers(self) -> int:  # type: ignore[override] # it is no constant here
        """How many processes there are."""
        return self._pool.num_workers

    @property
    def is_alive(self) -> bool:  # type: ignore[override] # it is no constant here
        """Whether this process is set up beside the others, and no call has failed."""
        return self._pool.is_alive and self._is_set_up

    @property
    def num_shards(self) -> int:
        """The shards of a global batch of a run that begins here."""
        return shards_of_launcher() or self.num_workers

    @property
    def is_chief(self) -> bool:  # type: ignore[override] # it is no constant here
        """Whether this process is rank 0; it joins the others for that."""
        return self._joined().distributed.rank == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """Return on every rank what the chief has chosen.

        Raises:
            DistributedPeerError: The chief could not choose.
            Exception: What `choose` raised here.
        """
        distributed = self._joined().distributed
        try:
            return distributed.broadcast(choose() if distributed.rank == 0 else None)  # type: ignore[return-value] # the chief's
        except Exception as error:
            distributed.fail(error)
            self._pool.shutdown()
            raise

    def run(self, job: Job, on_report: Callable[[], None]) -> Call:
        """Run a train function here, and return the end of all ranks."""
        # None begins to write before all know what was there already.
        self._pool.distributed.allgather(None)
        return self._pool.submit(InWorker("run_job"), (job, on_report))

    def form(self) -> None:
        """Join the other processes, and set this one up.

        Raises:
            Exception: What the user's hook or class raised.
        """
        settings, distributed = self._settings, self._joined().distributed
        call = self._pool.submit(
            InWorker("set_up_joined"),
            (
                settings.config,
                settings.gpus_per_worker,
                settings.hook,
                settings.instance,
                distributed,
            ),
        )
        self.facts = call.wait() or ()
        self._is_set_up = True

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        ranks: Sequence[int] | None = None,
    ) -> Call:
        """Call a function; see `JoinedPool.submit`."""
        return self._pool.submit(function, args, ranks=ranks)

    def stop(self, *, force: bool = False) -> None:
        """Leave the others."""
        self._pool.shutdown(force)
        self._is_set_up = False
        self.facts = ()

    def _joined(self) -> JoinedPool:
        if not self._pool.is_alive:
            self._pool.start()
        return self._pool


def make_group(settings: GroupSettings, output: WorkerOutput) -> TrainGroup | InlineGroup:
    """Return the workers that a trainer's settings ask for."""
    if settings.cluster == "joined":
        return JoinedGroup(settings)
    if settings.limits is None:
        return InlineGroup(settings)
    return TrainGroup(settings, settings.limits, output)
