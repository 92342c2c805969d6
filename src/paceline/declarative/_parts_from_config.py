"""Checks of a whole config, and construction of its parts, some by a subclass's methods."""

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline import core, pytorch
from paceline._training.engine.checkpoints.weight_exports import require_onnx
from paceline._training.engine.devices import join_ranks
from paceline._training.engine.fsdp_and_tensor_parallel import clipping
from paceline._training.engine.gradient_reduction import OverlappedAllReduce
from paceline._training.engine.horovod_reduction import join_horovod
from paceline._training.engine.optimizer_stepper import ClipGrads
from paceline.declarative._config_object import ParallelizationConfig, TrainingConfig
from paceline.declarative._losses import LossPlan, MarginLoss, Prediction
from paceline.declarative._saved_outputs import Outputs
from paceline.pytorch._fit_arguments import searched_length, searcher_of

logger = logging.getLogger(__name__)

_LOSSES_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, MarginLoss)
# Default schedule: start of the rise as a share of the rate, and its duration in epochs.
_CYCLE_START, _CYCLE_EPOCHS = 0.1, 6
# How earlier scripts name a part of the model.
_OLD_PATH = re.compile(r"self\.get_model_object\(\)\.([\w.]+)\.parameters\(\)")
_STEP_MODES = {
    "batch": pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH,
    "step": pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
    "epoch": pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
}


def predictions_of(configs: TrainingConfig) -> tuple[Prediction, ...]:
    """Return the named predictions.

    Raises:
        ValueError: They are given twice, and differently.
    """
    pairs, names = configs.pred_names_and_types, configs.pred_names
    if pairs is None:
        losses = configs.loss_function
        found = []
        for index, name in enumerate(names or ()):
            loss = losses[min(index, len(losses) - 1)] if isinstance(losses, tuple) else losses
            kind = "cls" if isinstance(loss, _LOSSES_OF_CLASSES) else "regr"
            found.append(Prediction(name, kind))
        return tuple(found)
    if names is not None and names != tuple(name for name, _ in pairs):
        raise ValueError(
            f"`pred_names` must name those of `pred_names_and_types` {pairs!r}, but got {names!r}."
            " Hint: leave one of them out."
        )
    return tuple(Prediction(*pair) for pair in pairs)


def losses_of(configs: TrainingConfig, predictions: Sequence[Prediction]) -> LossPlan:
    """Return the loss computation of a batch; see `LossPlan`."""
    return LossPlan(
        configs.loss_function,
        configs.loss_weights,
        predictions,
        has_labels=configs.data_label_separation_index is not None,
        losses_of_classes=_LOSSES_OF_CLASSES,
    )


def require_fields(configs: TrainingConfig) -> None:
    """Refuse a config with missing fields or mutually exclusive settings.

    Raises:
        ValueError: The message names every field.
        ModuleNotFoundError: A package for ONNX is not installed.
    """
    problems = []
    if configs.model_class is None:
        problems.append("`model_class` is missing")
    if configs.pred_names is None and configs.pred_names_and_types is None:
        problems.append("`pred_names` is missing")
    has_pair = configs.training_dataset is not None and configs.validation_dataset is not None
    if configs.dataset is None and not has_pair:
        given = [
            name
            for name in ("training_dataset", "validation_dataset")
            if getattr(configs, name) is not None
        ]
        also = f" beside `{given[0]}`" if given else ""
        problems.append(f"`dataset`, or both of a split data set, is missing{also}")
    if configs.checkpoint_dir is not None and configs.pretrained_model_path is not None:
        problems.append(
            f"`checkpoint_dir` {configs.checkpoint_dir!r} and `pretrained_model_path`"
            f" {configs.pretrained_model_path!r} exclude each other"
        )
    if configs.load_pretrained_encoder_only and configs.pretrained_model_path is None:
        problems.append("`load_pretrained_encoder_only` needs `pretrained_model_path`")
    if configs.load_pretrained_classifier and not configs.load_pretrained_encoder_only:
        problems.append(
            "`load_pretrained_classifier` has no effect without `load_pretrained_encoder_only`"
        )
    problems += _parallel_problems_of(configs.parallelization_params, saves_onnx=configs.save_onnx)
    if problems:
        raise ValueError(f"The config must be complete, but {'; '.join(problems)}.")
    if configs.save_onnx:
        require_onnx()


def _parallel_problems_of(parallel: ParallelizationConfig, *, saves_onnx: bool) -> list[str]:
    """Return the conflicts among the options for several processes."""
    problems = []
    if parallel.data_parallel != "fsdp":
        problems += [
            f'`{name}` has no effect without `data_parallel="fsdp"`'
            for name in ("shard_units", "shard_precision", "shard_size")
            if getattr(parallel, name) is not None
        ]
    if parallel.data_parallel == "fsdp" and saves_onnx:
        problems.append('`save_onnx` and `data_parallel="fsdp"` exclude each other')
    if parallel.tensor_parallel_size > 1 and saves_onnx:
        problems.append("`save_onnx` and `tensor_parallel_size` exclude each other")
    return problems


def check_config_arguments(configs: TrainingConfig) -> None:
    """Check the arguments for model, optimizer and scheduler against their signatures.

    Raises:
        TypeError: One does not; the message names the argument.
    """
    _check_call("model_params", configs.model_class, configs.model_params.values())
    _check_call("optimizer_params", configs.optimizer, configs.optimizer_params, 1, {"lr": 1.0})
    has_default = configs.scheduler is CyclicLR and not configs.scheduler_params
    if configs.scheduler is not None and not has_default:
        _check_call("scheduler_params", configs.scheduler, configs.scheduler_params, 1)


def _check_call(
    field: str,
    kind: Callable[..., Any],
    given: Mapping[str, Any],
    num_positional: int = 0,
    more: Mapping[str, Any] | None = None,
) -> None:
    try:
        inspect.signature(kind).bind(*[None] * num_positional, **(more or {}), **given)
    except TypeError as error:
        taken = ", ".join([*inspect.signature(kind).parameters][num_positional:])
        raise TypeError(
            f"`{field}` must be arguments of {kind.__qualname__} ({taken}), but got"
            f" {dict(given)!r}: {error}."
        ) from error
    except ValueError:
        # Nothing is known about an object without a signature.
        return


def precision_of(configs: TrainingConfig) -> str | None:
    """Return the number format of the forward pass, or None for the experiment's."""
    return configs.mixed_precision_type if configs.automatic_mixed_precision else None


def recorded_fields(configs: TrainingConfig) -> dict[str, Any]:
    """Return the fields to record as hyperparameters of a run: the plain fields."""
    fields = {**configs.values(), "model_params": configs.model_params.values()}
    # Paths of input and output do not define a run, and its seed is recorded anyway.
    left_out = (
        "loss_function", "checkpoint_dir", "checkpoint_storage", "pretrained_model_path",
        "model_save_dir", "random_seed",
    )  # fmt: skip
    return {
        name: value.__name__ if isinstance(value, type) else value
        for name, value in fields.items()
        if isinstance(value, (bool, int, float, str, dict, tuple, type)) and name not in left_out
    }


def make_optimizer(
    configs: TrainingConfig, model: nn.Module, encoder: nn.Module | None, rate: float, scale: float
) -> torch.optim.Optimizer:
    """Return the optimizer.

    Args:
        configs: The training.
        model: The model on its device.
        encoder: The part that is not to be trained, if there is one.
        rate: The learning rate.
        scale: The factor of the learning rates of parameter groups.

    Raises:
        ValueError: A parameter group names no part of the model.
    """
    parameters: Iterable[Any]
    if configs.multi_optimizer_param_dicts is not None:
        parameters = [
            _parameter_group(model, group, scale) for group in configs.multi_optimizer_param_dicts
        ]
    elif encoder is not None:
        parameters = _head_parameters(model, encoder)
    else:
        parameters = model.parameters()
    optimizer: torch.optim.Optimizer = configs.optimizer(
        parameters, lr=rate, **configs.optimizer_params
    )
    return optimizer


def _parameter_group(model: nn.Module, group: Mapping[str, Any], scale: float) -> dict[str, Any]:
    path = group["params"]
    old = _OLD_PATH.fullmatch(path)
    name = path if old is None else old[1]
    try:
        found: Any = model.get_submodule(name)
    except AttributeError:
        # A parameter of the model itself is no module.
        found = getattr(model, name, None)
    if isinstance(found, nn.Module):
        parameters = list(found.parameters())
    elif isinstance(found, nn.Parameter):
        parameters = [found]
    else:
        raise ValueError(
            f"`multi_optimizer_param_dicts` must name parts of the model, but {path!r} is none of"
            f" {', '.join(child for child, _ in model.named_children())}."
        )
    rate = {"lr": group["lr"] * scale} if "lr" in group else {}
    return {**group, **rate, "params": parameters}


def _head_parameters(model: nn.Module, encoder: nn.Module) -> list[nn.Parameter]:
    own: Any = getattr(model, "get_head_parameters", None)
    if own is not None:
        return list(own())
    encoded = {id(parameter) for parameter in encoder.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in encoded]


def make_scheduler(
    configs: TrainingConfig,
    optimizer: torch.optim.Optimizer,
    iterations_per_epoch: int,
    context: pytorch.PyTorchTrialContext,
) -> Any:
    """Return the scheduler, registered for the engine's steps and checkpoints.

    Args:
        configs: The training.
        optimizer: Whose rates it sets.
        iterations_per_epoch: Batches of an epoch.
        context: The engine's context.
    """
    is_default = configs.scheduler is CyclicLR and not configs.scheduler_params
    if is_default:
        # Each group rises to its own rate.
        rates = [group["lr"] for group in optimizer.param_groups]
        per_epoch = {
            "batch": iterations_per_epoch,
            "step": math.ceil(iterations_per_epoch / configs.accumulation_steps),
            "epoch": 1,
        }
        scheduler: Any = CyclicLR(
            optimizer,
            base_lr=[_CYCLE_START * rate for rate in rates],
            max_lr=rates,
            step_size_up=_CYCLE_EPOCHS * per_epoch[configs.scheduler_step],
            mode="triangular2",
            cycle_momentum=False,
        )
    else:
        scheduler = configs.scheduler(optimizer, **configs.scheduler_params)
    return context.wrap_lr_scheduler(scheduler, scheduler_step_mode(configs, scheduler))


def scheduler_step_mode(configs: TrainingConfig, scheduler: Any) -> pytorch.LRScheduler.StepMode:
    """Return the step mode of a scheduler: manual for a plateau scheduler."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return pytorch.LRScheduler.StepMode.MANUAL_STEP
    return _STEP_MODES[configs.scheduler_step]


def mixed_precision_policy_of(parallel: ParallelizationConfig) -> Any:
    """Return torch's policy for the types of sharded models, or None."""
    if parallel.shard_precision is None:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = parallel.shard_precision
    return MixedPrecisionPolicy(
        **{
            key: getattr(torch, each) if isinstance(each, str) else each
            for key, each in given.items()
        }
    )


def clipping_of(configs: TrainingConfig) -> ClipGrads | None:
    """Return the gradient clipping function, or None."""
    norm, value = configs.gradient_clip_norm, configs.gradient_clip_value
    if norm is None and value is None:
        return None

    return clipping(norm, value)


def num_epochs_of(config: Mapping[str, Any], num_epochs: int) -> int:
    """Return the number of epochs: the experiment's searcher's, else the config's.

    Args:
        config: The experiment's config; empty without one.
        num_epochs: The number in the training's config.
    """
    length = searched_length(searcher_of(config))
    if length is None:
        return num_epochs
    if not isinstance(length, pytorch.Epoch):
        logger.warning(
            "The searcher's length %r is no number of epochs: %d epochs are trained.",
            length,
            num_epochs,
        )
        return num_epochs
    if length.length != num_epochs:
        logger.info(
            "The searcher's %d epochs are trained instead of %d.", length.length, num_epochs
        )
    return length.length


def num_launched_for_config(*, is_single: bool) -> int:
    """Return how many processes were started together.

    Args:
        is_single: Whether there is to be only one.

    Raises:
        ValueError: There is to be one, but there are several.
    """
    place = core.launched_place()
    size = 1 if place is None else place.size
    if dist.is_initialized():
        size = dist.get_world_size()
    if is_single and size > 1:
        starter = "" if place is None else f" that {place.launcher} has started"
        raise ValueError(
            f"`parallelization_type` must be 'multi_node' for the {size} processes{starter}, but is"
            " 'single_node'. Hint:"
            " parallelization_params=ParallelizationConfig(parallelization_type='multi_node')."
        )
    return size


def join_config_ranks(configs: TrainingConfig) -> core.DistributedContext | None:
    """Return this process's place, after meeting the others; None for a process alone."""
    is_by_horovod = configs.parallelization_params.data_parallel == "horovod"
    distributed = join_horovod(None) if is_by_horovod else None
    return join_ranks(distributed, torch.device("cpu") if configs.cpu_only else None)


def check_config_place(given: tuple[int | None, int | None], rank: int, size: int) -> None:
    """Refuse a rank or number of processes different from this process's own.

    Args:
        given: The script's values; None for each that it leaves out.
        rank: This process among all.
        size: The number of all processes.

    Raises:
        ValueError: They differ.
    """
    for name, value, found in zip(("rank", "num_processes"), given, (rank, size), strict=True):
        if value is not None and value != found:
            raise ValueError(
                f"`{name}` must be that of the process group, {found}, but got {value}. Hint: leave"
                " it out, and start the processes by a launcher or torch.distributed."
            )


# Attributes that are fields of the config.
_FIELDS = {
    "loss_criterion": "loss_function",
    **{name: name for name in ("loss_weights", "validation_ratio", "num_workers")},
    "curriculum_learning_rate": "curriculum_learning_rate",
}
_INSTEAD = {
    "gatekeeper": "`self.rank == 0` tells the chief",
    "num_local_devices": "`self.num_processes` counts processes and GPUs",
    "parallelization_type": "self.configs.parallelization_params.parallelization_type",
    "use_torch_amp": "self.configs.automatic_mixed_precision",
    **dict.fromkeys(
        ("training_sampler", "validation_sampler", "test_sampler"),
        "the trainer deals the batches of `build_dataloaders` out to the processes",
    ),
}
# Methods that were called there, and would have no effect here.
_NEVER_CALLED = {
    "build_amp": "`automatic_mixed_precision` and `mixed_precision_type` of the config",
    "build_parallelism": "`build_model`; the trainer divides the work",
    "generate_state_dict": "`save_model_and_states_checkpoint`",
    "process_data_loader_yield_sample_first": "`process_data_loader_yield`",
    "process_data_loader_yield_item_first": "`process_data_loader_yield`",
}


def earlier_attribute(trainer: "OwnBuilds", name: str) -> Any:
    """Return the counterpart of an attribute of generic_trainer's trainer.

    Raises:
        AttributeError: There is none; the message names the replacement.
    """
    if name == "grad_scaler":
        return StepScaler(trainer)
    if name in _FIELDS:
        return getattr(trainer.configs, _FIELDS[name])
    hint = f" Hint: {_INSTEAD[name]}." if name in _INSTEAD else ""
    raise AttributeError(f"`{type(trainer).__name__}` has no attribute {name!r}.{hint}")


def refuse_methods_never_called(trainer: "OwnBuilds") -> None:
    """Refuse methods of a subclass called by generic_trainer but never by this package.

    Raises:
        TypeError: There is one; the message names the method to override.
    """
    for name, instead in _NEVER_CALLED.items():
        if hasattr(type(trainer), name):
            raise TypeError(
                f"`{type(trainer).__name__}.{name}` would have no effect, as nothing calls it."
                f" Hint: use {instead}."
            )


class StepScaler:
    """Stand-in for `self.grad_scaler` in overrides: its steps are the trainer's steps.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: "OwnBuilds") -> None:
        self._trainer = trainer

    def scale(self, loss: torch.Tensor) -> "_ScaledLoss":
        """Return a loss to call `backward` of."""
        return _ScaledLoss(self._trainer, loss)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer."""
        trainer = self._trainer
        trainer.context.step_optimizer(optimizer, trainer.clip_gradients)

    def update(self) -> None:
        """Do nothing: the trainer updates the scale after each batch."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to unscale.

        Raises:
            RuntimeError: Always; the message says how to clip.
        """
        raise RuntimeError(
            "`self.grad_scaler.unscale_` must not be called, as gradients are complete with the"
            " step only. Hint: `gradient_clip_norm` of the config, or `clip_grads` of"
            " self.context.step_optimizer."
        )

    def __getattr__(self, name: str) -> Any:
        scaler = self._trainer.context.scaler
        return getattr(
            torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler, name
        )


class _ScaledLoss:
    def __init__(self, trainer: "OwnBuilds", loss: torch.Tensor) -> None:
        self._trainer = trainer
        self._loss = loss

    def backward(self) -> None:
        context = self._trainer.context
        if context.stepper.calls.has_window:
            raise RuntimeError(
                "`self.grad_scaler` must not be used where an optimizer step has several batches or"
                " shards, as with `accumulation_steps` above 1. Hint: self.context.backward(loss),"
                " then self.context.step_optimizer(self.optimizer)."
            )
        context.backward(self._loss)


class OwnBuilds(Outputs):
    """Mixin of a trainer: registers the results of `build_` methods with the engine.

    Attributes:
        scheduler: The scheduler of the learning rate, or None.
        training_dataset: The data to train on.
        validation_dataset: The data to validate on.
        test_dataloader: The loader of the test data, or None.
        iterations_per_epoch: The batches of an epoch over all processes.
    """

    scheduler: Any
    training_dataset: Any
    validation_dataset: Any
    test_dataloader: Any
    iterations_per_epoch: int
    _encoder_name: str

    def __getattr__(self, name: str) -> Any:
        return earlier_attribute(self, name)

    def forget_build(self) -> None:
        """Discard the results of an earlier `build`, to detect parts missing in this build.

        Raises:
            TypeError: A subclass has a method that would never be called.
        """
        refuse_methods_never_called(self)
        made = ("context", "model", "optimizer", "rank", "num_processes", "iterations_per_epoch")
        for name in (*made, "training_dataloader", "validation_dataloader"):
            vars(self).pop(name, None)
        self.scheduler = self.test_dataloader = None
        self._encoder_name = ""

    def require_built(self, name: str, kind: type) -> Any:
        """Return a result of the `build_` methods, checked for its type.

        Raises:
            TypeError: It has made none.
        """
        found = getattr(self, name, None)
        if not isinstance(found, kind):
            raise TypeError(
                f"The `build_` methods must set `self.{name}` to an object of {kind.__name__}, but"
                f" it is {'missing' if found is None else repr(type(found))}. Hint: call super() in"
                " the method that overrides one."
            )
        return found

    def check_device(self) -> None:
        """Refuse a device other than the run's device.

        Raises:
            ValueError: `build_device` has set one.
        """
        own, found = torch.device(self.device), self.context.device
        if own.type != found.type or own.index not in (None, found.index):
            raise ValueError(
                f"`self.device` must be that of the run, {found}, but `build_device` has set {own}."
                " Hint: `cpu_only` and CUDA_VISIBLE_DEVICES choose it."
            )
        self.device = found

    def adopt_loaders(self) -> None:
        """Check the loaders, and count the batches of an epoch."""
        self.require_built("validation_dataloader", DataLoader)
        loader = self.require_built("training_dataloader", DataLoader)
        if "iterations_per_epoch" not in vars(self):
            # Streams have no length: the number of batches stays unset.
            with suppress(TypeError):
                whole, rest = divmod(len(loader), self.context.num_shards)
                # The last batch of an epoch may be smaller.
                self.iterations_per_epoch = whole + (rest > 0 and not loader.drop_last)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Register a model with the engine, and return the model to call."""
        self._plain_model, parallel = model, self.configs.parallelization_params
        return self.context.wrap_model(
            model,
            trainable_only=parallel.trainable_only,
            shard_units=parallel.shard_units,
            shard_precision=mixed_precision_policy_of(parallel),
            gradient_checkpointing=parallel.gradient_checkpointing,
            compile=parallel.compile,
            tensor_plan=parallel.tensor_plan,
        )

    def adopt_model(self) -> None:
        """Register the model with the engine, unless already registered."""
        model = self.require_built("model", nn.Module)
        known = self.context.models
        is_own = isinstance(model, OverlappedAllReduce) or any(model is each for each in known)
        if isinstance(model, DistributedDataParallel) and not is_own:
            raise TypeError(
                "`build_model` must leave the summing of gradients to the trainer, but has made a"
                " DistributedDataParallel. Hint: `self.model` = the model itself."
            )
        self._plain_model = _inner(model)
        if all(self._plain_model is not _inner(each) for each in known):
            wrapped = self.wrap_model(self._plain_model)
            self.model = model if isinstance(model, nn.DataParallel) else wrapped

    def adopt_optimizer(self) -> None:
        """Register the optimizer with the engine, unless already registered.

        Raises:
            TypeError: The optimizer needs a closure, and nobody has written one.
        """
        optimizer = self.require_built("optimizer", torch.optim.Optimizer)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        if needs_closure and not self.is_overridden("run_model_update_step", "run_training_epoch"):
            raise TypeError(
                f"{type(optimizer).__name__} needs a closure, which the usual step has none of."
                " Hint: override `load_data_and_get_loss` to call self.optimizer.step(closure), and"
                " `run_model_update_step` to do nothing."
            )
        if all(optimizer is not known for known in self.context.optimizers):
            self.context.wrap_optimizer(optimizer)
        self.clip_gradients = clipping_of(self.configs)

    @contextmanager
    def counting_batches(self) -> Iterator[None]:
        """Have `len(self.training_dataloader)` be the batches of an epoch over all processes."""
        loader = self.training_dataloader
        if "iterations_per_epoch" in vars(self):
            self.training_dataloader = CountedLoader(loader, self.iterations_per_epoch)
        try:
            yield
        finally:
            # The user's code may have set another loader.
            if isinstance(self.training_dataloader, CountedLoader):
                self.training_dataloader = loader

    def adopt_scheduler(self) -> None:
        """Register the scheduler with the engine, unless already registered."""
        entries, scheduler = self.context.lr_schedulers, self.scheduler
        if scheduler is not None and all(scheduler is not each.scheduler for each in entries):
            mode = scheduler_step_mode(self.configs, scheduler)
            self.context.wrap_lr_scheduler(scheduler, mode)
        for entry in entries:
            entry.give_way(is_alone=self.context.distributed.size == 1)

    def make_dir(self) -> None:
        """Make `model_save_dir`, on all ranks together."""
        self._save_dir = Path(self.configs.model_save_dir)
        if self.rank == 0:
            self._save_dir.mkdir(parents=True, exist_ok=True)
        # From here on all ranks write there.
        self.barrier()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.context.distributed.allgather(None)


class CountedLoader:
    """Loader with the batches of an epoch over all processes as its length.

    Args:
        loader: The loader, whose batches are one process's share.
        num_batches: The length.
    """

    def __init__(self, loader: Any, num_batches: int) -> None:
        self._loader = loader
        self._num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _inner(model: nn.Module) -> nn.Module:
    """Return a model without its data-parallel wrappers."""
    while isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        model = model.module
    return model
