"""The driver of a train function, and its workers: start, end, class API."""

import os
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, overload

from paceline import core
from paceline._base.arguments_and_errors import check_dictionary, integer, optional, ranks_to_check
from paceline._base.imports import html_table, text_table
from paceline._training.workers.ray.cluster import check_ray_data
from paceline._training.workers.worker_settings import checked_resources
from paceline.core._exceptions import GivenUpError
from paceline.core._run_opening import (
    OpenedRun,
    join_run,
    local_directory,
    next_run_number,
    open_run,
    resuming_by,
)
from paceline.core._run_storage import GivenStorage, check_given_storage, given_storage
from paceline.train._results import Results
from paceline.train._run_driver import RunDriver, TrainWorkers
from paceline.train._run_protocol import Checkpoint, Instance
from paceline.train._stepwise_and_class_runs import ClassRun, RunIterator, StepwiseRun, as_ranks
from paceline.train._trainer_arguments import (
    NOT_GIVEN,
    CheckpointStrategy,
    ElasticConfig,
    RunRequest,
    TorchConfig,
    TrainWorkerSettings,
    check_class_callbacks,
    check_train_function,
    check_trainer_alone,
    chosen_settings,
    given_dataset,
    given_num_workers,
    instance_of_arguments,
    split_callbacks,
    stored_or_state,
    trainer_torch_config,
    with_run_lines,
)
from paceline.train._training_callbacks import TrainingCallback

_HEADER = ("rank", "node", "pid", "device", "CPU cores", "GPUs")


def table_of(settings: TrainWorkerSettings, num_workers: int, facts: Sequence[Any]) -> str:
    """Return a table of workers, nodes, devices and resources.

    Args:
        settings: The requested settings.
        num_workers: How many workers there are, or are to be started.
        facts: The workers' reports about themselves; empty before they are started.
    """
    title = title_of(settings, num_workers, facts)
    if settings.limits is None:
        return title
    return f"{title}\n{text_table(_table_rows_of(settings, num_workers, facts))}"


def html_of(settings: TrainWorkerSettings, num_workers: int, facts: Sequence[Any]) -> str:
    """Return the table of `table_of` for a notebook."""
    title = title_of(settings, num_workers, facts)
    if settings.limits is None:
        return html_table(title, (), ())
    header, *rows = _table_rows_of(settings, num_workers, facts)
    return html_table(title, header, rows)


def _table_rows_of(
    settings: TrainWorkerSettings, num_workers: int, facts: Sequence[Any]
) -> list[Sequence[str]]:
    """Return the header and a row for each worker."""
    cores = "shared" if settings.resources.cpus is None else str(settings.resources.cpus)
    gpus = "auto" if settings.resources.gpus is None else f"{settings.resources.gpus:g}"
    more = {name: f"{amount:g}" for name, amount in settings.resources.others.items()}
    rows: list[Sequence[str]] = [(*_HEADER, *more)]
    for rank in range(num_workers):
        fact = facts[rank] if rank < len(facts) else None
        key = (fact.node, str(fact.pid), fact.device) if fact is not None else ("-", "-", "-")
        rows.append((str(rank), *key, cores, gpus, *more.values()))
    return rows


def title_of(settings: TrainWorkerSettings, num_workers: int, facts: Sequence[Any]) -> str:
    """Return the line above the table of `table_of`."""
    limits = settings.limits
    if limits is None:
        return "Trainer without workers: functions run in this process."
    # Several nodes of a Ray cluster may be on one machine.
    nodes = {(fact.node, fact.node_rank) for fact in facts}
    where = f"running on {len(nodes)} node(s)" if nodes else "not started"
    backend = settings.config.backend or "gloo, or nccl with GPUs"
    if facts and not settings.config.backend:
        backend = "nccl" if facts[0].device.startswith("cuda") else "gloo"
    bounds = "" if limits.least == limits.most else f" ({limits.least} to {limits.most})"
    return f"Trainer: {num_workers} worker(s){bounds}, {where}, backend {backend}."


class ClassWorkers(Sequence["WorkerHandle"]):
    """Handles of the workers, in rank order; see `Trainer.to_worker_group`.

    Args:
        trainer: The trainer that has started the workers.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return max(1, self._trainer.num_workers)

    @overload
    def __getitem__(self, index: int) -> "WorkerHandle": ...

    @overload
    def __getitem__(self, index: slice) -> "list[WorkerHandle]": ...

    def __getitem__(self, index: int | slice) -> "WorkerHandle | list[WorkerHandle]":
        ranks = range(len(self))[index]
        if isinstance(ranks, int):
            return WorkerHandle(self._trainer, ranks)
        return [WorkerHandle(self._trainer, rank) for rank in ranks]

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function with each worker's instance, and return the results."""
        return self._trainer.execute(function, *args, **kwargs)

    def shutdown(self) -> None:
        """End the workers."""
        self._trainer.shutdown()


class WorkerHandle:
    """Proxy of the instance in a worker: method calls run there and return their values here.

    Args:
        trainer: The trainer.
        rank: The worker.
    """

    def __init__(self, trainer: "Trainer", rank: int) -> None:
        self._trainer = trainer
        self._rank = rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._trainer.execute_single(_call_method, name, args, kwargs, rank=self._rank)

        return call


def _call_method(instance: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(instance, name)(*args, **kwargs)


class Trainer:
    """Run train functions on several workers, on this machine or on a Ray cluster.

    The workers start at the first run, stay warm for the next one, and end with `shutdown`, the
    end of a `with` block, or this process. Several threads may call a trainer: functions are
    executed one after the other, and a run is refused while another one is active.

    Args:
        num_workers: How many workers; by default one for each GPU of this machine, or one. 0 runs
            functions in this process, for debuggers. A pair such as (2, 8) or (4, math.inf) has
            the least and the most: after a loss a run continues with the workers left, and it takes
            on more when a checkpoint was committed. A global batch stays the same: the most are its
            number of shards, or else the number at the run's start.
        cpus_per_worker: The cores of each; by default they share what there is.
        gpus_per_worker: The GPUs of each; by default one each, if there are any.
        resources_per_worker: The same by the names "CPU" and "GPU", and on a Ray cluster what
            else each needs, by Ray's names.
        backend: "torch" (also called "pytorch"), or its config. With "horovod", Horovod is
            initialized in each worker too: it sums the gradients of prepared models, and the
            function may use it. That needs workers of this machine, or of
            `paceline.launch.horovod`.
        backend_config: How the workers meet.
        cluster: "local" for this machine. "ray" for the Ray cluster that this process is connected
            to, or that ``RAY_ADDRESS`` names; without one Ray is started here until `shutdown`.
            "auto" for such a cluster if there is one, else for this machine; but in a process that
            srun, mpirun or torchrun has started as one of several, these processes are the
            workers, and this is one of them, however many are asked for. On a Ray cluster each
            worker has one CPU by default.
        max_retries: How often in one run workers may be lost; they are started again, and the
            function resumes from the last checkpoint. `float("inf")` for always.
        run_dir: The run directory of the first run. If it holds a run already, that resumes from
            its last checkpoint. By default each run makes one below ``./paceline_runs``.
        checkpoint_storage: Where checkpoints go: a directory, a URL such as ``s3://bucket/prefix``,
            or the mapping of a config; the run directory by default, and under a master the
            experiment's storage. All workers must reach it.
        heartbeat_timeout_s: After how many seconds without a sign of life a worker counts as lost.
        backend_args: Another name of `backend_config`.
        workers: Another name of `num_workers`.
        elastic: How to deal with workers that come and go.
        check_ranks: Whether workers stop if their prepared models have drifted apart; or the names
            of tensors that each worker has for itself, see docs/distributed.md.
        seed: The seed of data order and of all generators, see docs/train.md; drawn by default.

    Raises:
        ImportError: Ray is wanted, but not installed.
        NotOfferedError: Horovod is to work on a Ray cluster.
        ResourcesError: The workers want more than this machine has.
        TypeError: A value has another type.
        ValueError: A value is unknown or out of range.
    """

    def __init__(
        self,
        num_workers: int | tuple[int, float] = NOT_GIVEN,
        *,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        backend: str | TorchConfig = "torch",
        backend_config: TorchConfig | None = None,
        cluster: str = "auto",
        max_retries: float = 3,
        run_dir: str | os.PathLike[str] | None = None,
        checkpoint_storage: GivenStorage = None,
        heartbeat_timeout_s: float = 30.0,
        backend_args: TorchConfig | None = None,
        workers: int | tuple[int, float] = NOT_GIVEN,
        elastic: ElasticConfig | None = None,
        check_ranks: bool | str | Sequence[str] = True,
        seed: int | None = None,
    ) -> None:
        # First statement of the method: `locals()` must hold nothing but the arguments.
        given = locals().items()
        self._arguments = {n: v for n, v in given if n != "self" and v is not NOT_GIVEN}
        resources = checked_resources(cpus_per_worker, gpus_per_worker, resources_per_worker)
        asked_for = given_num_workers(num_workers, workers, resources.gpus)
        # A copy elsewhere is to have as many.
        self._arguments["num_workers" if workers is NOT_GIVEN else "workers"] = asked_for
        if not isinstance(max_retries, (int, float)) or not max_retries >= 0:
            raise ValueError(f"`max_retries` must be at least 0, but got {max_retries!r}.")
        self._settings = chosen_settings(
            asked_for,
            trainer_torch_config(backend, backend_config, backend_args),
            resources,
            cluster=cluster,
            heartbeat_timeout_s=heartbeat_timeout_s,
            elastic=elastic or ElasticConfig(),
            uses_horovod=backend == "horovod",
        )
        self._workers = TrainWorkers(self._settings)
        self._max_retries = max_retries
        self._seed = optional(integer)("seed", seed)
        self._check_ranks = ranks_to_check("check_ranks", check_ranks)
        self._run_dir = local_directory(run_dir, "run_dir")
        self._given_storage = checkpoint_storage
        self._storage = given_storage(checkpoint_storage)
        self._num_runs = 0
        # The last run, and the active one if there is one.
        self._driver: RunDriver | None = None
        self._iterator: RunIterator | None = None
        # The class that `start` was given, the followers of its run, and that run while active.
        self._instance: Instance | None = None
        self._class_callbacks: Sequence[TrainingCallback | core.Tracker | str] | None = None
        self._class_run: ClassRun | None = None
        # Seed for functions executed outside of a run; equal on all ranks.
        self._drawn_seed: int | None = None
        # Calls of several threads wait for each other; an active run refuses them.
        self._turn = threading.RLock()

    def replace(self, **changes: Any) -> "Trainer":
        """Return a trainer of its own workers with the same arguments but some.

        Args:
            changes: Arguments of `Trainer`, by their names.
        """
        return Trainer(**{**self._arguments, **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Trainer, **self._arguments), ()

    @property
    def has_given_storage(self) -> bool:
        """Whether checkpoints go to `checkpoint_storage`, reachable from all machines."""
        return self._storage is not None

    def to_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> type[Any]:
        """Return a Ray Tune trainable running a train function; needs ``paceline[tune]``.

        A trial asks Ray for the resources of its workers by itself and starts them in its
        placement group. Lost workers end the trial; Tune's `FailureConfig` decides what follows.

        Args:
            train_func: See `run`. Its config is the trial's.
            dataset: See `run`.

        Returns:
            A class for `tune.Tuner` or `tune.run`.

        Raises:
            ImportError: Ray Tune is not installed.
            RuntimeError: The workers are running, so that they would take the trials' resources.
            ValueError: The trainer has no workers, or the function has several parameters.
        """
        check_train_function(train_func)
        if self._settings.limits is None:
            raise ValueError("`num_workers` must be at least 1 for trials of Ray Tune, but is 0.")
        if self._workers.is_alive:
            raise RuntimeError(
                "A trainer must not be running to become a trainable, as each trial starts workers"
                " of its own. Hint: shutdown()."
            )
        # Late import: it loads Ray.
        from paceline.train._ray_tune import to_trainable

        return to_trainable(self, train_func, dataset)

    def to_tune_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> type[Any]:
        """Return a Ray Tune trainable, like `to_trainable`."""
        return self.to_trainable(train_func, dataset)

    # ---- running -------------------------------------------------------------------------

    def run(
        self,
        train_func: Callable[..., Any],
        config: dict[str, Any] | None = None,
        callbacks: Sequence[TrainingCallback | core.Tracker | str] | None = None,
        dataset: Any = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        *,
        seed: int | None = None,
    ) -> Results:
        """Run a function on all workers, and return its results in rank order.

        Args:
            train_func: A function of the config, or of nothing.
            config: Its argument.
            callbacks: The followers of the run: callbacks, trackers such as
                `integrations.MLflowTracker()`, or names of trackers such as "mlflow".
            dataset: The result of `train.get_dataset()` in the function: a `paceline.data.Dataset`,
                a torch data set, a sequence or another iterable, the path or URL of files; a
                dictionary or a tuple of several, or the folds of a cross validation, for
                `train.get_datasets()`; or a function of the config, or of nothing, that makes this
                in the workers.
            checkpoint: The first result of `train.load_checkpoint()`: a `Checkpoint`, the path of
                one or of a run directory, or a state.
            checkpoint_strategy: Which checkpoints to keep; all by default.
            seed: The seed of data order and generators; the trainer's by default.

        Returns:
            A list of values with `metrics`, `checkpoints`, `best_checkpoint` and `run_dir`.
            Modules and tensors are on the CPU.

        Raises:
            TypeError: A value has another type; as `NotSendableError` if the function, a value
                that it uses, or its result cannot be pickled: the message names it.
            ValueError: The function has several parameters.
            WorkersLostError: Workers were lost more often than `max_retries` allows.
            WorkerFailedError: A worker left by `sys.exit(0)`, or without workers by any
                `sys.exit()`.
            NotEnoughWorkersError: Fewer than the least number of workers could run for too long.
            IncompleteCheckpointError: Ranks have saved unequally many checkpoints.
            Exception: The function's error on the rank that failed first, with the traceback
                of that rank as its cause.
        """
        try:
            iterator = self._begin(
                train_func, config, callbacks, dataset, checkpoint, checkpoint_strategy, (),
                seed=seed,
            )  # fmt: skip
            return iterator.get_results()
        except KeyboardInterrupt:
            # The place within the machinery says nothing to the person who has pressed Ctrl-C.
            raise KeyboardInterrupt from None

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: dict[str, Any] | None = None,
        dataset: Any = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        *,
        ranks: int | Collection[int] | None = 0,
    ) -> RunIterator:
        """Run a function as `run` does, and return an iterator over its reports.

        Lost workers are replaced while the next report or the results are waited for.

        Args:
            train_func: See `run`.
            config: See `run`.
            dataset: See `run`.
            checkpoint: See `run`.
            checkpoint_strategy: See `run`.
            ranks: The ranks to show; None for all.

        Returns:
            An iterator of dictionaries, with `is_finished()` and `get_results()`.
        """
        return self._begin(
            train_func, config, None, dataset, checkpoint, checkpoint_strategy, as_ranks(ranks)
        )

    def run_generator(self, *args: Any, **kwargs: Any) -> RunIterator:
        """Run a function and return an iterator over its reports, like `run_iterator`."""
        return self.run_iterator(*args, **kwargs)

    def run_stepwise(
        self,
        train_func: Callable[..., Any],
        config: dict[str, Any] | None = None,
        dataset: Any = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        *,
        known: Mapping[int, Mapping[str, Any]] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> StepwiseRun:
        """Run a function, pausing at each report of the chief until the next is requested.

        It is for what judges reports, such as a hyperparameter search: a run can be stopped at a
        report without losing its workers, and its checkpoints up to the report exist by then.

        Args:
            train_func: See `run`.
            config: See `run`.
            dataset: See `run`.
            checkpoint: See `run`.
            checkpoint_strategy: See `run`.
            known: The `recent` of an earlier run that this one continues: reports that are not
                yielded again.
            run_dir: The run directory, in place of the trainer's.
            seed: The seed of a new run; drawn by default.

        Returns:
            An iterator of the chief's reports, with `stop()`, `latest_checkpoint` and
            `get_results()`.

        Raises:
            ValueError: The trainer has no workers that could wait.
        """
        self.check_can_wait()
        iterator = self._begin(
            train_func, config, None, dataset, checkpoint, checkpoint_strategy, (0,),
            run_dir=local_directory(run_dir, "run_dir"), seed=seed, is_stepwise=True,
        )  # fmt: skip
        assert self._driver is not None
        return StepwiseRun(self._driver, iterator, known or {})

    def _begin(
        self,
        function: Callable[..., Any],
        config: dict[str, Any] | None,
        callbacks: Sequence[TrainingCallback | core.Tracker | str] | None,
        dataset: Any,
        checkpoint: Any,
        strategy: CheckpointStrategy | None,
        ranks: Collection[int] | None,
        *,
        run_dir: Path | None = None,
        seed: int | None = None,
        is_stepwise: bool = False,
    ) -> RunIterator:
        check_train_function(function)
        check_dictionary("config", config)
        own, trackers = split_callbacks(callbacks)
        if not is_stepwise:
            # An iterator's reports are for the caller.
            own = with_run_lines(own, shows_reports=ranks == ())
        dataset = given_dataset(dataset)
        check_ray_data(dataset, self._settings.cluster)
        stored, state = stored_or_state(checkpoint)
        request = RunRequest(
            function=function,
            config=config,
            dataset=dataset,
            checkpoint=stored,
            state=state,
            strategy=strategy or CheckpointStrategy(),
            callbacks=own if self._workers.is_chief else [],
            trackers=trackers if self._workers.is_chief else [],
            max_retries=self._max_retries,
            check_ranks=self._check_ranks,
            is_seed_given=self._seed is not None or (seed is not None and not is_stepwise),
            is_stepwise=is_stepwise,
        )
        with self._turn, ExitStack() as lock:
            self._check_idle()
            opened = self._open_run(config, run_dir, self._seed if seed is None else seed, lock)
            driver = RunDriver(self._workers, request, opened, self._storage)
            # Lock handed over: the driver holds the run's lock until the run ends.
            driver.start(lock.pop_all())
            self._driver = driver
            self._iterator = iterator = RunIterator(driver, ranks, self._forget_iterator)
        return iterator

    def _forget_iterator(self) -> None:
        self._iterator = None

    # ---- checkpoints ---------------------------------------------------------------------

    @property
    def run_dir(self) -> Path | None:
        """The run directory of the last run, or None before the first."""
        return None if self._driver is None else self._driver.run_dir

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the last run, or None."""
        return None if self._driver is None else self._driver.latest_checkpoint

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best checkpoint of the last run by its strategy, possibly the newest."""
        return None if self._driver is None else self._driver.best_checkpoint

    def get_last_checkpoint(self) -> Any:
        """Return the last state saved by the last run, or None."""
        latest = self.latest_checkpoint
        return None if latest is None else latest.load()

    def __str__(self) -> str:
        """Return a table of the workers, their nodes, devices and resources."""
        return table_of(self._settings, self._workers.num_workers, self._workers.facts)

    def __repr__(self) -> str:
        return title_of(self._settings, self._workers.num_workers, self._workers.facts)

    def _repr_html_(self) -> str:
        return html_of(self._settings, self._workers.num_workers, self._workers.facts)

    def replace_beside(self, index: int) -> "Trainer":
        """Return a similar trainer, with workers able to run beside this trainer's.

        Args:
            index: Its number among them, from 0, by which it gets GPUs of this machine. This
                trainer itself is number 0.
        """
        beside = self.replace(run_dir=None)
        beside._settings.environment = self._settings.own_devices(index)
        return beside

    def ray_bundles(self) -> list[dict[str, float]]:
        """Return the resource bundles for a Ray cluster to reserve, a bundle per worker.

        Raises:
            ResourcesError: The nodes can never run so many workers.
        """
        return self._settings.ray_bundles(self._settings.num_workers)

    @property
    def is_on_ray(self) -> bool:
        """Whether the workers are on a Ray cluster."""
        return self._settings.cluster == "ray"

    def check_can_wait(self) -> None:
        """Refuse a trainer without workers able to wait at reports, as a search needs.

        Raises:
            ValueError: The trainer has no workers of its own.
        """
        if self._settings.limits is None or self._settings.cluster == "joined":
            raise ValueError(
                "A function must run in workers of this trainer to wait at its reports, as trials"
                f" of a search do, but this is `{self!r}` Hint: Trainer(num_workers=1), without a"
                " launcher."
            )

    def num_concurrent(self) -> int:
        """Return how many similar trainers fit at once, including this trainer; at least 1."""
        return self._settings.num_concurrent()

    # ---- starting and ending -------------------------------------------------------------

    def start(
        self,
        train_cls: Callable[..., Any] | None = None,
        *args: Any,
        initialization_hook: Callable[[], Any] | None = None,
        callbacks: Sequence[TrainingCallback | core.Tracker | str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the workers, unless `run` is to do so.

        With a class this begins a run, which lasts until `shutdown`: in the class and in what
        `execute` calls, the functions of `paceline.train` belong to the run. New workers after
        a loss make new instances; `train.load_checkpoint()` gives them the state saved last.

        Args:
            train_cls: A class of which each worker makes an instance, for `execute`.
            args: Its arguments; `start(cls, (1, 2), {"name": 3})` is `start(cls, 1, 2,
                name=3)`.
            initialization_hook: Called by each worker first, whenever workers are started.
            callbacks: The followers of the run of the class; see `run`.
            kwargs: Its keyword arguments.

        Raises:
            TypeError: `callbacks` are given without a class, or are none.
            RuntimeError: The workers are running; as `WorkersLostError` if they were lost too
                often, as `NotEnoughWorkersError` if there were too few for too long.
            Exception: The error of the hook or of the class.
        """
        with self._turn:
            self._check_idle()
            if self._workers.is_alive and self._settings.limits is not None:
                raise RuntimeError(
                    "The workers must not be started twice, but they are running. Hint: shutdown()."
                )
            instance = instance_of_arguments(train_cls, args, kwargs)
            check_class_callbacks(instance, callbacks)
            self._end_class_run()
            self._settings.hook = initialization_hook
            self._instance, self._class_callbacks = instance, callbacks
            if instance is None:
                self._workers.form_with_retries(self._max_retries)
            else:
                self._class_run = self._begin_class_run(instance)

    def shutdown(self, force: bool = False) -> None:
        """Stop the workers in bounded time; an unfinished run is abandoned.

        Args:
            force: Whether to kill them at once.
        """
        if self._iterator is not None:
            self._iterator.close()
        try:
            self._end_class_run(is_forced=force)
        finally:
            self._workers.stop(force=force)
            self._workers.output.close()

    def _end_class_run(self, *, is_forced: bool = False) -> None:
        run, self._class_run = self._class_run, None
        if run is not None:
            run.finish(GivenUpError("The workers were ended by force.") if is_forced else None)

    def _begin_class_run(self, instance: Instance) -> ClassRun:
        own, trackers = split_callbacks(self._class_callbacks)
        own = with_run_lines(own)
        request = RunRequest(
            function=instance,
            callbacks=own if self._workers.is_chief else [],
            trackers=trackers if self._workers.is_chief else [],
            max_retries=self._max_retries,
            is_seed_given=self._seed is not None,
            check_ranks=self._check_ranks,
        )
        with ExitStack() as lock:
            opened = self._open_run(None, None, self._seed, lock)
            self._driver = run = ClassRun(self._workers, request, opened, self._storage)
            run.start(lock.pop_all())
        return run

    def _open_run(
        self,
        config: dict[str, Any] | None,
        directory: Path | None,
        seed: int | None,
        lock: ExitStack,
    ) -> OpenedRun:
        self._num_runs += 1
        is_named = directory is not None
        directory = directory or self._run_dir
        if directory is not None and self._num_runs > 1 and not is_named:
            directory = directory.with_name(f"{directory.name}-{self._num_runs}")
        number = next_run_number()
        with resuming_by(", or pass its directory as run_dir= of the trainer"):
            opened = self._workers.decide(
                lambda: open_run(
                    number=number,
                    directory=directory,
                    storage=self._storage,
                    seed=seed,
                    hparams=config,
                    has_own_directory=is_named,
                    lock=lock,
                )
            )
        opened = join_run(opened, lock, is_chief=self._workers.is_chief)
        check_given_storage(self._given_storage, opened.info)
        return opened

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.shutdown(force=error is not None)

    # ---- the class API -------------------------------------------------------------------

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function in every worker and return the results in rank order.

        In the function, the functions of `paceline.train` know the worker's place among the others.
        Reports and checkpoints belong to the run of a class, and are refused without one.

        Args:
            function: The function to call; it is given the worker's instance first, if `start` was
                given a class.
            args: Further arguments.
            kwargs: Keyword arguments.

        Raises:
            IncompleteCheckpointError: Ranks have saved unequally many checkpoints.
            Exception: The function's error on the rank that failed first.
        """
        return self._execute(function, args, kwargs, None)

    def execute_single(
        self, function: Callable[..., Any], *args: Any, rank: int = 0, **kwargs: Any
    ) -> Any:
        """Call a function in a single worker and return its result.

        Args:
            function: The function to call; see `execute`.
            args: Further arguments.
            rank: Which worker.
            kwargs: Keyword arguments.

        Raises:
            Exception: The function's error.
        """
        return self._execute(function, args, kwargs, [rank])[0]

    def to_worker_group(
        self, train_cls: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "ClassWorkers":
        """Start the workers with an instance of a class each, and return a handle of each.

        Args:
            train_cls: The class.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            RuntimeError: The workers are running.
        """
        self.start(train_cls, *args, **kwargs)
        return ClassWorkers(self)

    @property
    def num_workers(self) -> int:
        """The number of workers, or how many could be started at this moment."""
        return self._workers.num_workers

    def _execute(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int] | None,
    ) -> list[Any]:
        with self._turn:
            self._check_idle()
            if self._instance is not None:
                if self._class_run is None or self._class_run.is_finished:
                    self._class_run = self._begin_class_run(self._instance)
                return self._class_run.call(function, args, kwargs, ranks)
            if not self._workers.is_alive:
                self._workers.form_with_retries(self._max_retries)
            seed = self._drawn_seed if self._seed is None else self._seed
            if seed is None:
                # System generator: seeds of the user's script neither decide nor advance.
                seed = self._workers.decide(lambda: random.SystemRandom().randrange(1 << 32))
                self._drawn_seed = seed
            arguments = (function, args, kwargs, seed)
            call = self._workers.ask("call_function", arguments, func=function, ranks=ranks)
            return call.wait() or []

    def _check_idle(self) -> None:
        if self._iterator is not None:
            raise RuntimeError(
                "A run must be finished before the next one begins, but one is under way. Hint:"
                " get_results() or close() of its iterator, or shutdown()."
            )
        check_trainer_alone(is_joined=self._settings.cluster == "joined")
