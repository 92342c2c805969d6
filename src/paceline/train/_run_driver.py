"""Driver of a run: forms and calls the workers, recovers losses, collects results."""

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paceline import core
from paceline._base.gpus import num_visible_gpus
from paceline._base.process_and_network import num_cores
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._training.workers.joined_pool import JoinedPool
from paceline._training.workers.pickled_calls import InWorker
from paceline._training.workers.processes.rank_environment import HorovodRendezvous, launcher_shards
from paceline._training.workers.processes.worker_output import WorkerOutput
from paceline._training.workers.ray.cluster import dealt
from paceline._training.workers.run import Run
from paceline._training.workers.worker_failures import RestartPolicy
from paceline._training.workers.worker_pools import InlinePool, PendingCall, WorkerPool
from paceline._training.workers.worker_settings import most_startable
from paceline._training.workers.workers import ElasticLimits, Workers
from paceline.core._arguments import searched_metrics
from paceline.core._attempt_journal import describe_error, outcome_of, record_failed_end
from paceline.core._exceptions import GivenUpError
from paceline.core._read_runs import storage_at
from paceline.core._run_opening import OpenedRun
from paceline.core._run_storage import discard_unfinished
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.train._preemption_watch import PreemptionWatch
from paceline.train._results import (
    IncompleteCheckpointError,
    Report,
    Results,
    check_saves,
    warn_of_reports,
    warn_of_tuples,
)
from paceline.train._run_protocol import Checkpoint, Instance, Job, RankOutcome, RunSpec, StoredAt
from paceline.train._trainer_arguments import (
    RunRequest,
    TrainWorkerSettings,
    check_storage,
    joined_limits,
)
from paceline.train._training_callbacks import RunFollower

logger = logging.getLogger(__name__)


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
            settings.limits = joined_limits(settings.num_workers)
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
            check_storage(self._joined_pool.distributed, job.spec)
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


# All ranks have returned then, so parts can only be late on a slow file system, in seconds.
_SETTLE_S = 30.0
# Limit for draining worker output: slow lines must not delay the end of the run.
_DRAIN_S = 2.0


class RunDriver(Run):
    """Driver of a run; call `advance` until `is_finished`.

    Args:
        workers: The workers.
        request: The orders.
        opened: Where the run writes.
        storage: Where checkpoints go; by default where the run has them.
    """

    _workers: TrainWorkers

    def __init__(
        self,
        workers: TrainWorkers,
        request: RunRequest,
        opened: OpenedRun,
        storage: CheckpointStorage | None = None,
    ) -> None:
        super().__init__(workers)
        self.is_finished = False
        self.results: Results | None = None
        self.error: BaseException | None = None
        self._request = request
        self._opened = opened
        self._lock = ExitStack()
        self._run = RunDirectory(opened.path)
        self._generation = opened.generation
        self._policy = RestartPolicy(
            request.max_retries,
            hint=f"Hint: the output of the workers is in {str(self._run.logs_path)!r}.",
        )
        self._dealt: Any = None
        self._num_lacking = 0
        self._num_told: int | None = None
        self._storage = storage or storage_at(opened.path)
        self._is_stored_per_node = storage is None and opened.info.storage_per_node
        goes_on = opened.latest_checkpoint is not None and request.checkpoint is None
        self._follower = RunFollower(
            self._run, request.callbacks, self._storage if goes_on else None
        )
        self._tracking: core.TrackingGroup | None = None
        self._preemption = PreemptionWatch(self._run)
        self._spec = self._make_spec()

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._run.path

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best checkpoint by the strategy; the newest without a score attribute."""
        return self._follower.best_checkpoint(self._request.strategy)

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of this run."""
        return self._follower.latest_checkpoint

    def start(self, lock: ExitStack) -> None:
        """Call the callbacks and give the workers the function.

        Args:
            lock: Holds the run's lock, which is given back at the end.

        Raises:
            Exception: A callback raised it, or the workers could not be formed.
        """
        self._lock = lock
        try:
            self._workers.output.open(self._run.logs_path)
            self._tracking = core.TrackingGroup(self._request.trackers, self._run, self._opened)
            if self._opened.attempt and self._workers.is_chief:
                discard_unfinished(self._run)
            self._workers.use_at_most(self._spec.num_shards or None)
            if self._workers.next_size() is not None:
                self._workers.end_generation()
            self._num_told = self._workers.num_workers
            for callback in self._request.callbacks:
                callback.start_training(self._run.path, self._request.config, self._num_told)
            self.begin()
        except BaseException as error:
            self._end(error)
            raise

    def advance(self, timeout_s: float | None = None) -> list[Report]:
        """Return new reports, once there are some, the run is finished, or the time is over.

        Raises:
            WorkersLostError: Workers were lost too often.
            NotEnoughWorkersError: There were too few workers for too long.
            IncompleteCheckpointError: Ranks have saved unequally many checkpoints.
            PreemptedError: The run has made room; it can resume from its last checkpoint.
            Exception: The error of the user's function or of a callback.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._preemption.watching():
                self._advance(deadline)
        except BaseException as error:
            self._end(error)
            raise
        return self.take_reports()

    def take_reports(self) -> list[Report]:
        """Return the reports not yet returned by any call."""
        return self._follower.take_reports()

    def close(self) -> None:
        """Abandon an unfinished run and stop its workers."""
        if not self.is_finished:
            self._end(GivenUpError("The run was given up before its end."))

    # ---- calling -------------------------------------------------------------------------

    def _advance(self, deadline: float | None) -> None:
        while not self.is_finished:
            has_ended = self.wait()
            # After the end the journals hold all that was reported.
            self._follower.follow()
            if has_ended:
                self._take_outcomes()
            elif self._preemption.is_due(self.num_commits):
                raise core.PreemptedError
            else:
                self.go_on()
            is_over = deadline is not None and time.monotonic() >= deadline
            if self._follower.has_reports or is_over:
                break

    @property
    def num_commits(self) -> int:
        """How many checkpoints the workers have committed."""
        return self._follower.num_commits

    def _make_spec(self) -> RunSpec:
        opened, request = self._opened, self._request
        start = request.checkpoint
        if start is None and opened.latest_checkpoint is not None:
            start = Checkpoint.stored(self._storage, opened.latest_checkpoint)
        strategy = request.strategy
        judged, trial = opened.info.judged_metrics, opened.info.trial
        searcher = (trial.config.get("searcher") or {}) if trial else {}
        return RunSpec(
            run_id=opened.info.run_id,
            run_dir=str(opened.path),
            storage=self._storage.url,
            attempt=opened.attempt,
            generation=opened.generation,
            seed=opened.seed if start is None else int(start.metadata["seed"]),
            num_shards=0 if start is None else int(start.metadata["num_shards"]),
            checkpoint=None if start is None else StoredAt(start.storage, start.uuid),
            num_to_keep=strategy.num_to_keep,
            first_report=opened.steps_completed if start is None else 0,
            score_attribute=strategy.checkpoint_score_attribute,
            is_score_minimized=strategy.checkpoint_score_order == "min",
            kept=self._follower.kept,
            is_stepwise=request.is_stepwise,
            check_ranks=request.check_ranks,
            is_seed_given=request.is_seed_given,
            storage_per_node=self._is_stored_per_node,
            judged_metrics=None if judged is None else tuple(judged),
            searched_metrics=searched_metrics(searcher, judged),
        )

    def _count_shards(self) -> int:
        """Return the shards of a global batch, and say who has nothing to do."""
        num_workers = max(1, self._workers.num_workers)
        num_shards = self._spec.num_shards or self._workers.num_shards
        if num_workers > num_shards:
            logger.warning(
                "%d of the %d workers stay idle, as a global batch has %d shard(s).",
                num_workers - num_shards,
                num_workers,
                num_shards,
            )
        return num_shards

    def _submit(self) -> PendingCall:
        request = self._request
        self._spec = replace(self._spec, num_shards=self._count_shards())
        self._workers.use_at_most(self._spec.num_shards)
        self._tell_size()
        job = Job(
            function=request.function,
            spec=self._spec,
            config=request.config,
            dataset=self._deal(),
            state=request.state,
        )
        return self._workers.begin(job, self._follower.follow)

    def _deal(self) -> Any:
        """Return the data set for the workers of this generation."""
        dataset = dealt(self._request.dataset, max(1, self._workers.num_workers))
        # Reference to data split by Ray: the split ends with this process's last reference.
        self._dealt = dataset if dataset is not self._request.dataset else None
        return dataset

    def _tell_size(self) -> None:
        num_workers = self._workers.num_workers
        if num_workers != self._num_told:
            self._num_told = num_workers
            for callback in self._request.callbacks:
                callback.handle_resize(num_workers, self._generation)

    # ---- other workers -------------------------------------------------------------------

    def _decide(self, error: Exception) -> None:
        self._follower.follow()
        start = self._follower.next_start(self._spec.checkpoint)
        self._policy.check(
            error,
            self.num_commits,
            "from the beginning" if start is None else f"from checkpoint {start.uuid}",
        )

    def _has_recorded(self) -> bool:
        key = JournalKey(self._opened.attempt, self._generation, 0)
        return bool(self._run.reader(key).read(1))

    def _prepare_next(self) -> None:
        # Workers that were ended may have committed another checkpoint meanwhile.
        self._follower.follow()
        discard_unfinished(self._run)
        self._preemption.end_move()
        self._generation += 1
        self._spec = replace(
            self._spec,
            generation=self._generation,
            checkpoint=self._follower.next_start(self._spec.checkpoint),
            kept=self._follower.kept,
            restart_causes=tuple(self._restart_causes),
        )

    def _ask_to_move(self) -> None:
        self._preemption.ask_to_move()

    def _note_restart(self, error: Exception) -> None:
        for callback in self._request.callbacks:
            callback.handle_restart(error, self._generation)

    # ---- ending --------------------------------------------------------------------------

    def _values_of(self, call: PendingCall) -> list[RankOutcome]:
        outcomes = super()._values_of(call)
        self._num_lacking = self._settle(outcomes)
        return outcomes

    def _take_outcomes(self) -> None:
        """Collect the return values, unless a new generation of workers is to run again."""
        outcomes: list[RankOutcome] | None = self.take_end()
        if outcomes is None:
            return
        self._follower.follow()
        if any(outcome.is_preempted for outcome in outcomes):
            if self._preemption.is_moving:
                self._begin_others()
                return
            # Function preempted: the workers were asked to make room, and ended early.
            raise core.PreemptedError
        self.results = self._results_of(outcomes)
        if not any(outcome.is_stopped for outcome in outcomes):
            check_saves(self._busy(outcomes), self._num_lacking, self.results)
        warn_of_reports(outcomes)
        warn_of_tuples(self.results)
        self._end(None)

    def _results_of(self, outcomes: Sequence[RankOutcome]) -> Results:
        return Results(
            [outcome.value for outcome in outcomes],
            run_dir=self._run.path,
            attempt=self._opened.attempt,
            generations=range(self._opened.generation, self._generation + 1),
            checkpoints=list(self._follower.checkpoints.values()),
            best=self.best_checkpoint,
            num_restarts=self._policy.num_losses,
            report_lags_s=self._follower.lags_s,
        )

    def _busy(self, outcomes: Sequence[RankOutcome]) -> Sequence[RankOutcome]:
        """Return the outcomes of ranks with shards; other ranks may skip loops."""
        return outcomes[: self._spec.num_shards]

    def _settle(self, outcomes: Sequence[RankOutcome], function: str = "settle") -> int:
        """Wait until the checkpoints are committed that all ranks have saved, and ranks compared.

        Args:
            outcomes: The outcome of the run on each rank.
            function: The function for the chief to call.

        Returns:
            How many of them lack parts all the same.
        """
        if not any(outcome.num_pending or outcome.is_to_compare for outcome in outcomes):
            return 0
        num_saves = min(outcome.num_saves for outcome in self._busy(outcomes))
        call = self._workers.ask(function, (num_saves, _SETTLE_S), ranks=[0])
        num_pending: int = (call.wait() or [0])[0]
        # Surplus saves of the chief: no checkpoint of all ranks, so not counted here.
        return num_pending - (outcomes[0].num_saves - num_saves)

    def _end(self, error: BaseException | None) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self._dealt = None
        self.error = error
        self._preemption.end_move()
        is_failure = error is not None and not isinstance(error, IncompleteCheckpointError)
        try:
            self._workers.drain(_DRAIN_S)
            if is_failure and self._workers.is_alive and not self._has_ended.is_set():
                self._workers.stop(force=True)
            if error is not None and is_failure:
                self._follow_to_the_end()
                if self._workers.is_chief:
                    record_failed_end(self._run, self._opened, self._generation + 1, error)
        finally:
            self._lock.close()
            self._tell_end(error)

    def _follow_to_the_end(self) -> None:
        try:
            self._follower.follow()
        except Exception:
            # The first error is the one to raise.
            logger.exception("A callback failed at the end of a failed run.")

    def _tell_end(self, error: BaseException | None) -> None:
        if self._tracking is not None:
            text = None if error is None else describe_error(error)
            self._tracking.finish(outcome_of(error), text)
        for callback in self._request.callbacks:
            try:
                callback.finish_training(error)
            except Exception:
                if error is None:
                    raise
                # The first error is the one to raise.
                logger.exception("A callback failed at the end of a failed run.")
