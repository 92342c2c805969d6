"""The workers of a trainer: formed, formed again, and set up each time."""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paceline._usable_cores import num_cores
from paceline.gpus import num_visible_gpus
from paceline.workers._elastic_group import ElasticGroup
from paceline.workers._elastic_size import ElasticLimits
from paceline.workers._restart_policy import RestartPolicy
from paceline.workers._worker_resources import most_startable
from paceline.workers.pools._inline_pool import InlinePool
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._worker_pool import WorkerPool
from paceline.workers.processes._horovod_rendezvous import HorovodRendezvous
from paceline.workers.processes._output_files import WorkerOutput
from paceline.workers.runs._function_in_worker import InWorker
from paceline.workers.runs._group_settings import GroupSettings
from paceline.workers.runs._run_spec import Job

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
        """The shards of a global batch of a run that begins with these workers."""
        elastic, most = self.settings.elastic, self._limits.most
        if elastic.num_shards is not None:
            return elastic.num_shards
        if most != math.inf:
            return int(most)
        # This machine has no more than what the first start takes, unless somebody lends slots.
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
        """Have the workers make the instance of a class, in a run until they are to end it.

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
        """Have workers call one of their functions; see `InWorker`."""
        return self.submit(InWorker(self.settings.functions, name, func), arguments, ranks=ranks)

    def use_at_most(self, num_workers: int | None) -> None:
        """Start no more workers than have something to do; None if that is not known."""
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
        """Return what leads each of the present workers to Horovod, if they use it."""
        if not self.settings.uses_horovod:
            return None
        if self._horovod is None:
            self._horovod = HorovodRendezvous()
        return self._horovod.variables(self.num_workers)

    def _capacity(self) -> int:
        ask = self.settings.elastic.capacity
        is_fixed = self._limits.least == self._limits.most and ask is None
        if is_fixed and (self._made_pool is None or self.settings.cluster == "local"):
            # What this machine has was checked when the trainer was made.
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
        """Call the hook, anew if that was done before; return 0."""
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
