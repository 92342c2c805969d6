"""Names of generic_trainer's trainer that overrides use, and what takes their place."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.declarative._own_builds import OwnBuilds

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
    """Return what an attribute of generic_trainer's trainer is here.

    Raises:
        AttributeError: There is none; the message tells what to use.
    """
    if name == "grad_scaler":
        return StepScaler(trainer)
    if name in _FIELDS:
        return getattr(trainer.configs, _FIELDS[name])
    hint = f" Hint: {_INSTEAD[name]}." if name in _INSTEAD else ""
    raise AttributeError(f"`{type(trainer).__name__}` has no attribute {name!r}.{hint}")


def refuse_methods_never_called(trainer: "OwnBuilds") -> None:
    """Refuse methods of a subclass that generic_trainer calls and this package does not.

    Raises:
        TypeError: There is one; the message tells what to override.
    """
    for name, instead in _NEVER_CALLED.items():
        if hasattr(type(trainer), name):
            raise TypeError(
                f"`{type(trainer).__name__}.{name}` would have no effect, as nothing calls it."
                f" Hint: use {instead}."
            )


class StepScaler:
    """What an override calls `self.grad_scaler`: a step by it is one of the trainer.

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
            RuntimeError: Always; the message tells how to clip.
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
