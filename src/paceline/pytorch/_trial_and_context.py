"""`PyTorchTrial`, its callbacks, and the context of a trial."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as DataLoader

from paceline import core
from paceline._training.engine.checkpoints.resume_differences import built_settings
from paceline._training.engine.devices import use_own_device
from paceline._training.engine.fsdp_and_tensor_parallel import ShardUnits, TensorPlan
from paceline._training.engine.gradient_reduction import (
    DataParallel,
    default_data_parallel,
    plain_model,
)
from paceline._training.engine.lr_schedulers import LRScheduler
from paceline._training.engine.metric_reducers import MetricReducer, Reducer, ReducerSet
from paceline._training.engine.model_preparation import ModelOptions
from paceline._training.engine.optimizer_stepper import ClipGrads, Stepper
from paceline._training.engine.own_loop_gradients import Accumulation
from paceline._training.engine.precision import Precision
from paceline._training.engine.profiling import TraceProfiler
from paceline._training.engine.rank_differences import RankCheck
from paceline._training.engine.schedules import Position
from paceline.data._torch_loaders import TorchData, data_length, to_device
from paceline.pytorch._training_loop import TrainingLoop

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

logger = logging.getLogger(__name__)


class PyTorchCallback:
    """Base class of callbacks: override hooks as needed; most run on every rank.

    Several callbacks run in the order of `build_callbacks()`.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run before the data loaders are built."""

    def on_training_start(self) -> None:
        """Run after the state was restored, before the first batch."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of an epoch."""

    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Run after training metrics were reported.

        Args:
            avg_metrics: Means over batches and ranks since the last report.
            batch_metrics: Results of `train_batch` since then on this rank; kept only if some
                callback overrides this hook.
        """

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of an epoch."""

    def on_validation_start(self) -> None:
        """Run before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first batch of a validation."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the last batch of a validation with this rank's metrics of each batch."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation with the reduced metrics, the same on every rank."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a state is restored; may change the state."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run on the chief before a state is stored; may change the state."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated spelling of `on_checkpoint_write_end`."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Run on the chief when the files are written, before the checkpoint is committed.

        It runs in the thread that writes; files put into the directory become part of it.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run on the chief, between two batches, after a checkpoint was committed."""

    def on_trial_shutdown(self) -> None:
        """Run at the end, in reverse order, whatever happened."""

    def state_dict(self) -> dict[str, Any]:
        """Return this callback's state for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


class PyTorchTrial(ABC):
    """Base class of trials: a model, its data, and the training on a batch.

    Implement `__init__` (wrap models and optimizers by the context), `train_batch`, the two
    loaders, and one of `evaluate_batch` and `evaluate_full_dataset`.
    """

    @abstractmethod
    def __init__(self, context: Any) -> None:
        """Build and wrap models, optimizers and schedulers."""

    @abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Any:
        """Train on a shard: forward, `context.backward`, `context.step_optimizer`.

        Args:
            batch: The training loader's batch, on this rank's device.
            epoch_idx: The epoch, from 0.
            batch_idx: The global batch, counted from the start of training, from 0.

        Returns:
            A dictionary of metrics, or a tensor, which becomes {"loss": tensor}.
        """

    @abstractmethod
    def build_training_data_loader(self) -> "DataLoader[Any]":
        """Return the loader of the training data; its batch size is a shard's."""

    @abstractmethod
    def build_validation_data_loader(self) -> "DataLoader[Any]":
        """Return the loader of the validation data; its batch size is a shard's."""

    def evaluate_batch(self, batch: TorchData, batch_idx: int = 0) -> dict[str, Any]:
        """Return the metrics of a validation batch."""
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: "DataLoader[Any]") -> dict[str, Any]:
        """Return the metrics of the whole validation set; runs on the chief alone."""
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return the reducer of validation metrics, common to all or given per metric."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return named callbacks."""
        return {}

    def get_batch_length(self, batch: TorchData) -> int:
        """Return the number of samples of a batch; override for custom types."""
        return data_length(batch)


class PyTorchTrialContext:
    """Wrap models and optimizers, scale losses, step optimizers; made by `pytorch.init()`.

    Args:
        core_context: The core context of this process.
        hparams: The hyperparameters.
        seed: The seed of the trial.
        precision: The number format of the forward pass.
        data_parallel: How gradients are summed over the ranks; None for the way that suits the
            devices.
        shard_size: With FSDP, the number of ranks that hold one copy of a model; None for all.
        tensor_parallel_size: The number of ranks that divide a model by a tensor-parallel plan.
        num_shards: Into how many shards a global batch is cut; by default one for each rank, or for
            each group of ranks that divide a model by a plan.
        device: The device of this process; a GPU of its own by default, else the CPU.
        check_ranks: Whether ranks are compared, see `pytorch.init`.
    """

    def __init__(
        self,
        core_context: core.Context,
        hparams: Mapping[str, Any] | None,
        seed: int,
        *,
        precision: Precision = Precision.FP32,
        data_parallel: DataParallel | None = DataParallel.FLAT,
        shard_size: int | None = None,
        tensor_parallel_size: int = 1,
        num_shards: int | None = None,
        device: torch.device | None = None,
        given_seed: int | None = None,
        check_ranks: bool | Sequence[str] = True,
    ) -> None:
        distributed = core_context.distributed
        device = use_own_device(distributed.local_rank, chosen=device)
        if data_parallel is None:
            backend = dist.get_backend() if dist.is_initialized() else None
            data_parallel = default_data_parallel(
                device.type, backend, distributed.size, tensor_parallel_size
            )
            logger.info("Gradients are summed by data_parallel=%r.", data_parallel.value)
        stepper = Stepper(
            distributed,
            device,
            precision,
            data_parallel,
            shard_size=shard_size,
            tensor_size=tensor_parallel_size,
            rank_check=RankCheck(check_ranks),
        )
        self.core = core_context
        self.distributed = distributed
        self.device = device
        self.stepper = stepper
        self.num_shards = num_shards or stepper.grid.data_size
        # The schedulers, with the units of their steps; and the metrics that are no averages.
        self.lr_schedulers: list[LRScheduler] = []
        self.reducers = ReducerSet(stepper)
        self.moves_data = True
        # Types of data that cannot be moved, as far as the user was warned.
        self.warned_types: set[type] = set()
        self.tracer: TraceProfiler | None = None
        self.loop: TrainingLoop | None = None
        # None if nobody knows them ahead.
        self.num_epoch_batches: int | None = None
        self._hparams, self._seed = hparams, seed
        self._has_told_rest = False
        self.exit_stack = ExitStack()
        # The one that a checkpoint must have, as sample orders depend on it.
        self.given_seed = given_seed

    @property
    def models(self) -> list[torch.nn.Module]:
        """The wrapped models, as they were made."""
        return [plain_model(model) for model in self.stepper.models]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The wrapped optimizers."""
        return self.stepper.optimizers

    @cached_property
    def built(self) -> dict[str, list[Any]]:
        """Settings of optimizers and schedulers as built; must be read before their first use."""
        schedulers = [each.scheduler for each in self.lr_schedulers]
        return built_settings(self.models, self.optimizers, schedulers)

    def get_trial_seed(self) -> int:
        """Return the seed of the trial."""
        return self._seed

    @property
    def experimental(self) -> "ExperimentalContext":
        """Compatibility switches for code written for the predecessor."""
        # Kept here, it would keep the models of a finished training until Python looks for cycles.
        return ExperimentalContext(self)

    @property
    def scaler(self) -> Any:
        """The gradient scaler, or None."""
        return self.stepper.scaler

    @property
    def tensor_mesh(self) -> Any:
        """The `DeviceMesh` of the ranks dividing a model by a tensor-parallel plan.

        None where `tensor_parallel_size` is 1, and with one process.
        """
        return self.stepper.grid.tensor_mesh

    @property
    def accumulation(self) -> Accumulation:
        """The present place within an aggregation window."""
        return self.stepper.accumulation

    # ---- facts of the trial --------------------------------------------------------------

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment's config; empty without a master."""
        info = self.core.info
        return {} if info is None else dict(info.trial.config)

    def get_data_config(self) -> dict[str, Any]:
        """Return the section `data` of the experiment's config; empty if there is none."""
        return dict(self.get_experiment_config().get("data") or {})

    def get_experiment_id(self) -> int:
        """Return the experiment's number; 0 without a master."""
        return 0 if self.core.info is None else self.core.info.trial.experiment_id

    def get_trial_id(self) -> int:
        """Return the trial's number; 0 without a master."""
        return 0 if self.core.info is None else self.core.info.trial.trial_id

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters.

        Raises:
            ValueError: There are none.
        """
        if self._hparams is None:
            raise ValueError(
                "There are no hyperparameters. Hint: pytorch.init(hparams={...}) sets them."
            )
        return dict(self._hparams)

    def get_hparam(self, name: str) -> Any:
        """Return a hyperparameter.

        Raises:
            KeyError: There is none of this name.
        """
        hparams = self.get_hparams()
        if name not in hparams:
            raise KeyError(f"There is no hyperparameter {name!r}, only {sorted(hparams)}.")
        return hparams[name]

    @property
    def has_global_batch_size(self) -> bool:
        """Whether the hyperparameters have a `global_batch_size`; optional unless read."""
        return "global_batch_size" in (self._hparams or {})

    def get_global_batch_size(self) -> int:
        """Return `hparams["global_batch_size"]`: samples per step over all shards.

        Raises:
            ValueError: It is missing, no integer, or below the number of shards.
        """
        size = (self._hparams or {}).get("global_batch_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < self.num_shards:
            hint = 'pytorch.init(hparams={"global_batch_size": 32}).'
            if self.core.info is not None:
                hint = "`hyperparameters: {global_batch_size: 32}` in the experiment's config."
            raise ValueError(
                "`hparams.global_batch_size` must be an integer of at least the number of shards"
                f" ({self.num_shards}), but got {size!r}. Hint: {hint}"
            )
        return size

    def get_per_slot_batch_size(self) -> int:
        """Return a shard's part of the global batch size, for the data loaders."""
        size = self.get_global_batch_size()
        per_slot, rest = divmod(size, self.num_shards)
        # Asked for each loader, on each rank.
        if rest and not self._has_told_rest and self.core.distributed.rank == 0:
            self._has_told_rest = True
            logger.warning(
                "`global_batch_size` %d is no multiple of %d shards: %d samples are used per step.",
                size,
                self.num_shards,
                per_slot * self.num_shards,
            )
        return per_slot

    def current_train_batch(self) -> int:
        """Return the number of the global batch being trained, from 0.

        Raises:
            RuntimeError: Training has not begun.
        """
        return self._present().batches

    def current_train_epoch(self) -> int:
        """Return the number of the epoch being trained, from 0.

        Raises:
            RuntimeError: Training has not begun.
        """
        return self._present().epochs

    def is_epoch_start(self) -> bool:
        """Return whether the batch being trained is the first of its epoch.

        Raises:
            RuntimeError: Training has not begun.
        """
        return self._present().batch_in_epoch == 0

    def is_epoch_end(self) -> bool:
        """Return whether the batch being trained is the last of its epoch.

        Raises:
            RuntimeError: Training has not begun, or the data have no length, so that nobody knows.
        """
        position = self._present()
        if self.num_epoch_batches is None:
            raise RuntimeError(
                "The end of an epoch is not known ahead for data without a length. Hint: use the"
                " callback hook `on_training_epoch_end`."
            )
        return position.batch_in_epoch + 1 == self.num_epoch_batches

    def _present(self) -> Position:
        position = None if self.loop is None else self.loop.present
        if position is None:
            raise RuntimeError("There is no current batch before training.")
        return position

    # ---- wrapping ------------------------------------------------------------------------

    def wrap_model(
        self,
        model: torch.nn.Module,
        *,
        trainable_only: bool | str = False,
        shard_units: ShardUnits = None,
        shard_precision: "MixedPrecisionPolicy | None" = None,
        gradient_checkpointing: bool = False,
        compile: bool | Mapping[str, Any] = False,
        init_weights: Callable[[torch.nn.Module], Any] | None = None,
        tensor_plan: TensorPlan = None,
    ) -> torch.nn.Module:
        """Move a model to the device, make all ranks' copies equal, register for checkpoints.

        Args:
            model: The model.
            trainable_only: Whether checkpoints leave out the parameters that are frozen now, as
                long as they stay frozen and do not change: those of a base to which adapters
                are added. A resumed training must load the same base first, which is
                checked. A text is the base's name, for messages.
            shard_units: With `data_parallel="fsdp"`, which modules are gathered as a whole for
                their forward and backward pass, besides the model itself: a class or a tuple of
                classes, such as a transformer's layer; a least number of parameters; or a
                function that takes a module and returns whether it is one. By default the members
                of the model's outermost sequences (`Sequential`, `ModuleList`).
            shard_precision: With `data_parallel="fsdp"` and several ranks, the types in which
                parameters are gathered and gradients are summed; parameters, gradients and
                optimizers of the ranks keep their own type.
            gradient_checkpointing: Whether blocks are computed again in the backward pass instead
                of kept in memory: by the model's own method if it has one, else for the members of
                its outermost sequences.
            compile: Whether the model is compiled, or the options of `torch.compile`. Units of
                sharded models are compiled one by one.
            init_weights: For a model that was made on the meta device: called with each module
                that has parameters or buffers of its own, inner ones first, after the module's
                `reset_parameters` if it has one.
            tensor_plan: With `tensor_parallel_size`, how the ranks of a group divide the model: the
                plan that torch's `parallelize_module` takes, or a function of the model and of
                `context.tensor_mesh`. A model that is divided over this mesh already needs none.
                It has no effect with one process, so that the same code runs there.

        Returns:
            The model to call: the same one, or a wrapper of it if gradients are overlapped. With
            `data_parallel="fsdp"` or `tensor_plan` and several ranks, the parameters are divided
            among the ranks: make the optimizer afterwards.

        Raises:
            TypeError: An argument is nothing of its kind.
            ValueError: `trainable_only` is given, but no parameter is frozen; two units of a
                sharded model share a parameter; `gradient_checkpointing` finds no blocks;
                `shard_precision` is fp16 or given with another `precision` than "fp32";
                parameters on the meta device are not initialised; or the model has DTensors over
                other ranks than `tensor_mesh`.
        """
        options = ModelOptions(
            trainable_only=trainable_only,
            shard_units=shard_units,
            shard_precision=shard_precision,
            gradient_checkpointing=gradient_checkpointing,
            compile=compile,
            init_weights=init_weights,
            tensor_plan=tensor_plan,
        )
        return self.stepper.add_model(model, options)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have an optimizer checkpointed, and its gradients summed over the ranks."""
        self.stepper.add_optimizer(optimizer)
        return optimizer

    def wrap_lr_scheduler(
        self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> Any:
        """Register a scheduler for stepping and checkpoints; return the same object.

        Raises:
            ValueError: Its optimizer is not wrapped, or a plateau scheduler is to be stepped
                without a metric.
        """
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if not any(optimizer is known for known in self.optimizers):
            raise ValueError(
                "A scheduler's optimizer must be wrapped first, but it is not. Hint: pass the"
                " optimizer to `context.wrap_optimizer` before it makes the scheduler."
            )
        is_plateau = isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if is_plateau and step_mode is not LRScheduler.StepMode.MANUAL_STEP:
            raise ValueError(
                "ReduceLROnPlateau needs a metric, so its `step_mode` must be MANUAL_STEP, but got"
                f" {step_mode.name}."
            )
        self.lr_schedulers.append(LRScheduler(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler; give the result to `step_optimizer`, then call `update`.

        Its `update` does nothing where optimizers do not step: within a window of several batches,
        and for all but the last of a worker's shards.

        Raises:
            RuntimeError: The precision is fp16, which brings a scaler of its own.
        """
        if self.stepper.is_scaling_automatic:
            raise RuntimeError(
                "`wrap_scaler` is for mixed precision by hand, but `precision` is 'fp16', which"
                " scales by itself. Hint: leave one of them out."
            )
        self.stepper.scaler = scaler
        update = scaler.update

        @wraps(update)
        def update_after_steps(*args: Any, **kwargs: Any) -> None:
            if self.accumulation.is_boundary:
                update(*args, **kwargs)

        scaler.update = update_after_steps
        return scaler

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Add a metric more complex than an average to training or validation reports.

        Args:
            reducer: A `MetricReducer`, a function of the list of all values, or a metric or
                `MetricCollection` of torchmetrics.
            name: The metric's name; None if the result is a dictionary of several.
            for_training: Whether it is part of training reports.
            for_validation: Whether it is part of validation reports.
        """
        return self.reducers.wrap(
            reducer, name, for_training=for_training, for_validation=for_validation
        )

    # ---- training ------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of a shard's mean loss, weighted by its samples."""
        stepper = self.stepper
        if not stepper.is_plain:
            stepper.backward(loss, gradient, retain_graph, create_graph)
        elif stepper.computes_in_fp32:
            loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]
        else:
            with stepper.outside_autocast():
                loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Step an optimizer if its gradients are complete; else do nothing.

        Gradients are complete with the last shard of the last batch of an aggregation window.

        Args:
            optimizer: A wrapped optimizer.
            clip_grads: Called with the optimizer's parameters before the step.
            auto_zero_grads: Whether to clear the gradients afterwards; without it,
                `aggregation_frequency` must be 1.
            scaler: A gradient scaler that scaled the loss by hand.

        Raises:
            ValueError: `auto_zero_grads` is off within a window of several batches.
        """
        stepper = self.stepper
        if stepper.is_plain and clip_grads is None and scaler is None and auto_zero_grads:
            # Fast path of the code below for plain batches, without its checks.
            stepper.count_step(optimizer)
            try:
                if stepper.computes_in_fp32:
                    optimizer.step()
                else:
                    with stepper.outside_autocast():
                        optimizer.step()
            finally:
                stepper.calls.is_context_calling = False
            optimizer.zero_grad()
            return
        if not auto_zero_grads and self.accumulation.frequency > 1:
            raise ValueError(
                "`auto_zero_grads` must be True with `aggregation_frequency` above 1, but is False."
            )
        if not stepper.step(optimizer, clip_grads, scaler):
            return
        if auto_zero_grads:
            optimizer.zero_grad()
        else:
            stepper.keep_gradients(optimizer)

    def set_profiler(self, **options: Any) -> None:
        """Set torch's profiler to record traces of batches; a later call replaces an earlier.

        The trainer starts it, tells it each batch, and stops it. Each rank writes its traces to
        its directory of TensorBoard files, as ``batch_120.pt.trace.json`` after 120 batches.

        Args:
            options: The arguments of `torch.profiler.profile`. `schedule` counts the batches of
                the training, also of one resumed from a checkpoint; without it all
                batches are recorded, which needs much memory. `on_trace_ready` is called in place
                of writing traces.

        Raises:
            TypeError: The profiler does not take the options.
        """
        self.tracer = TraceProfiler(options, self.core.train.keep_trace)

    # ---- small parts ---------------------------------------------------------------------

    def to_device(self, data: TorchData) -> TorchData:
        """Return nested data on this rank's device."""
        return to_device(data, self.device, self.warned_types)

    def get_stop_requested(self) -> bool:
        """Tell whether this rank asked for a stop."""
        return self.stepper.is_stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask to store a checkpoint and stop after this batch; a single rank is enough."""
        self.stepper.is_stop_requested = bool(stop_requested)


class ExperimentalContext:
    """Compatibility switches for code written for the predecessor."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def use_amp(self) -> None:
        """Train in fp16 with automatic gradient scaling, as `pytorch.init(precision="fp16")`."""
        self._context.stepper.use_precision(Precision.FP16)

    def disable_auto_to_device(self) -> None:
        """Hand batches to the trial where the loader put them."""
        self._context.moves_data = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Do nothing: every torch data loader is accepted."""
