"""The workers of a trainer: start, end, description, class API."""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, overload

from paceline import core
from paceline._base.notebook_tables import html_table
from paceline.core._arguments import GivenUpError
from paceline.core._open_run import OpenedRun, join_run, next_run_number, open_run
from paceline.core._run_directories import resuming_by
from paceline.core._run_storage import GivenStorage, check_given_storage
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.train._config import TrainWorkerSettings
from paceline.train._run_driver import RunDriver, RunRequest
from paceline.train._run_protocol import Instance
from paceline.train._run_reports import TrainingCallback
from paceline.train._run_workers import TrainWorkers
from paceline.train._stepwise_and_class_runs import ClassRun, RunIterator
from paceline.train._trainer_arguments import (
    check_class_callbacks,
    check_trainer_alone,
    instance_of_arguments,
    split_callbacks,
    with_run_lines,
)

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
    rows = _table_rows_of(settings, num_workers, facts)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *lines])


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


_Self = TypeVar("_Self", bound="TrainerWorkers")


class TrainerWorkers:
    """Base of `Trainer` with the handling of workers; `Trainer` adds running train functions."""

    _settings: TrainWorkerSettings
    _workers: TrainWorkers
    _max_retries: float
    # The active run, if there is one.
    _iterator: RunIterator | None
    # Calls of several threads wait for each other; an active run refuses them.
    _turn: threading.RLock
    _run_dir: Path | None
    _given_storage: GivenStorage
    _storage: CheckpointStorage | None
    _num_runs: int
    # The last run.
    _driver: RunDriver | None
    # The class that `start` was given, the followers of its run, and that run while it is active.
    _instance: Instance | None
    _class_callbacks: Sequence[TrainingCallback | core.Tracker | str] | None
    _class_run: ClassRun | None
    _seed: int | None
    _check_ranks: bool | tuple[str, ...]
    # Seed for functions executed outside of a run; equal on all ranks.
    _drawn_seed: int | None = None

    def __str__(self) -> str:
        """Return a table of the workers, their nodes, devices and resources."""
        return table_of(self._settings, self._workers.num_workers, self._workers.facts)

    def __repr__(self) -> str:
        return title_of(self._settings, self._workers.num_workers, self._workers.facts)

    def _repr_html_(self) -> str:
        return html_of(self._settings, self._workers.num_workers, self._workers.facts)

    def replace(self: _Self, **changes: Any) -> _Self:
        """Return a trainer of its own workers with the same arguments but some."""
        raise NotImplementedError

    def replace_beside(self: _Self, index: int) -> _Self:
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

    def __enter__(self: _Self) -> _Self:
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


class ClassWorkers(Sequence["WorkerHandle"]):
    """Handles of the workers, in rank order; see `Trainer.to_worker_group`.

    Args:
        trainer: The trainer that has started the workers.
    """

    def __init__(self, trainer: TrainerWorkers) -> None:
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

    def __init__(self, trainer: TrainerWorkers, rank: int) -> None:
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
