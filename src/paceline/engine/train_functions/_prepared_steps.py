"""Backward passes and optimizer steps of a user's own loop, with accumulation and scaled losses."""

import logging
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from paceline.engine.devices._precision import Precision
from paceline.engine.gradients._gradient_sync import GradientSync
from paceline.engine.optimizer_steps._call_stack import calling_method

logger = logging.getLogger(__name__)


class PreparedSteps:
    """What a loop with prepared optimizers does in each step.

    Args:
        gradients: What sums the gradients over the ranks.
        device: Where the models are.

    Attributes:
        precision: The number format of the forward pass.
        is_used: Whether a prepared optimizer was asked to step.
        gradients: As given.
        scaler: What scales losses, if the precision needs it.
        has_scaled: Whether a loss was scaled since the last update of the scale.
        is_update_due: Whether an optimizer has stepped since then.
    """

    def __init__(self, gradients: GradientSync, device: torch.device) -> None:
        self.precision = Precision.FP32
        self.is_used = False
        self.gradients = gradients
        self._device = device
        self.scaler: torch.amp.GradScaler | None = None
        self.has_scaled = False
        self.is_update_due = False

    def use_precision(self, precision: Precision) -> None:
        """Scale losses if a precision needs it."""
        self.precision = precision
        self.scaler = precision.make_scaler(self._device)
        self.gradients.changes.is_scaled = self.scaler is not None

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer wait for complete gradients; it stays the same object."""
        self.gradients.watch_optimizer(optimizer)
        self.gradients.has_optimizer = True
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
        if self.scaler is not None:
            if not self.gradients.has_optimizer:
                raise RuntimeError(
                    "With the precision fp16 the optimizer must be prepared, as losses are scaled."
                    " Hint: optimizer = train.prepare_optimizer(optimizer)."
                )
            self.has_scaled = True
            loss = self.scaler.scale(loss)
        with self.precision.outside_autocast(self._device):
            loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's

    def update_scale(self) -> None:
        """Adapt the scale of losses to what the last steps met, once all optimizers have stepped.

        The next backward pass shows that they have.
        """
        if self.is_update_due:
            self.is_update_due = self.has_scaled = False
            assert self.scaler is not None
            self.scaler.update()

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scaler, None without one."""
        self.update_scale()
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Take up what `state` returned."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


class _PreparedOptimizer:
    """The methods of an optimizer of a loop that steps it after each batch."""

    def __init__(self, steps: PreparedSteps, optimizer: torch.optim.Optimizer) -> None:
        self._steps = steps
        self._optimizer = optimizer
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._add_param_group = optimizer.add_param_group
        self._is_stepping = False

    def install(self) -> None:
        """Put these methods in place of the optimizer's."""
        optimizer = self._optimizer
        for own in (self.step, self.zero_grad, self.add_param_group):
            setattr(optimizer, own.__name__, MethodType(_without_self(own), optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_stepping:
            # The scaler calls this in its turn.
            return self._step(*args, **kwargs)
        steps = self._steps
        steps.is_used = True
        self._look_for_changes()
        if not steps.gradients.is_boundary:
            return None
        steps.gradients.has_open_gradients = False
        if steps.scaler is None:
            return self._step(*args, **kwargs)
        if not steps.has_scaled:
            raise RuntimeError(
                "With the precision fp16 losses are scaled, but none was. Hint: call"
                " train.backward(loss) in place of loss.backward()."
            )
        steps.is_update_due = True
        self._is_stepping = True
        try:
            return steps.scaler.step(self._optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False

    def _look_for_changes(self) -> None:
        """Warn, once, if the gradients of the next step were changed before they are complete."""
        gradients = self._steps.gradients
        if gradients.changes.find(self._optimizer):
            is_open = gradients.frequency > 1
            logger.warning(
                "%s must not change gradients before they are complete, as %s. Clipping of a part"
                " of them gives other results. Hint: clip in a function that returns nothing,"
                " def clip(*_): ..., and call it with each step by"
                " optimizer.register_step_pre_hook(clip).",
                calling_method(),
                f"a step has {gradients.frequency} batches" if is_open else "fp16 scales losses",
            )

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._add_param_group(group)
        self._steps.gradients.watch(self._optimizer.param_groups[-1]["params"])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        gradients = self._steps.gradients
        if gradients.frequency == 1 or not gradients.has_open_gradients:
            self._zero_grad(*args, **kwargs)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to make a method of, as schedulers wrap methods and bind them anew."""

    def call(_: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
