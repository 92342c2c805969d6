"""Training step in methods for subclasses to override, and samples as its batches."""

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from paceline import pytorch
from paceline._training.engine.optimizer_stepper import ClipGrads
from paceline.data._default_batches import collate_samples
from paceline.data._order_and_random_generators import note_samples
from paceline.declarative._config_object import TrainingConfig
from paceline.declarative._losses import LossPlan, Prediction

logger = logging.getLogger(__name__)


Collate: TypeAlias = Callable[[Any], list[Any]]


def split(dataset: Any, validation_ratio: float, seed: int) -> tuple[Any, Any]:
    """Split a data set at random, as the seed and its length decide.

    Raises:
        ValueError: One part would be empty.
    """
    size = len(dataset)
    num_validated = math.ceil(validation_ratio * size)
    if not 0 < num_validated < size:
        raise ValueError(
            f"`validation_ratio` must leave samples for training and for validation, but"
            f" {validation_ratio} of {size} are {num_validated}. Hint: give `training_dataset`"
            " and `validation_dataset`."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator).tolist()
    return Subset(dataset, order[num_validated:]), Subset(dataset, order[:num_validated])


class SampleForm(Enum):
    """How a data set gives its samples."""

    # Each sample is a tuple or a single item, without an axis for the samples.
    PLAIN = "plain"
    # Every tensor has a first axis of size 1, along which batches are concatenated.
    LEADING_AXIS = "with a leading sample axis"
    # `__getitems__` gives whole batches, item by item.
    BATCHES = "whole batches"


def form_of(dataset: Any, name: str, num_inputs: int | None, is_leading: bool | None) -> SampleForm:
    """Look at the first sample of a data set.

    Args:
        dataset: The data set.
        name: Its name, for messages.
        num_inputs: The items of a sample before its labels; None without labels.
        is_leading: Whether tensors have a first axis of size 1; None to find it out.

    Raises:
        ValueError: The data set is empty, a sample has too few items, or one lacks the first axis.
    """
    if not len(dataset):
        raise ValueError(f"`{name}` must have samples, but is empty.")
    if type(dataset) is Subset:
        # Subsets fetch through the data set below, so that data set decides the form.
        return form_of(dataset.dataset, name, num_inputs, is_leading)
    fetch = getattr(dataset, "__getitems__", None)
    try:
        found = dataset[0] if fetch is None else fetch([0])
    except Exception as error:
        note_samples(error, dataset, [0])
        raise
    is_batch = fetch is not None and not (
        isinstance(found, list) and len(found) == 1 and isinstance(found[0], (tuple, list))
    )
    sample = found if fetch is None or is_batch else found[0]
    items = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    if num_inputs is not None and len(items) <= num_inputs:
        raise ValueError(
            f"A sample of `{name}` must have labels from item {num_inputs} on, as"
            f" `data_label_separation_index` is {num_inputs}, but has {len(items)} item(s)."
        )
    if is_batch:
        return SampleForm.BATCHES
    if is_leading is None:
        is_leading = _looks_leading(items[:num_inputs], items)
        logger.log(
            logging.INFO if name == "training_dataset" else logging.DEBUG,
            "The samples of `%s` are taken as %s axis of size 1 for samples."
            " `leading_sample_axis` says otherwise.",
            name,
            "tensors with a first" if is_leading else "ordinary ones, without an",
        )
    elif is_leading and any(not torch.as_tensor(item).dim() for item in items):
        raise ValueError(
            "`leading_sample_axis` must be False or None, as an item of a sample of"
            f" `{name}` has no axis."
        )
    return SampleForm.LEADING_AXIS if is_leading else SampleForm.PLAIN


def _looks_leading(inputs: Sequence[Any], items: Sequence[Any]) -> bool:
    """Return whether all tensors have a first axis of size 1, and an input has more axes."""
    shapes = [tuple(getattr(item, "shape", ())) for item in items]
    has_more = any(len(getattr(item, "shape", ())) > 1 for item in inputs)
    return has_more and all(shape[:1] == (1,) for shape in shapes)


def collate_of(form: SampleForm) -> Collate:
    """Return the collate function of a form: samples to a list of batched items.

    It is called with every step, so the form is asked for once.
    """
    return _COLLATES[form]


def _join_plain(samples: Any) -> list[Any]:
    batch = collate_samples(samples)
    return batch if isinstance(batch, list) else [batch]


def _join_leading(samples: Any) -> list[Any]:
    rows = [_as_items(sample) for sample in samples]
    return [torch.cat(list(map(torch.as_tensor, item))) for item in zip(*rows, strict=True)]


def _take_batch(samples: Any) -> list[Any]:
    return [torch.as_tensor(item) for item in _as_items(samples)]


_COLLATES: dict[SampleForm, Collate] = {
    SampleForm.PLAIN: _join_plain,
    SampleForm.LEADING_AXIS: _join_leading,
    SampleForm.BATCHES: _take_batch,
}


def _as_items(sample: Any) -> Sequence[Any]:
    return sample if isinstance(sample, (tuple, list)) else (sample,)


def loader_of(
    dataset: Any,
    form: SampleForm,
    *,
    num_workers: int,
    batch_size: int,
    is_shuffled: bool,
    pins: bool,
) -> "DataLoader[Any]":
    """Return a loader of a shard's batches.

    Args:
        dataset: The data.
        form: How it gives its samples.
        num_workers: Processes that load.
        batch_size: Samples of a batch.
        is_shuffled: Whether the order changes from epoch to epoch.
        pins: Whether batches are put into pinned memory.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=is_shuffled,
        num_workers=num_workers,
        pin_memory=pins,
        collate_fn=collate_of(form),
    )


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
