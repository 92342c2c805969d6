"""Driver of a training given as functions: its workers, their state, and passes."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from paceline import core
from paceline._base.arguments_and_errors import boolean, ranks_to_check
from paceline._base.gpus import num_visible_gpus
from paceline._training.engine.fsdp_and_tensor_parallel import ShardUnits
from paceline._training.workers.worker_failures import RestartPolicy, TrainingFailedError
from paceline._training.workers.worker_pools import WorkerPool
from paceline._training.workers.worker_settings import (
    WorkerResources,
    WorkerSettings,
    chosen_cluster,
)
from paceline._training.workers.workers import ElasticLimits, Workers
from paceline.core._attempt_journal import VALIDATION
from paceline.core._run_opening import local_directory
from paceline.core._run_storage import GivenStorage, given_storage
from paceline.core._trackers import as_trackers
from paceline.creators._creator_arguments import (
    ReplicaPassOrder,
    ReplicaSpec,
    check_creator_names,
    check_creators_alone,
    check_gpu,
    check_pass_arguments,
    chosen_num_workers,
    creator_precision,
    make_replica_spec,
)
from paceline.creators._pass_reports import PassRecord, PassResult, reduced_statistics, shown_pass
from paceline.creators._pass_states import (
    KeptState,
    MemoryFile,
    checked_pass_state,
    load_pass_state,
    read_parts,
    save_pass_state,
)
from paceline.creators._replica import execute, join_pass_state, make_replica, split_pass_state

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


# An optimizer loads the latter, which would take each worker more than a second.
_PRELOAD = ("paceline.creators._replica", "torch._dynamo")


class ReplicaWorkers(Workers[WorkerPool]):
    """The workers of a trainer, each with its replica; they stay until `stop`.

    At first there must be as many as were asked for. When some were lost, it continues with as many
    as can be started, from the state that this process keeps.

    Args:
        settings: How they are started.
        spec: The objects that each makes.

    Attributes:
        num_losses: How often workers were lost.

    Raises:
        ResourcesError: The workers want more than there is.
    """

    def __init__(self, settings: WorkerSettings, spec: ReplicaSpec) -> None:
        limits = ElasticLimits.of(settings.num_workers)
        hint = "free resources, or a smaller `num_workers`."
        super().__init__(limits, self._new_pool, hint=hint)
        self._settings = settings
        self._spec = spec
        self._is_local = settings.cluster == "local"
        self._kept: KeptState | None = None
        self._next: MemoryFile | None = None
        self._is_current = False
        self.num_losses = 0
        if self._is_local:
            settings.resources.check_cores(settings.num_workers, "num_cpus_per_worker")
            if spec.use_gpu is True:
                check_gpu(has_gpu=num_visible_gpus() > 0)
        # A Ray cluster refuses here workers that it can never run.
        self._made_pool = self._new_pool()

    @property
    def num_workers(self) -> int:
        """How many workers there are, or were at last."""
        return self._num_last or self._settings.num_workers

    def _set_up(self) -> None:
        self._wait_for(make_replica, self._spec)
        # Limits relaxed once the requested number has run: having fewer is a loss that may pass.
        self._elastic.limits = ElasticLimits(least=1, most=self._spec.num_shards)

    def _new_pool(self) -> WorkerPool:
        return self._settings.make_pool(
            self._settings.num_workers,
            timeout_s=self._spec.timeout_s,
            preload=_PRELOAD,
            strategy="SPREAD",
        )

    @property
    def is_state_kept(self) -> bool:
        """Whether the present state is in this process."""
        return self._is_current

    def start(self) -> None:
        """Start the first workers; no worker is left if the start fails."""
        try:
            self.form()
        except BaseException:
            self.stop(force=True)
            raise

    def state(self) -> dict[str, Any]:
        """Return the present state; a copy of its parts stays in this process."""
        kept = self._current()
        return join_pass_state(read_parts(kept.path, kept.parts))

    def keep(self, parts: list[Any] | None) -> None:
        """Replace the kept state by the present state.

        Args:
            parts: Its parts, the chief's None if that is in the file for the next state; or None
                if nobody has fetched them.
        """
        if self._kept is not None:
            self._kept.close()
        self._kept, self._is_current = None, parts is not None
        if parts is not None:
            self._kept = KeptState(parts, self._next)
            if parts[0] is None:
                self._next = None

    def load(self, state: dict[str, Any]) -> None:
        """Have the workers resume from a state."""
        parts = split_pass_state(state)
        self._load(KeptState(parts))
        self.keep(parts)

    def form_if_lost(self) -> None:
        """Start the workers unless they are alive, and restore the kept state.

        Raises:
            TrainingFailedError: Nothing was kept.
            Exception: They cannot be formed.
        """
        if self.is_alive:
            return
        if self._kept is None:
            raise TrainingFailedError(
                "The workers were lost, and there is no state to go on from, as none was kept."
                " Hint: load(path); with `max_retries` above 0 `train` keeps the state."
            )
        self._load(self._kept)

    def end_to_resize(self) -> None:
        """End the workers if more can run, or the nodes of some will be taken away.

        The state is kept, so the next call continues with others.
        """
        if self.is_alive and self.next_size() is not None:
            self._current()
            self.end_generation()

    def execute(self, method: str, *args: Any, changes_state: bool = False) -> list[Any]:
        """Call a method of the replica in every worker, and return the values in rank order.

        Args:
            method: Its name.
            args: Its arguments.
            changes_state: Whether the state is another one afterwards.

        Raises:
            WorkerFailedError: A worker was lost.
            Exception: The method's error on the rank that failed first.
        """
        self.form_if_lost()
        try:
            return self._execute(method, *args)
        finally:
            self._is_current = self._is_current and not changes_state

    def execute_with_retries(
        self,
        method: str,
        *args: Any,
        max_retries: int,
        keeps_state: bool = False,
        source: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method as `execute` does, again after each loss.

        Args:
            method: Its name.
            args: Its arguments.
            max_retries: How often workers may be lost.
            keeps_state: Whether to keep the present state before. The method is then also given
                the file for the next one, or None.
            source: The state to resume from after a loss; by default the kept one.

        Raises:
            WorkersLostError: They were lost too often.
            Exception: The method's error.
        """
        attempts = count()

        def attempt() -> list[Any]:
            if source is not None and next(attempts):
                self.keep(split_pass_state(source))
            self.form_if_lost()
            if keeps_state:
                self._current()
                # Kept state must stay whole until the method has stored the next one.
                return self._execute(method, *args, self._path_for_next())
            return self._execute(method, *args)

        policy = RestartPolicy(max_retries)

        def go_on(error: Exception) -> None:
            self.num_losses += 1
            policy.check(error, 0, "from the state that was kept")

        return self.call_until_done(attempt, go_on)

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time, and forget the state."""
        self.keep(None)
        if self._next is not None:
            self._next.close()
            self._next = None
        super().stop(force=force)

    def _current(self) -> KeptState:
        if not self._is_current:
            self.form_if_lost()
            self.keep(self._execute("state_part", self._path_for_next()))
        assert self._kept is not None
        return self._kept

    def _path_for_next(self) -> str | None:
        """Return the path of a file for the next state; None if out of the workers' reach."""
        if self._next is None and self._is_local and MemoryFile.is_possible():
            self._next = MemoryFile()
        return None if self._next is None else self._next.path

    def _load(self, state: KeptState) -> None:
        if not self.is_alive:
            self.form()
        self._execute("load_state", state.path, state.parts)
        self._is_current = True

    def _execute(self, method: str, *args: Any) -> list[Any]:
        return self._wait_for(execute, method, *args)

    def _wait_for(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            values = self.pool.submit(function, args).wait()
        except KeyboardInterrupt:
            # Nobody knows how far the workers are.
            super().stop(force=True)
            raise
        assert values is not None
        return values


P = ParamSpec("P")
T = TypeVar("T")
_Trainer = TypeVar("_Trainer", bound="PyTorchTrainer")


def one_at_a_time(
    method: Callable[Concatenate[_Trainer, P], T],
) -> Callable[Concatenate[_Trainer, P], T]:
    """Serialize calls by several threads, and refuse calls after `shutdown`."""

    @wraps(method)
    def call(self: _Trainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            self._check_active()
            return method(self, *args, **kwargs)

    return call


# How often a validation is tried again after a loss, if there is a state to resume from.
_NUM_VALIDATION_RETRIES = 3


class PyTorchTrainer:
    """Trainer for user functions, on several workers, pass by pass.

    The workers start here and stay warm until `shutdown`, the end of a `with` block, or the end of
    this process. All functions are called in them; of the script or notebook they may use all.
    Several threads may call a trainer; they wait for each other.

    Args:
        model_creator: Called with the config; returns a module, or several.
        data_creator: Called with the config; returns a data set, a DataLoader or an iterable of
            batches to train on, or a pair of them to train and to validate on. A DataLoader's batch
            size is for one worker.
        optimizer_creator: Called with the model and the config; returns an optimizer, or several.
            It gets a list of models if there are several.
        loss_creator: A loss class of torch, or a function of the config that returns a loss.
        scheduler_creator: Called with the optimizer, or the list of them, and the config; returns a
            learning-rate scheduler, or several.
        train_function: Trains for one pass in place of the default, and returns metrics. Its
            parameters get what their names say: config, model(s), train_iterator, criterion,
            optimizer(s), scheduler(s), info, scaler, device.
        validation_function: The same for a validation, with val_iterator; False for none.
        initialization_hook: Called by each worker before anything else; with a `HookWorker` if it
            has a parameter.
        config: The argument of the functions.
        dataloader_config: Options of loaders of data sets besides the batch size; two
            processes each by default.
        num_replicas: How many workers.
        use_gpu: Whether each worker has a GPU; "auto" for one if there is one.
        batch_size: The batch size for data sets, over all workers; by default 16, or one sample
            for each of more workers.
        backend: "gloo", "nccl", or "auto" for the one that suits the device.
        use_fp16: Whether forward passes run in float16 with scaled losses; "bf16" for bfloat16.
        apex_args: Options of NVIDIA's Apex, as far as they have a counterpart.
        scheduler_step_freq: When the default train function steps the scheduler: after each
            "batch", after each "epoch", or "manual" for `update_scheduler`.
        cluster: "local" for this machine, "ray" for a Ray cluster, "auto" for the one that this
            process is connected to, else this machine.
        num_workers: Another name of `num_replicas`.
        data_parallel: "flat" for a whole model on each worker, or "fsdp" to divide it among them.
        shard_units: With "fsdp", which modules are gathered as a whole: a class or a tuple of
            them, a least number of parameters, or a function of a module. By default the members
            of the outermost sequences.
        shard_precision: With "fsdp", the types in which parameters are gathered and gradients are
            summed, as torch's `MixedPrecisionPolicy`.
        num_cpus_per_worker: The cores of each worker; on this machine they are shared by default.
        timeout_s: How long workers wait for each other, in seconds.
        heartbeat_timeout_s: How long a worker may give no sign of life until it counts as lost,
            in seconds.
        add_dist_sampler: Whether the workers share the data; else each has all of its own.
        serialize_data_creation: Whether the workers of a node call `data_creator` in turn.
        seed: The seed of data order, initial weights and everything else.
        stop_on_nan: Whether the default train function stops, at the end of a pass, if a loss was
            NaN or infinite; with `use_fp16`, which leaves such steps out, if ten in a row were.
        check_ranks: Whether workers compare their models, and the settings of their optimizers, at
            the start and with each state that is kept or saved, to stop if they have drifted apart;
            or the names of tensors that each worker has for itself, see docs/distributed.md.
        verify_steps: Compute the first batch and each batch with a multiple of this number twice in
            the default train function, and compare the results of each worker bit by bit.
        on_mismatch: Whether to "stop" at a difference, or to "warn".
        run_dir: Where passes are recorded, as any run is; by default the first pass makes a
            directory below ``./paceline_runs``.
        checkpoint_storage: Where `save()` without a path stores checkpoints: a directory, or a URL
            such as ``s3://bucket/prefix``.
        trackers: Further displays of the run, see `core.init`.
        use_tqdm: Whether to show the progress of each `train`, on a terminal or in a notebook.
        other: Names of other releases, which are refused with the name of their replacement.

    Raises:
        DeprecationWarning: An argument belongs to another release of the original.
        ImportError: Ray is wanted, but not installed.
        NotSendableError: A function cannot be pickled; the message names the part.
        ResourcesError: The workers want more than there is.
        RuntimeError: A worker cannot be started.
        TypeError: A value has another type.
        ValueError: A value is unknown or out of range, or a function is missing.
        Exception: The error of a creator.
    """

    def __init__(
        self,
        model_creator: Callable[..., Any],
        data_creator: Callable[..., Any],
        optimizer_creator: Callable[..., Any],
        loss_creator: Callable[..., Any] | None = None,
        scheduler_creator: Callable[..., Any] | None = None,
        train_function: Callable[..., Any] | None = None,
        validation_function: Callable[..., Any] | bool | None = None,
        initialization_hook: Callable[..., Any] | None = None,
        config: dict[str, Any] | None = None,
        dataloader_config: Mapping[str, Any] | None = None,
        num_replicas: int = 1,
        use_gpu: bool | str = False,
        batch_size: int | None = None,
        backend: str = "auto",
        use_fp16: bool | str = False,
        apex_args: dict[str, Any] | None = None,
        scheduler_step_freq: str | None = "batch",
        cluster: str = "auto",
        *,
        num_workers: int | None = None,
        data_parallel: str = "flat",
        shard_units: ShardUnits = None,
        shard_precision: "MixedPrecisionPolicy | None" = None,
        num_cpus_per_worker: int | None = None,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 30.0,
        add_dist_sampler: bool = True,
        serialize_data_creation: bool = True,
        seed: int = 0,
        stop_on_nan: bool = True,
        check_ranks: bool | str | Sequence[str] = True,
        verify_steps: int | None = None,
        on_mismatch: str = "stop",
        run_dir: str | os.PathLike[str] | None = None,
        checkpoint_storage: GivenStorage = None,
        trackers: Sequence[core.Tracker | str] = (),
        use_tqdm: bool = False,
        **other: Any,
    ) -> None:
        check_creator_names(other)
        num_workers = chosen_num_workers(num_replicas, num_workers)
        self.config = config or {}
        self._storage = given_storage(checkpoint_storage)
        self._can_validate = validation_function is not False
        spec = make_replica_spec(
            creators={
                "model_creator": model_creator,
                "data_creator": data_creator,
                "optimizer_creator": optimizer_creator,
                "loss_creator": loss_creator,
                "scheduler_creator": scheduler_creator,
            },
            functions={
                "train_function": train_function,
                "validation_function": validation_function,
                "initialization_hook": initialization_hook,
            },
            config=config,
            loader_config=dataloader_config,
            num_workers=num_workers,
            batch_size=batch_size,
            precision=creator_precision(use_fp16, apex_args),
            settings={
                "scheduler_step_freq": scheduler_step_freq,
                "use_gpu": use_gpu,
                "backend": backend,
                "timeout_s": timeout_s,
                "deals_out": add_dist_sampler,
                "is_serial": serialize_data_creation,
                "seed": seed,
                "stop_on_nan": boolean("stop_on_nan", stop_on_nan),
                "check_ranks": ranks_to_check("check_ranks", check_ranks),
                "verify_steps": verify_steps,
                "on_mismatch": on_mismatch,
                "data_parallel": data_parallel,
                "shard_units": shard_units,
                "shard_precision": shard_precision,
            },
        )
        cluster = chosen_cluster(cluster)
        check_creators_alone()
        # Workers of this machine may share a GPU.
        has_gpus = cluster == "ray" and use_gpu != "auto"
        settings = WorkerSettings(
            num_workers=num_workers,
            cluster=cluster,
            resources=WorkerResources(
                num_cpus_per_worker, float(bool(use_gpu)) if has_gpus else None
            ),
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        directory = local_directory(run_dir, "run_dir")
        self._record = PassRecord(
            directory, self.config, seed, as_trackers(trackers), shows_passes=not use_tqdm
        )
        self._workers = ReplicaWorkers(settings, spec)
        self._workers.start()
        self._shows_progress = use_tqdm
        self._is_active = True
        self._turn = threading.RLock()

    @classmethod
    def as_trainable(
        cls,
        *args: Any,
        override_tune_step: Callable[..., dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> type[Any]:
        """Return a trainable of Ray Tune; requires ``paceline[tune]``.

        A trial makes a trainer with these arguments. Its hyperparameters are added to `config`.

        Args:
            args: Positional arguments of the trainer.
            override_tune_step: Called with the trainer and `{"iteration": ...}` in place of one
                pass of training and one of validation; returns the result of the step.
            kwargs: Arguments of the trainer by their names.

        Raises:
            ImportError: Ray Tune is not installed.
            TypeError: A trainer has no such argument, or lacks one.
        """
        bound = signature(cls).bind(*args, **kwargs).arguments
        given = {**bound.pop("other", {}), **bound}
        # Late import: it loads Ray.
        from paceline.creators._ray_tune import as_trainable

        return as_trainable(given, override_tune_step)

    # ---- passes --------------------------------------------------------------------------

    @one_at_a_time
    def train(
        self,
        num_steps: int | None = None,
        max_retries: int = 3,
        checkpoint: str | os.PathLike[str] | None = None,
        reduce_results: bool = True,
        profile: bool = False,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Train for a pass over the data, or for some batches, from the present position.

        Args:
            num_steps: How many batches, over the end of an epoch too; by default the rest of the
                present epoch, or a whole one.
            max_retries: How often workers may be lost. They are started again, as many as can run,
                and the whole pass is run again from the state before it.
            checkpoint: "auto" and None for the state before the pass, which is kept in this
                process. A path or URL for a state that `save` wrote there, to resume from
                instead.
            reduce_results: Whether to return means over all workers, weighted by their samples.
            profile: Whether to time the parts of each step of the default function.
            info: Further facts for a train function with a parameter `info`.

        Returns:
            Statistics, by default "epoch" from 1, "batch_count", "num_samples" of all workers,
            "train_loss" and "last_train_loss"; or a list of each worker's.

        Raises:
            TrainingFailedError: Workers were lost more often than `max_retries` allows.
            WorkerFailedError: A worker left by `sys.exit(0)`.
            NonFiniteError: A loss of the default function was not finite, see `stop_on_nan`.
            RanksDifferError: Workers have drifted apart, see `check_ranks`.
            StepsDifferError: A batch computed twice gave two results, see `verify_steps`.
            OSError: `run_dir` cannot be written.
            RuntimeError: The trainer was shut down, or another process records in `run_dir`.
            TypeError: A value has another type.
            ValueError: A value is out of range, or there are several models and no function.
            Exception: The user's function's error on the rank that failed first.
        """
        check_pass_arguments(num_steps, max_retries, info)
        keeps = max_retries > 0
        source = None
        if checkpoint is not None and checkpoint != "auto":
            source = load_pass_state(checkpoint)
        is_shown, num_losses = self._shows_progress, self._workers.num_losses
        with self._record.begun(self.num_workers), shown_pass(is_shown=is_shown) as path:
            order = ReplicaPassOrder(num_steps, profile, dict(info or {}), keeps, path)
            if keeps:
                self._workers.end_to_resize()
            results = self._workers.execute_with_retries(
                "train", order, max_retries=max_retries, keeps_state=keeps, source=source
            )
        for alert in (alert for result in results for alert in result.alerts):
            self._record.add_alert(*alert)
        self._workers.keep([result.state for result in results] if keeps else None)
        statistics = reduced_statistics(results)
        chief = results[0]
        self._record.add_training(
            chief.num_batches,
            statistics,
            chief.seconds,
            is_repeated=self._workers.num_losses > num_losses,
        )
        return statistics if reduce_results else _of_each(results)

    @one_at_a_time
    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Validate on the validation data, or on their first batches; each sample counts once.

        Args:
            num_steps: How many batches; all by default.
            profile: See `train`.
            reduce_results: See `train`.
            info: See `train`.

        Returns:
            Statistics, by default "batch_count", "num_samples", "val_loss", "last_val_loss", and
            with classes "val_accuracy" and "last_val_accuracy"; nothing if `validation_function`
            is False.

        Raises:
            TrainingFailedError: Workers were lost too often, or their state was not kept.
            WorkerFailedError: A worker left by `sys.exit(0)`.
            OSError: `run_dir` cannot be written.
            RuntimeError: The trainer was shut down, or another process records in `run_dir`.
            ValueError: There are no validation data, or several models and no function.
            Exception: The user's function's error on the rank that failed first.
        """
        check_pass_arguments(num_steps, info=info)
        if not self._can_validate:
            return {}
        order = ReplicaPassOrder(num_steps, profile, dict(info or {}))
        num_retries = _NUM_VALIDATION_RETRIES if self._workers.is_state_kept else 0
        with self._record.begun(self.num_workers, VALIDATION):
            results = self._workers.execute_with_retries("validate", order, max_retries=num_retries)
        statistics = reduced_statistics(results)
        self._record.add_validation(statistics)
        return statistics if reduce_results else _of_each(results)

    @one_at_a_time
    def update_scheduler(self, metric: float) -> None:
        """Step all schedulers with a metric, as needed by ReduceLROnPlateau.

        Args:
            metric: The metric they judge by.

        Raises:
            RuntimeError: The trainer was shut down.
        """
        self._workers.execute("update_schedulers", metric, changes_state=True)

    # ---- state ---------------------------------------------------------------------------

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: models, optimizers, schedulers, place in the data, generators.

        Tensors are on the CPU. Models are as `model_creator` made them, without a wrapper.

        Raises:
            RuntimeError: The trainer was shut down.
        """
        return dict(self._workers.state())

    @one_at_a_time
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`, here or in another trainer.

        Args:
            state_dict: The state.

        Raises:
            RuntimeError: The trainer was shut down, or a model is another one.
            TypeError: It is no dictionary.
            ValueError: It is no state of a trainer, or holds other numbers of models.
        """
        self._workers.load(dict(checked_pass_state(state_dict)))

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the state to a file on this machine, or to a store, whole or not at all.

        The workers need not see the file. `torch.load(path, weights_only=True)` reads it.

        Args:
            path: The file, in place of what is there. Or the URL of a new checkpoint, such as
                ``s3://bucket/prefix/name``. By default a new one in `checkpoint_storage`.

        Returns:
            The path or URL.

        Raises:
            CheckpointWriteError: The store does not take it.
            FileExistsError: There is a checkpoint at the URL.
            OSError: It cannot be written.
            RuntimeError: The trainer was shut down.
            StateFormatError: The state of a model, optimizer or scheduler has more than tensors
                and plain values.
            ValueError: The path is empty, or neither it nor `checkpoint_storage` is given.
        """
        place = self._storage if path is None else path
        if not place:
            raise ValueError(
                "`path` must be a file or a URL, unless the trainer has a `checkpoint_storage`, but"
                f" got {path!r}. Hint: save('state.pt'), or"
                " PyTorchTrainer(checkpoint_storage='s3://bucket/prefix')."
            )
        with self._record.storing(str(place)):
            return save_pass_state(self.state_dict, place)

    @one_at_a_time
    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a state written by `save`, here or in another trainer.

        Args:
            path: The file, or the URL of the checkpoint.

        Raises:
            CheckpointCorruptError: It cannot be read.
            CheckpointNotFoundError: There is no such checkpoint.
            OSError: It is not there.
            RuntimeError: The trainer was shut down, or a model is another one.
            ValueError: It is no state of a trainer, or holds other numbers of models.
        """
        self._workers.load(load_pass_state(path))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restore a state; alias of `load`."""
        self.load(path)

    @one_at_a_time
    def get_model(self) -> Any:
        """Return the trained model, or a list of several, on the CPU.

        Raises:
            NotSendableError: A model cannot be pickled.
            RuntimeError: The trainer was shut down.
        """
        models = self._workers.execute("whole_models")[0]
        return models[0] if len(models) == 1 else models

    # ---- workers -------------------------------------------------------------------------

    @one_at_a_time
    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call a function without arguments in every worker; return the results in rank order.

        Args:
            fn: The function.

        Raises:
            RuntimeError: The trainer was shut down.
            Exception: The function's error on the rank that failed first.
        """
        # State may change: the called function may do anything.
        return self._workers.execute("call", fn, changes_state=True)

    @property
    def num_workers(self) -> int:
        """How many workers there are at the moment; fewer than asked for after a loss."""
        return self._workers.num_workers

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None before the first pass, and where none is recorded."""
        return self._record.run_dir

    @property
    def media(self) -> core.MediaReports | None:
        """Reports of images, tables and other media by this process; None where `run_dir` is."""
        return self._record.media

    def shutdown(self, force: bool = False) -> None:
        """End the workers, in bounded time; unsaved state is lost.

        Args:
            force: Whether to kill them at once.
        """
        self._end(None, force=force)

    def __enter__(self: _Trainer) -> _Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error, force=error is not None)

    def _end(self, error: BaseException | None, *, force: bool) -> None:
        self._is_active = False
        try:
            self._workers.stop(force=force)
        finally:
            self._record.close(error)

    def _check_active(self) -> None:
        if not self._is_active:
            raise RuntimeError(
                "This PyTorchTrainer is not active, as it was shut down. Hint: make a new one, and"
                " load() what this one has saved."
            )


def _of_each(results: list[PassResult]) -> list[dict[str, Any]]:
    return [result.statistics for result in results]
