"""Completion of `build_` methods, even those of a subclass in plain PyTorch."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline._training.engine.gradient_reduction import OverlappedAllReduce
from paceline.declarative._parts_from_config import (
    clipping_of,
    mixed_precision_policy_of,
    scheduler_step_mode,
)
from paceline.declarative._saved_outputs import Outputs

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
