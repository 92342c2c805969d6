"""Training step, in methods for subclasses of the trainer to override."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline import pytorch
from paceline._training.engine.optimizer_stepper import ClipGrads
from paceline.declarative._config_object import TrainingConfig
from paceline.declarative._losses import LossPlan, Prediction

_OF_CONFIG = object()


class Step:
    """Mixin of a trainer: turns a batch into an optimizer step.

    Attributes:
        configs: The config in use.
        context: The engine's context.
        device: Where this process trains.
        model: The callable: the model itself, or its `DataParallel`.
        optimizer: The optimizer.
        predictions: The names and kinds of the model's outputs.
        clip_gradients: A function that clips a step's gradients as the config says, or None.
    """

    configs: TrainingConfig
    context: pytorch.PyTorchTrialContext
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    predictions: Sequence[Prediction]
    _move: Callable[[Any], Any]
    _losses: LossPlan
    clip_gradients: ClipGrads | None
    _takes_index: bool | None = None

    def load_data_and_get_loss(
        self, data_and_labels: Any, loss_buffer: list[Any]
    ) -> tuple[list[Any], Tensor, list[Tensor], list[Any]]:
        """Return the losses of a batch.

        Args:
            data_and_labels: The loader's batch.
            loss_buffer: Zeros, for the values of the losses, as `get_epoch_loss_buffer` returns
                them.

        Returns:
            The losses' values, the total to train on, predictions and labels.
        """
        data, labels = self.divided(data_and_labels)
        # Loops of a subclass's own call this too.
        with self.context.stepper.autocast():
            preds = self._ordered(self.model(*data))
            loss_buffer, total = self.compute_losses(loss_buffer, preds, labels)
        return loss_buffer, total, preds, labels

    def divided(self, data_and_labels: Any) -> tuple[list[Any], list[Any]]:
        """Return the result of `process_data_loader_yield`, called with an index if accepted.

        Args:
            data_and_labels: The loader's batch, a list of items.
        """
        if self._takes_index is None:
            parameters = inspect.signature(self.process_data_loader_yield).parameters
            kinds = [parameter.kind for parameter in parameters.values()]
            takes_any = inspect.Parameter.VAR_KEYWORD in kinds
            self._takes_index = takes_any or "data_label_separation_index" in parameters
        if not self._takes_index:
            return self.process_data_loader_yield(data_and_labels)
        index = self.configs.data_label_separation_index
        return self.process_data_loader_yield(data_and_labels, data_label_separation_index=index)

    def process_data_loader_yield(
        self, data_and_labels: Any, data_label_separation_index: Any = _OF_CONFIG
    ) -> tuple[list[Any], list[Any]]:
        """Return the inputs and the labels of a batch, on the device.

        Args:
            data_and_labels: The loader's batch, a list of items.
            data_label_separation_index: The number of items that are inputs, None for all; that of
                the config by default.
        """
        if type(self).move_to_device is Step.move_to_device:
            # Whole batch at once: cheapest when all items are on the device, as with a CPU.
            items = self._move(data_and_labels)
        else:
            items = [self.move_to_device(item) for item in data_and_labels]
        index = data_label_separation_index
        if index is _OF_CONFIG:
            index = self.configs.data_label_separation_index
        return (items, []) if index is None else (items[:index], items[index:])

    def move_to_device(self, var: Any) -> Any:
        """Return an item of a batch on the device."""
        return pytorch.to_device(var, self.device)

    def compute_losses(
        self, loss_records: list[Any], preds: list[Tensor], labels: list[Any]
    ) -> tuple[list[Any], Tensor]:
        """Return the values of the losses, the total first, and the total to train on.

        Args:
            loss_records: Zeros, to be filled or added to.
            preds: The predictions in order.
            labels: Their labels.
        """
        named = self.get_pred_dict(preds) if self._losses.takes_names else {}
        values = self._losses.compute(preds, labels, named)
        loss_records[: len(values)] = values
        return loss_records, values[0]

    def get_pred_dict(self, preds: list[Tensor]) -> dict[str, Tensor]:
        """Return the predictions by name, for regularizers."""
        return {prediction.name: preds[i] for i, prediction in enumerate(self.predictions)}

    def get_epoch_loss_buffer(self) -> list[Any]:
        """Return zeros for the total and each term."""
        return [0.0] * (len(self._losses.terms) + 1)

    def reports_one_loss(self) -> bool:
        """Return whether the total is the loss of the only prediction, and computed as usual."""
        return self._losses.has_one_loss and self._keeps("compute_losses")

    def is_plain(self) -> bool:
        """Return whether `train_plainly` has the same effect as a full step."""
        has_one_loss = self._losses.has_one_loss and len(self.predictions) == 1
        return has_one_loss and self._keeps(
            "load_data_and_get_loss",
            "process_data_loader_yield",
            "move_to_device",
            "compute_losses",
            "get_epoch_loss_buffer",
            "run_model_update_step",
        )

    def is_overridden(self, *names: str) -> bool:
        """Return whether a subclass or this object has any of some methods of its own."""
        return any(
            name in vars(self) or not getattr(type(self), name).__module__.startswith("paceline.")
            for name in names
        )

    def _keeps(self, *names: str) -> bool:
        """Return whether methods of this class are overridden neither by a subclass nor here."""
        kind, own = type(self), vars(self)
        return all(getattr(kind, name) is getattr(Step, name) and name not in own for name in names)

    def train_plainly(self, data_and_labels: Any) -> tuple[Tensor, list[Tensor], list[Any]]:
        """Take a step as the methods of this class do, if none is overridden, at less cost.

        Such calls would take a large part of a small model's step.

        Args:
            data_and_labels: The loader's batch.

        Returns:
            The loss, the only prediction and the labels, as lists.
        """
        items, index = self._move(data_and_labels), self.configs.data_label_separation_index
        pred, labels = self.model(*items[:index]), items[index:]
        if type(pred) is not Tensor:
            pred = self._ordered(pred)[0]
        loss = self._losses.compute_one(pred, labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, self.clip_gradients)
        return loss, [pred], labels

    def run_model_update_step(self, loss_node: Tensor) -> None:
        """Go backward, and step the optimizer where a step is due.

        Args:
            loss_node: The total loss.
        """
        self.context.backward(loss_node)
        self.context.step_optimizer(self.optimizer, self.clip_gradients)

    def _ordered(self, returned: Any) -> list[Tensor]:
        """Return the model's outputs as a list in the order of the names.

        Raises:
            ValueError: There are not as many as names, or a name is missing.
        """
        if isinstance(returned, Tensor):
            preds = [returned]
        elif isinstance(returned, Mapping):
            names = [prediction.name for prediction in self.predictions]
            if missing := [name for name in names if name not in returned]:
                raise ValueError(
                    f"The model must return the prediction {missing[0]!r}, but returns"
                    f" {', '.join(map(str, returned))}."
                )
            preds = [returned[name] for name in names]
        else:
            preds = list(returned)
        if len(preds) != len(self.predictions):
            raise ValueError(
                f"The model must return {len(self.predictions)} predictions, as `pred_names` has"
                f" so many, but returns {len(preds)}."
            )
        return preds
