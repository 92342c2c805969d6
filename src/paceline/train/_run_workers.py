"""Workers of a run: formed, formed again, or joined under an outer launcher."""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from paceline._base.gpus import num_visible_gpus
from paceline._base.process_and_network import num_cores
from paceline._training.workers.failures_and_restarts import RestartPolicy
from paceline._training.workers.processes.rank_environment import (
    HorovodRendezvous,
    launcher_shards,
)
from paceline._training.workers.processes.worker_output import WorkerOutput
from paceline._training.workers.worker_pools import InlinePool, JoinedPool, PendingCall, WorkerPool
from paceline._training.workers.worker_resources import most_startable
from paceline._training.workers.workers import ElasticLimits, Workers
from paceline.core._distributed_context import DistributedContext
from paceline.core._run_storage import check_shared_storage
from paceline.storage._storage_by_url import storage_from
from paceline.train._config import TrainWorkerSettings
from paceline.train._run_protocol import Instance, Job, RunSpec

logger = logging.getLogger(__name__)


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


T = TypeVar("T")

# How far a run without an upper bound can grow: times the workers of its first start.
_SHARDS_PER_WORKER = 2


class TrainWorkers(Workers[WorkerPool]):
    """The workers of a trainer; they stay until `stop`.

    Without workers, functions run in the driver's own process, where debuggers can follow them.
    Under an outer launcher each of its processes runs the whole script and is a worker: the chief
    decides where a run writes, and it alone has callbacks.

    Args:
        settings: How they are started. An outer launcher's number of processes counts.

    Attributes:
        facts: The workers' reports about their places; empty before they are started.
        output: Where their lines go.
    """

    def __init__(self, settings: TrainWorkerSettings) -> None:
        self.settings = settings
        self.facts: Sequence[Any] = ()
        self._horovod: HorovodRendezvous | None = None
        if settings.cluster == "joined":
            settings.limits = _joined_limits(settings.num_workers)
        limits = settings.limits or ElasticLimits.of(1)
        self.output = WorkerOutput(limits.most > 1)
        super().__init__(limits, self._new_pool, hint="ElasticConfig(max_wait_s=...).")

    @property
    def is_chief(self) -> bool:
        """Whether this process controls the workers; joins an outer launcher's to find out."""
        pool = self._joined_pool
        return pool is None or pool.join().rank == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """Return the choice of `choose`, the same in all processes in control of the workers."""
        pool = self._joined_pool
        return choose() if pool is None else pool.decide(choose)

    @property
    def num_workers(self) -> int:
        """How many workers there are, or could be started at this moment; 0 without workers."""
        if self.settings.limits is None:
            return 0
        return self._elastic.num_workers or self._elastic.wanted(self._capacity())

    @property
    def num_shards(self) -> int:
        """The number of shards of a global batch for a run begun with these workers."""
        settings, most = self.settings, self._limits.most
        if settings.limits is None:
            return 1
        if settings.cluster == "joined":
            return launcher_shards() or self.num_workers
        elastic = settings.elastic
        if elastic.num_shards is not None:
            return elastic.num_shards
        if most != math.inf:
            return int(most)
        # Growth limit: a single machine has no room beyond the first start, unless somebody lends
        # slots.
        can_grow = settings.cluster != "local" or elastic.capacity is not None
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
            Exception: The error of the user's hook or class.
        """
        policy = RestartPolicy(max_retries, hint="It was while they were started.")
        self.call_until_done(self.form, lambda error: policy.check(error, 0, "from the beginning"))

    def begin(self, job: Job, on_report: Callable[[], None]) -> PendingCall:
        """Have the workers run a train function, or make the instance of a class.

        Args:
            job: The function or the instance, and its work.
            on_report: Called after each report of a function that runs in this process.
        """
        is_class = isinstance(job.function, Instance)
        name, func = "make_instance" if is_class else "run_job", None
        arguments: tuple[Any, ...] = (job, on_report)
        if self.pool.can_restart:
            func = job.function.kind if is_class else job.function
            arguments = (job,)
        elif self._joined_pool is not None:
            _check_storage(self._joined_pool.distributed, job.spec)
        elif not is_class:
            name = "run_in_driver"
            arguments = (job, self.settings.resources.gpus, on_report)
        return self.pool.submit(InWorker(self.settings.functions, name, func), arguments)

    def ask(
        self,
        name: str,
        arguments: tuple[Any, ...] = (),
        *,
        func: Any = None,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Submit a call of a worker function; see `InWorker`."""
        function = InWorker(self.settings.functions, name, func)
        return self.pool.submit(function, arguments, ranks=ranks)

    def use_at_most(self, num_workers: int | None) -> None:
        """Limit new workers to the number with work; None if unknown."""
        self._elastic.num_useful = num_workers

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time."""
        super().stop(force=force)
        self.facts = ()
        if self._horovod is not None:
            self._horovod.stop()
            self._horovod = None

    @property
    def _num_wanted(self) -> int:
        ask = self.settings.elastic.capacity
        wanted = super()._num_wanted
        return wanted if ask is None else self._elastic.wanted(min(wanted, ask()))

    @property
    def _joined_pool(self) -> JoinedPool | None:
        """The pool of an outer launcher's processes; None if there is no such launcher."""
        pool = self.pool if self.settings.cluster == "joined" else None
        assert pool is None or isinstance(pool, JoinedPool)
        return pool

    def _new_pool(self) -> WorkerPool:
        settings = self.settings
        if settings.cluster == "joined":
            return JoinedPool(timeout_s=settings.config.timeout_s)
        if settings.limits is None:
            return InlinePool()
        return settings.make_pool(
            self._limits.least,
            timeout_s=settings.config.timeout_s,
            preload=[settings.functions, *settings.preload],
            on_line=self.output,
        )

    def _set_up(self) -> None:
        settings, joined = self.settings, self._joined_pool
        gpus, hook = settings.resources.gpus, settings.hook
        if settings.limits is None:
            self.ask("set_up_in_driver", (hook, gpus, settings.uses_horovod)).wait()
            return
        common = (settings.config, gpus, hook)
        if joined is not None:
            more = (joined.distributed, settings.uses_horovod)
            call = self.ask("set_up_joined", (*common, *more))
        else:
            call = self.ask("set_up", (*common, self._horovod_variables()), func=hook)
        self.facts = call.wait() or ()

    def _horovod_variables(self) -> list[dict[str, str]] | None:
        """Return each worker's environment variables for Horovod; None if unused."""
        if not self.settings.uses_horovod:
            return None
        if self._horovod is None:
            self._horovod = HorovodRendezvous()
        return self._horovod.variables(self.num_workers)

    def _capacity(self) -> int:
        ask, cluster = self.settings.elastic.capacity, self.settings.cluster
        is_fixed = self._limits.least == self._limits.most and ask is None
        is_known = self._made_pool is None or cluster == "local"
        if cluster == "joined" or (is_fixed and is_known):
            # Capacity already checked for this machine: a fixed number, at the trainer's creation.
            return self._limits.least
        capacity = super()._capacity()
        if capacity == sys.maxsize:
            is_open = self._limits.most == math.inf
            most = (num_visible_gpus() or num_cores()) if is_open else most_startable()
            capacity = max(self._limits.least, most)
        return capacity if ask is None else min(capacity, ask())


def _joined_limits(num_asked_for: int) -> ElasticLimits:
    num_workers = JoinedPool().num_workers
    if num_asked_for != num_workers:
        logger.warning(
            "The launcher has started %d processes, each of which is one worker, however many"
            " are asked for (%d).",
            num_workers,
            num_asked_for,
        )
    return ElasticLimits.of(num_workers)


def _check_storage(distributed: DistributedContext, spec: RunSpec) -> None:
    if not spec.storage_per_node:
        check_shared_storage(storage_from(spec.storage), distributed)
    # None begins to write before all know the files that were there already.
    distributed.allgather(None)
