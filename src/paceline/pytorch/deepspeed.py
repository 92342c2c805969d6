"""Training by DeepSpeed engines, the owners of models, optimizers and gradient sums."""

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline import core
from paceline._training.engine.checkpoints.capture_and_restore import (
    ModelsAndOptimizers,
    check_numbers,
    load_buffers,
)
from paceline._training.engine.checkpoints.checkpoint_saver import Destination
from paceline._training.engine.devices import join_ranks
from paceline._training.engine.gradient_reduction import DataParallel, FlatReduction
from paceline._training.engine.metric_reducers import ReducerSet
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.precision import Precision
from paceline._training.engine.rank_differences import RankCheck
from paceline._training.engine.schedules import Schedule, StopReason
from paceline._training.engine.steps_by_user_code import WatchedUserCalls
from paceline.core._distributed_context import DistributedContext
from paceline.data._sharded_loader import ShardedData
from paceline.data._torch_loaders import release_device_memory
from paceline.pytorch._init_and_launch import Beginning, begin_trial
from paceline.pytorch._trainer import Trainer as PyTorchTrainer
from paceline.pytorch._training_loop import TrainingLoop
from paceline.pytorch._training_state import TrainingState
from paceline.pytorch._trial_and_context import PyTorchTrial, PyTorchTrialContext
from paceline.pytorch._trial_training import MetricSums, TrialTraining, Validator, batches_by_rank
from paceline.storage._checkpoint_errors import CheckpointMismatchError


class DeepSpeedTrial(PyTorchTrial):
    """Base class of DeepSpeed trials: engine, data, and training on a micro-batch.

    Implement `__init__` (`deepspeed.initialize`, then `context.wrap_model_engine`), `train_batch`,
    the two loaders, and one of `evaluate_batch` and `evaluate_full_dataset`. The batch size of the
    loaders is `context.get_train_micro_batch_size_per_gpu()`.
    """

    @abstractmethod
    def train_batch(self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int) -> Any:
        """Train on a micro-batch: forward, `engine.backward`, `engine.step`.

        It is called `gradient_accumulation_steps` times for each batch.

        Args:
            dataloader_iter: Gives one micro-batch, on this rank's device.
            epoch_idx: The epoch, from 0.
            batch_idx: The batch, which is one optimizer step, counted from the start of training,
                from 0.

        Returns:
            A dictionary of metrics, or a tensor, which becomes {"loss": tensor}.
        """

    def evaluate_batch(self, dataloader_iter: Iterator[Any], batch_idx: int = 0) -> dict[str, Any]:
        """Return the metrics of a validation batch, taken from the iterator."""
        raise NotImplementedError


_TAG = "state"


class DeepSpeedStepper(Stepper):
    """The DeepSpeed engines of a training.

    A global batch has as many shards as an optimizer step has micro-batches on all ranks, so that
    each batch ends with an optimizer step of each engine.

    Args:
        distributed: Where the ranks meet.
        device: The device of this rank.
    """

    def __init__(self, distributed: DistributedContext, device: torch.device) -> None:
        # The engines divide what all ranks would have.
        super().__init__(distributed, device, rank_check=RankCheck(False))
        self.rank_check.compares_data = True
        # FSDP makes the profiler expect that ranks wait for each other anywhere in `train_batch`.
        self.data_parallel = DataParallel.FSDP
        self.engines: list[Any] = []
        self.calls = _UnwatchedCalls(self, distributed.size)
        self._words = FlatReduction([], device)

    def use_precision(self, precision: Precision) -> None:
        """Leave the number format to the engines.

        Raises:
            ValueError: It is another one than fp32.
        """
        if precision is not Precision.FP32:
            raise ValueError(
                "The number format of DeepSpeed's engines must be set in their config, but"
                f' `precision` is {precision.value!r}. Hint: its section "bf16" or "fp16".'
            )
        super().use_precision(precision)

    def add_engine(self, engine: Any) -> None:
        """Have an engine checkpointed."""
        self.engines.append(engine)
        self.models.append(engine)

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches each rank trains for an optimizer step."""
        return int(self.engines[0].gradient_accumulation_steps())

    @property
    def divides_parameters(self) -> bool:
        """Whether all ranks must run each forward pass together, as with ZeRO stage 3."""
        return any(engine.zero_optimization_partition_weights() for engine in self.engines)

    def begin_shard(self) -> None:
        """Check for a shard on every rank.

        Raises:
            RuntimeError: One has none.
        """
        if not self.accumulation.is_even:
            raise RuntimeError(_incomplete("a rank has none"))

    def step_without_data(self) -> None:
        """Refuse a batch without samples on this rank.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(_incomplete("this rank has none"))

    def finish_batch(self) -> bool:
        """Send this rank's signals to the others, after the engines' steps.

        Raises:
            RuntimeError: An engine is in the middle of an optimizer step.
        """
        for engine in self.engines:
            num_open = engine.micro_steps % engine.gradient_accumulation_steps()
            if num_open and engine.managed_gradient_accumulation():
                raise RuntimeError(_incomplete(f"{num_open} were stepped"))
        self.accumulation.num_steps += 1
        if self._distributed.size > 1:
            self.sum_over_ranks(self._words)
            self._has_told = False
        return True

    # ---- checkpoints ---------------------------------------------------------------------

    def store(self, destination: Destination) -> Destination:
        """Write the engines' states to a checkpoint now; return the destination for the rest.

        All ranks call it, as the engines wait for each other.

        Args:
            destination: Where this rank's files of the checkpoint go.
        """
        with ExitStack() as stack:
            path, uuid = stack.enter_context(destination)
            for index, engine in enumerate(self.engines):
                directory = path / f"deepspeed_{index}"
                # DeepSpeed makes it on rank 0 only, where all ranks would share it.
                directory.mkdir()
                engine.save_checkpoint(str(directory), tag=_TAG)
                if not any(directory.iterdir()):
                    directory.rmdir()
            return _entered((path, uuid), stack.pop_all())

    def load(self, path: Path, training: Mapping[str, Any]) -> None:
        """Restore the engines' states from a checkpoint.

        Args:
            path: The checkpoint's directory.
            training: The part "training" of the checkpoint.

        Raises:
            CheckpointMismatchError: It was stored by another number of ranks, or by other engines.
        """
        stored = training.get("deepspeed")
        if stored is None:
            raise CheckpointMismatchError(
                "The checkpoint must hold DeepSpeed's engines, but a trial without DeepSpeed stored"
                " it. Hint: go on with the code that stored it."
            )
        size = self._distributed.size
        if training["world_size"] != size:
            raise CheckpointMismatchError(
                "DeepSpeed's checkpoints can only be loaded by the number of ranks that stored"
                f" them, which is {training['world_size']}, but here are {size}. Hint: start"
                f" {training['world_size']} ranks, or begin a new run with the weights that"
                " `zero_to_fp32.py` of the checkpoint puts together."
            )
        check_numbers("engine", stored["engines"], self.engines)
        for index, (then, now) in enumerate(zip(stored["engines"], self._facts(), strict=True)):
            for name, value in then.items():
                if now.get(name) != value:
                    raise CheckpointMismatchError(
                        f"`{name}` of engine {index} must be {value!r}, as in the checkpoint, but"
                        f" got {now.get(name)!r}. Hint: go on with the config of DeepSpeed that"
                        " stored it."
                    )
        for index, engine in enumerate(self.engines):
            loaded, _ = engine.load_checkpoint(str(path / f"deepspeed_{index}"), tag=_TAG)
            if loaded is None:
                raise CheckpointMismatchError(
                    f"DeepSpeed could not load engine {index} from {str(path)!r}; its output says"
                    " why."
                )

    def _facts(self) -> list[dict[str, Any]]:
        return [
            {
                "zero_stage": int(engine.zero_optimization_stage()),
                "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
            }
            for engine in self.engines
        ]

    def facts(self) -> dict[str, Any]:
        """Return the facts of the engines to store in a checkpoint."""
        return {"engines": self._facts()}


class DeepSpeedState(TrainingState):
    """State of a DeepSpeed training, without the parts stored by the engines."""

    _stepper: DeepSpeedStepper

    def restore_own(
        self, parts: Mapping[str, Any], loop: TrainingLoop, *, is_same_size: bool
    ) -> None:
        """Restore this rank's own state, with buffers like running means."""
        for engine, buffers in zip(self._stepper.engines, parts["rank"]["buffers"], strict=True):
            load_buffers(engine.module, buffers)
        super().restore_own(parts, loop, is_same_size=is_same_size)

    def _objects(self) -> ModelsAndOptimizers:
        return replace(super()._objects(), models=(), optimizers=(), parameters=(), bases=())

    def _shared(
        self, objects: ModelsAndOptimizers, loop: TrainingLoop, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        return super()._shared(objects, loop, {**facts, "deepspeed": self._stepper.facts()})

    def _own(self, objects: ModelsAndOptimizers, loop: TrainingLoop) -> dict[str, Any]:
        # DeepSpeed keeps the states of one rank only, unless parameters are divided.
        buffers = [dict(engine.module.named_buffers()) for engine in self._stepper.engines]
        return {**super()._own(objects, loop), "buffers": buffers}


class _UnwatchedCalls(WatchedUserCalls):
    """Watch of user calls, turned off: engines run backward passes and optimizer steps."""

    def begin(self, num_shards: int) -> None:
        """Watch nothing."""

    def enter_batch(self) -> None:
        """Watch nothing."""


@contextmanager
def _entered(values: tuple[Path, str], stack: ExitStack) -> Iterator[tuple[Path, str]]:
    with stack:
        yield values


def _incomplete(what: str) -> str:
    return (
        "With DeepSpeed each global batch must have `gradient_accumulation_steps` micro-batches on"
        f" each rank, and `train_batch` must step each engine once for each, but {what}. Hint:"
        " engine.backward(loss), then engine.step(), in every call; and data without a length must"
        " give every rank whole global batches."
    )


def import_deepspeed() -> Any:
    """Return the package of DeepSpeed.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        # A module that DeepSpeed itself lacks is another problem, with its own error.
        if error.name != "deepspeed":
            raise
        raise ImportError(
            "`pytorch.deepspeed` needs the package `deepspeed`, which is not installed. Hint:"
            " DS_BUILD_OPS=0 pip install deepspeed; see docs/backends.md."
        ) from None
    return deepspeed


def join_deepspeed(
    deepspeed: Any, distributed: DistributedContext | None, device: torch.device | None
) -> None:
    """Pass the process group to DeepSpeed; a single process gets a new group."""
    if not dist.is_initialized():
        is_on_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
        backend = "nccl" if is_on_gpu else "gloo"
        # Store in memory: a group of one process needs no port.
        store: Any = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    local_rank = 0 if distributed is None else distributed.local_rank
    # Whatever the launcher was, DeepSpeed reads it here.
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


class DeepSpeedTrialContext(PyTorchTrialContext):
    """Wrap DeepSpeed's engines; made by `pytorch.deepspeed.init()`.

    Models, optimizers, schedulers, precision and accumulation are the engines' own: they come from
    the config of DeepSpeed.

    Args:
        core_context: The core context of this process.
        hparams: The hyperparameters.
        seed: The seed of the trial.
        device: The device of this process; a GPU of its own by default, else the CPU.
        given_seed: The seed that the user gave, if any.
    """

    stepper: DeepSpeedStepper

    def __init__(
        self,
        core_context: core.Context,
        hparams: Mapping[str, Any] | None,
        seed: int,
        *,
        device: torch.device | None = None,
        given_seed: int | None = None,
    ) -> None:
        super().__init__(core_context, hparams, seed, device=device, given_seed=given_seed)
        self.stepper = DeepSpeedStepper(self.distributed, self.device)
        self.reducers = ReducerSet(self.stepper)

    @property
    def engines(self) -> list[Any]:
        """The wrapped engines."""
        return self.stepper.engines

    def wrap_model_engine(self, engine: Any) -> Any:
        """Register an engine for training and checkpoints; return the same object.

        Args:
            engine: The first result of `deepspeed.initialize`.

        Raises:
            TypeError: It is no engine of DeepSpeed, or one for pipelines.
            ValueError: It takes other numbers of micro-batches than an engine before, or its
                parameters are not the same on all ranks, as with tensor parallelism.
        """
        from deepspeed import DeepSpeedEngine, PipelineEngine

        if not isinstance(engine, DeepSpeedEngine) or isinstance(engine, PipelineEngine):
            raise TypeError(
                "`engine` must be a DeepSpeedEngine, and not one of a pipeline, but got a"
                f" {type(engine).__name__}. Hint: engine, *_ = deepspeed.initialize(...)."
            )
        if engine.dp_world_size != self.distributed.size:
            raise ValueError(
                "The engine must train the same model on all ranks, but its data-parallel group has"
                f" {engine.dp_world_size} of {self.distributed.size}. Hint: leave out tensor and"
                " pipeline parallelism."
            )
        num_before = self.stepper.num_micro_batches if self.engines else None
        num = int(engine.gradient_accumulation_steps())
        if num_before not in (None, num):
            raise ValueError(
                "All engines must have the same `gradient_accumulation_steps`, but one has"
                f" {num_before} and another {num}."
            )
        self.stepper.add_engine(engine)
        self.num_shards = self.distributed.size * num
        return engine

    # ---- facts ---------------------------------------------------------------------------

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch: the batch size of the data loaders.

        Raises:
            RuntimeError: No engine is wrapped yet.
        """
        return int(self._first_engine().train_micro_batch_size_per_gpu())

    def get_num_micro_batches_per_slot(self) -> int:
        """Return how many micro-batches a rank trains for an optimizer step.

        Raises:
            RuntimeError: No engine is wrapped yet.
        """
        self._first_engine()
        return self.stepper.num_micro_batches

    def get_global_batch_size(self) -> int:
        """Return the samples of an optimizer step on all ranks, from the config of DeepSpeed.

        Raises:
            RuntimeError: No engine is wrapped yet.
        """
        return int(self._first_engine().train_batch_size())

    def _first_engine(self) -> Any:
        if not self.engines:
            raise RuntimeError(
                "An engine must be wrapped first, but none is. Hint: self.engine ="
                " context.wrap_model_engine(engine)."
            )
        return self.engines[0]

    # ---- work of the engines -------------------------------------------------------------

    def wrap_model(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine has the model."""
        raise _refusal("wrap_model", "context.wrap_model_engine(engine)")

    def wrap_optimizer(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine has the optimizer."""
        raise _refusal("wrap_optimizer", "deepspeed.initialize(optimizer=...)")

    def wrap_lr_scheduler(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine has the scheduler."""
        raise _refusal("wrap_lr_scheduler", "deepspeed.initialize(lr_scheduler=...)")

    def wrap_scaler(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine scales by itself."""
        raise _refusal("wrap_scaler", 'the section "fp16" of the config of DeepSpeed')

    def backward(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine runs its backward pass."""
        raise _refusal("backward", "engine.backward(loss)")

    def step_optimizer(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine steps its optimizer."""
        raise _refusal("step_optimizer", "engine.step()")


def _refusal(name: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"`context.{name}` is not for trials with DeepSpeed, whose engines do that themselves."
        f" Hint: {instead}."
    )


@contextmanager
def init(
    hparams: Mapping[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    checkpoint_storage: Any = None,
    tensorboard_mode: core.TensorboardMode = core.TensorboardMode.OFF,
    device: torch.device | str | None = None,
    trackers: Sequence[core.Tracker | str] = (),
) -> Iterator[DeepSpeedTrialContext]:
    """Begin an attempt and yield the context for making a `DeepSpeedTrial`.

    With several ranks (`python -m paceline.launch.deepspeed`, DeepSpeed's own launcher, torchrun)
    the process group is made here if it is not there yet, and passed to DeepSpeed. A process
    that works alone gets a group of one, which stays until the process ends.

    Args:
        hparams: The hyperparameters; the experiment's on a cluster.
        distributed: The place among several ranks; found from the environment by default.
        seed: The seed, see `pytorch.init`.
        name: The run's name, see `core.init`.
        resume: The run to resume, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
        tensorboard_mode: Who writes TensorBoard files, see `core.init`.
        device: Where this process trains: a GPU of its own by default, else the CPU.
        trackers: Further displays of the run, see `core.init`.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    deepspeed = import_deepspeed()
    own_device = None if device is None else torch.device(device)
    release_device_memory()
    distributed = join_ranks(distributed, own_device)
    join_deepspeed(deepspeed, distributed, own_device)

    def make_context(beginning: Beginning) -> DeepSpeedTrialContext:
        return DeepSpeedTrialContext(
            beginning.core_context,
            beginning.hparams,
            beginning.core_context.seed,
            device=own_device,
            given_seed=beginning.given_seed,
        )

    with begin_trial(
        make_context,
        distributed,
        hparams=hparams,
        seed=seed,
        name=name,
        resume=resume,
        checkpoint_storage=checkpoint_storage,
        tensorboard_mode=tensorboard_mode,
        trackers=trackers,
    ) as context:
        yield context


class DeepSpeedTraining(TrialTraining):
    """A trial's data, loop, callbacks and checkpoints; the engines store their own states.

    Args:
        trial: The trial.
        context: The context that the trial was made with.
        validator: How the trial validates.
    """

    state_type = DeepSpeedState
    # An engine steps after a fixed number of micro-batches.
    needs_whole_batches = True

    def __init__(
        self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, validator: Validator
    ) -> None:
        super().__init__(trial, context, validator)
        train_batch = trial.train_batch
        self._train_batch = lambda batch, epoch_idx, batch_idx: train_batch(
            _only(batch, "train_batch"), epoch_idx, batch_idx
        )
        self._stepper = context.stepper

    def fit(self, schedule: Schedule, *, is_test: bool, is_validated_first: bool) -> StopReason:
        """Train to a length; see `TrainingFit.fit`.

        Raises:
            ValueError: An optimizer step is to have several batches.
        """
        frequency = self._context.accumulation.frequency
        if frequency > 1:
            raise ValueError(
                f"`aggregation_frequency` must be 1 with DeepSpeed, but got {frequency}. Hint: set"
                " `gradient_accumulation_steps` in the config of DeepSpeed."
            )
        return super().fit(schedule, is_test=is_test, is_validated_first=is_validated_first)

    def keep_in_memory(self, every: float | None) -> None:
        """Refuse states in memory.

        Raises:
            ValueError: They are wanted.
        """
        if every is not None:
            raise ValueError(
                "`memory_checkpoints` must be off with DeepSpeed, whose engines write their own"
                " files. Hint: set `checkpoint_period`."
            )

    def _read_files(self, path: Path) -> dict[str, Any]:
        parts = super()._read_files(path)
        self._stepper.load(path, parts["training"])
        return parts

    def _begin_part(self) -> Destination:
        return self._stepper.store(super()._begin_part())


class DeepSpeedValidator(Validator):
    """Run a trial's validation, with equally many forward passes on all ranks if need be.

    Raises:
        ValueError: Neither or both of the evaluate methods are overridden, or the chief alone
            would validate a model whose parameters are divided among the ranks.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        super().__init__(trial, context)
        self._last_batch: Any = None
        is_divided = context.stepper.divides_parameters and context.distributed.size > 1
        self._is_together = is_divided
        if is_divided and not self.is_by_batch:
            raise ValueError(
                "With ZeRO stage 3 a trial must override `evaluate_batch`, as all ranks run each"
                f" forward pass together, but {type(trial).__name__} overrides"
                " `evaluate_full_dataset`."
            )

    def _run_batches(self, data: ShardedData, limit: int | None) -> tuple[list[Any], MetricSums]:
        num_more = self._num_more(data, limit) if self._is_together else 0
        outcome = super()._run_batches(data, limit)
        # Reducers are saved: repeats of the last batch must not count in metrics.
        collected = self._context.reducers.state()
        for index in range(num_more):
            self._evaluate(self._last_batch, index)
        self._context.reducers.load_state(collected)
        self._last_batch = None
        return outcome

    def _num_more(self, data: ShardedData, limit: int | None) -> int:
        """Return the number of extra forward passes for joining ranks with more batches."""
        distributed = self._context.distributed
        counts = batches_by_rank(data, limit, distributed.size)
        if min(counts) == 0:
            raise ValueError(
                "With ZeRO stage 3 the validation data must have a length and give each rank at"
                f" least one batch, but the ranks get {counts}. Hint: a map-style data set, and"
                " smaller batches."
            )
        return max(counts) - counts[distributed.rank]

    def _evaluate(self, batch: Any, index: int) -> Mapping[str, Any]:
        if self._is_together:
            self._last_batch = batch
        return super()._evaluate(_only(batch, "evaluate_batch"), index)


def _only(batch: Any, method: str) -> Iterator[Any]:
    yield batch
    raise RuntimeError(
        f"`{method}` must take one micro-batch in each call, but asked for a second one. Hint:"
        " next(dataloader_iter), once."
    )


class Trainer(PyTorchTrainer):
    """Train a `DeepSpeedTrial`; `fit` and all else are as in `pytorch.Trainer`.

    A batch is one optimizer step of the engines: `gradient_accumulation_steps` micro-batches on
    each rank. At the end of an epoch, samples that make no whole batch are left out.

    Args:
        trial: The trial.
        context: The context that the trial was made with.

    Raises:
        TypeError: `trial` is no `DeepSpeedTrial`, or `context` none of `pytorch.deepspeed.init`.
        ValueError: No engine is wrapped, or not exactly one evaluate method is overridden.
    """

    def _make_training(self, trial: PyTorchTrial) -> TrialTraining:
        context = self._context
        if not isinstance(trial, DeepSpeedTrial):
            raise TypeError(f"`trial` must be a DeepSpeedTrial, but got {type(trial).__name__}.")
        if not isinstance(context, DeepSpeedTrialContext):
            raise TypeError(
                f"`context` must be a DeepSpeedTrialContext, but got {type(context).__name__}."
                " Hint: with pytorch.deepspeed.init() as context."
            )
        if not context.engines:
            raise ValueError(
                "A trial must wrap at least one engine. Hint: self.engine ="
                " context.wrap_model_engine(engine) in its `__init__`."
            )
        return DeepSpeedTraining(trial, context, DeepSpeedValidator(trial, context))


__all__ = ["DeepSpeedTrial", "DeepSpeedTrialContext", "Trainer", "init"]
