"""Workers of a run: formed, formed again, or joined under an outer launcher."""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from paceline._base.gpus import num_visible_gpus
from paceline._base.process_and_network import num_cores
from paceline._training.workers.elastic_group import ElasticGroup, ElasticLimits
from paceline._training.workers.failures_and_restarts import RestartPolicy
from paceline._training.workers.group_recovery import JoinedGroup
from paceline._training.workers.processes.rank_environment import (
    HorovodRendezvous,
    shards_of_launcher,
)
from paceline._training.workers.processes.worker_output import WorkerOutput
from paceline._training.workers.worker_pools import InlinePool, JoinedPool, PendingCall, WorkerPool
from paceline._training.workers.worker_resources import most_startable
from paceline.core._run_storage import check_shared_storage
from paceline.storage._storage_by_url import storage_from
from paceline.train._config import GroupSettings
from paceline.train._run_protocol import Job


class InWorker:
    """Reference to a worker's function by module and name.

    The driver does not import its module, as that may load torch.

    Args:
        module: The module.
        name: The function.
        func: A function of the user's that it is to call, whose script's names the worker needs.
    """

    def __init__(self, module: str, name: str, func: Any = None) -> None:
        self._module = module
        self._name = name
        # The pool looks for it under the name that `functools.partial` has for it.
        self.func = func

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return getattr(import_module(self._module), self._name)(*args)


logger = logging.getLogger(__name__)

# How far a run without an upper bound can grow: times the workers of its first start.
_SHARDS_PER_WORKER = 2


class TrainGroup(ElasticGroup):
    """The workers of a trainer; they stay until `stop`.

    Args:
        settings: How they are started.
        limits: How many there may be.
        output: Where their lines go.
    """

    def __init__(
        self, settings: GroupSettings, limits: ElasticLimits, output: WorkerOutput
    ) -> None:
        super().__init__(limits, hint="ElasticConfig(max_wait_s=...).")
        self.settings = settings
        self.facts: Sequence[Any] = ()
        self._output = output
        self._horovod: HorovodRendezvous | None = None

    @property
    def num_workers(self) -> int:
        """How many workers there are, or could be started at this moment."""
        return self._elastic.num_workers or self._elastic.wanted(self._capacity())

    @property
    def num_shards(self) -> int:
        """The number of shards of a global batch for a run begun with these workers."""
        elastic, most = self.settings.elastic, self._limits.most
        if elastic.num_shards is not None:
            return elastic.num_shards
        if most != math.inf:
            return int(most)
        # Growth limit: a single machine has no room beyond the first start, unless somebody lends
        # slots.
        can_grow = self.settings.cluster != "local" or elastic.capacity is not None
        num_shards = self.num_workers * (_SHARDS_PER_WORKER if can_grow else 1)
        logger.info(
            "A global batch has %d shard(s), so this run can grow to %d worker(s);"
            " ElasticConfig(num_shards=...) sets another number.",
            num_shards,
            num_shards,
        )
        return num_shards

    def form_with_retries(self, max_retries: float) -> None:
        """Form the group, also if workers are lost meanwhile.

        Raises:
            WorkersLostError: They were lost more often than `max_retries` allows.
            NotEnoughWorkersError: There were too few for too long.
            Exception: What the user's hook or class raised.
        """
        policy = RestartPolicy(max_retries, hint="It was while they were started.")
        self.call_until_done(self.form, lambda error: policy.check(error, 0, "from the beginning"))

    def run(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Have the workers run a train function.

        Args:
            job: The function, and what it is to do.
            on_report: Called after each report of a function that runs in this process.
        """
        return self.ask("run_job", (job,), func=job.function)

    def make_instances(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Start a run by making a class instance in each worker; the run lasts until ended.

        Args:
            job: The instance, and where it reports.
            on_report: See `run`.
        """
        return self.ask("make_instance", (job,), func=job.function.kind)

    def ask(
        self,
        name: str,
        arguments: tuple[Any, ...] = (),
        *,
        func: Any = None,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Submit a call of a worker function; see `InWorker`."""
        return self.submit(InWorker(self.settings.functions, name, func), arguments, ranks=ranks)

    def use_at_most(self, num_workers: int | None) -> None:
        """Limit new workers to the number with work; None if unknown."""
        self._elastic.num_useful = num_workers

    @property
    def _num_wanted(self) -> int:
        ask = self.settings.elastic.capacity
        wanted = super()._num_wanted
        return wanted if ask is None else self._elastic.wanted(min(wanted, ask()))

    def _make_pool(self) -> WorkerPool:
        return self.settings.make_pool(
            self._limits.least,
            timeout_s=self.settings.config.timeout_s,
            preload=[self.settings.functions, *self.settings.preload],
            on_line=self._output,
        )

    def _set_up(self) -> None:
        settings = self.settings
        arguments = (
            settings.config, settings.resources.gpus, settings.hook, self._horovod_variables()
        )  # fmt: skip
        call = self.ask("set_up", arguments, func=settings.hook)
        self.facts = call.wait() or ()

    def _horovod_variables(self) -> list[dict[str, str]] | None:
        """Return each worker's environment variables for Horovod; None if unused."""
        if not self.settings.uses_horovod:
            return None
        if self._horovod is None:
            self._horovod = HorovodRendezvous()
        return self._horovod.variables(self.num_workers)

    def _capacity(self) -> int:
        ask = self.settings.elastic.capacity
        is_fixed = self._limits.least == self._limits.most and ask is None
        if is_fixed and (self._made_pool is None or self.settings.cluster == "local"):
            # Capacity already checked for this machine: a fixed number, at the trainer's creation.
            return self._limits.least
        capacity = super()._capacity()
        if capacity == sys.maxsize:
            is_open = self._limits.most == math.inf
            most = (num_visible_gpus() or num_cores()) if is_open else most_startable()
            capacity = max(self._limits.least, most)
        return capacity if ask is None else min(capacity, ask())

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time."""
        super().stop(force=force)
        self.facts = ()
        if self._horovod is not None:
            self._horovod.stop()
            self._horovod = None


class InlineGroup(TrainGroup):
    """No workers: functions run in the driver's own process, where debuggers can follow them.

    Args:
        settings: What workers would be set up with.
        output: Where lines go.
    """

    can_restart = False
    num_shards = 1

    def __init__(self, settings: GroupSettings, output: WorkerOutput) -> None:
        super().__init__(settings, ElasticLimits.of(1), output)

    @property
    def num_workers(self) -> int:
        """0, as none is started."""
        return 0

    def run(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Run a train function here, and return its end."""
        arguments = (job, self.settings.resources.gpus, on_report)
        return self.ask("run_in_driver", arguments)

    def make_instances(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Make the instance of a class here."""
        return self.ask("make_instance", (job, on_report))

    def try_form(self) -> float:
        """Call the hook, again on each new start; return 0."""
        self.stop()
        return super().try_form()

    def _make_pool(self) -> WorkerPool:
        return InlinePool()

    def _set_up(self) -> None:
        settings = self.settings
        try:
            arguments = (settings.hook, settings.resources.gpus, settings.uses_horovod)
            self.ask("set_up_in_driver", arguments).wait()
        except BaseException:
            # The next start calls the hook again.
            self.stop()
            raise


class OuterLauncherRunGroup(JoinedGroup, TrainGroup):
    """Group of an outer launcher's processes, each running the whole script.

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
        """The number of shards of a global batch for a run begun here."""
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
    """Return the worker group for a trainer's settings."""
    if settings.cluster == "joined":
        return OuterLauncherRunGroup(settings, output)
    if settings.limits is None:
        return InlineGroup(settings, output)
    return TrainGroup(settings, settings.limits, output)
