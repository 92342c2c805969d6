"""The workers of a trainer whose own process is one of them, as an outer launcher started it."""

import logging
from collections.abc import Callable

from paceline.core import check_shared_storage
from paceline.storage import storage_from
from paceline.workers._elastic_size import ElasticLimits
from paceline.workers._outer_launcher_group import JoinedGroup
from paceline.workers.pools._outer_launcher_pool import JoinedPool
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._worker_pool import WorkerPool
from paceline.workers.processes._output_files import WorkerOutput
from paceline.workers.processes._rank_environment import shards_of_launcher
from paceline.workers.runs._group_settings import GroupSettings
from paceline.workers.runs._run_spec import Job
from paceline.workers.runs._train_group import InlineGroup, TrainGroup

logger = logging.getLogger(__name__)


class OuterLauncherRunGroup(JoinedGroup, TrainGroup):
    """The processes of an outer launcher, each of which runs the whole script.

    The chief decides where a run writes, and it alone has callbacks.

    Args:
        settings: What workers are set up with. The launcher's number of processes counts.
        output: Where lines go.
    """

    def __init__(self, settings: GroupSettings, output: WorkerOutput) -> None:
        pool = JoinedPool(timeout_s=settings.config.timeout_s)
        if settings.num_workers != pool.num_workers:
            logger.warning(
                "The launcher has started %d processes, each of which is one worker, however many"
                " are asked for (%d).",
                pool.num_workers,
                settings.num_workers,
            )
        settings.limits = ElasticLimits.of(pool.num_workers)
        super().__init__(settings, settings.limits, output)
        self._made_pool = pool

    @property
    def num_shards(self) -> int:
        """The shards of a global batch of a run that begins here."""
        return shards_of_launcher() or self.num_workers

    def run(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Run a train function here, and return the end of all ranks."""
        self._check_storage(job)
        return self.ask("run_job", (job, on_report))

    def make_instances(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Make the instance of a class here, beside those of all ranks."""
        self._check_storage(job)
        return self.ask("make_instance", (job, on_report))

    def _check_storage(self, job: Job) -> None:
        distributed, spec = self.joined_pool.distributed, job.spec
        if not spec.storage_per_node:
            check_shared_storage(storage_from(spec.storage), distributed)
        # None begins to write before all know what was there already.
        distributed.allgather(None)

    def _make_pool(self) -> WorkerPool:
        return JoinedPool(timeout_s=self.settings.config.timeout_s)

    def _set_up(self) -> None:
        settings = self.settings
        call = self.ask(
            "set_up_joined",
            (
                settings.config,
                settings.resources.gpus,
                settings.hook,
                self.joined_pool.distributed,
                settings.uses_horovod,
            ),
        )
        self.facts = call.wait() or ()


def make_group(settings: GroupSettings, output: WorkerOutput) -> TrainGroup:
    """Return the workers that a trainer's settings ask for."""
    if settings.cluster == "joined":
        return OuterLauncherRunGroup(settings, output)
    if settings.limits is None:
        return InlineGroup(settings, output)
    return TrainGroup(settings, settings.limits, output)
