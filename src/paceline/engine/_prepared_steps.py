"""Backward passes and optimizer steps of a user's own loop, with accumulation and scaled losses."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from paceline.engine._gradient_sync import GradientSync
from paceline.engine._precision import Precision


class PreparedSteps:
    """What a loop with prepared optimizers does in each step.

    Args:
        gradients: What sums the gradients over the ranks.
        device: Where the models are.

    Attributes:
        precision: The number format of the forward pass.
        is_used: Whether a prepared optimizer was asked to step.
    """

    def __init__(self, gradients: GradientSync, device: torch.device) -> None:
        self.precision = Precision.FP32
        self.is_used = False
        self._gradients = gradients
        self._device = device
        self._scaler: torch.amp.GradScaler | None = None
        self._has_scaled = False
        self._is_update_due = False

    def use_precision(self, precision: Precision) -> None:
        """Scale losses if a precision needs it."""
        self.precision = precision
        self._scaler = precision.make_scaler(self._device)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer wait for complete gradients; it stays the same object."""
        self._gradients.watch_optimizer(optimizer)
        self._gradients.has_optimizer = True
        _PreparedOptimizer(self, optimizer).install()

    def backward(self, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Run the backward pass of a loss, scaled if the precision needs it.

        Args:
            loss: The loss.
            options: Of `torch.Tensor.backward`.

        Raises:
            RuntimeError: The loss must be scaled, but no optimizer was prepared.
        """
        self.update_scale()
        if self._scaler is not None:
            if not self._gradients.has_optimizer:
                raise RuntimeError(
                    "With the precision fp16 the optimizer must be prepared, as losses are scaled."
                    " Hint: optimizer = train.prepare_optimizer(optimizer)."
                )
            self._has_scaled = True
            loss = self._scaler.scale(loss)
        with self.precision.outside_autocast(self._device):
            loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's

    def update_scale(self) -> None:
        """Adapt the scale of losses to what the last steps met, once all optimizers have stepped.

        The next backward pass shows that they have.
        """
        if self._is_update_due:
            self._is_update_due = self._has_scaled = False
            assert self._scaler is not None
            self._scaler.update()

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scaler, None without one."""
        self.update_scale()
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Take up what `state` returned."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)

    def begin_step(self) -> bool:
        """Tell whether an optimizer's gradients are complete, so that it is to step now."""
        self.is_used = True
        if not self._gradients.is_boundary:
            return False
        self._gradients.has_open_gradients = False
        return True

    def scaler_for_step(self) -> torch.amp.GradScaler | None:
        """Return what steps the optimizer in its place, if losses are scaled.

        Raises:
            RuntimeError: Losses must be scaled, but none was.
        """
        if self._scaler is None:
            return None
        if not self._has_scaled:
            raise RuntimeError(
                "With the precision fp16 losses are scaled, but none was. Hint: call"
                " train.backward(loss) in place of loss.backward()."
            )
        self._is_update_due = True
        return self._scaler

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients belong to an accumulated step that is not complete."""
        return self._gradients.frequency > 1 and self._gradients.has_open_gradients


class _PreparedOptimizer:
    """The methods of an optimizer of a loop that steps it after each batch."""

    def __init__(self, steps: PreparedSteps, optimizer: torch.optim.Optimizer) -> None:
        self._steps = steps
        self._optimizer = optimizer
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._is_stepping = False

    def install(self) -> None:
        """Put these methods in place of the optimizer's."""
        optimizer = self._optimizer
        for name, own in (("step", self.step), ("zero_grad", self.zero_grad)):
            setattr(optimizer, name, MethodType(_without_self(own), optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_stepping:
            # The scaler calls this in its turn.
            return self._step(*args, **kwargs)
        if not self._steps.begin_step():
            return None
        scaler = self._steps.scaler_for_step()
        if scaler is None:
            return self._step(*args, **kwargs)
        self._is_stepping = True
        try:
            return scaler.step(self._optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._steps.keeps_gradients:
            self._zero_grad(*args, **kwargs)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to make a method of, as schedulers wrap methods and bind them anew."""

    def call(_: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
