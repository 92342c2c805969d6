"""Losses from predictions and labels: the loss and the weight of each prediction."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# These broadcast what does not fit, and train on nonsense without an error.
_BY_ELEMENT = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
)


class Prediction(NamedTuple):
    """One output of the model; `kind` is "cls" or "regr"."""

    name: str
    kind: str


class _Regularizer(NamedTuple):
    function: Callable[..., Any]
    takes_names: bool


class LossPlan:
    """Compute the losses of a batch.

    Args:
        given: One loss for all predictions, or a tuple of one for each, followed by regularizers.
        weights: What they are multiplied by: one number, or a tuple of one for each.
        predictions: What the model returns.
        has_labels: Whether samples have labels.
        losses_of_classes: The types of losses whose labels may be indices of classes.

    Attributes:
        terms: The names of the losses that make up the total.
        takes_names: Whether a regularizer takes predictions by name.
        has_one_loss: Whether the total is the loss of the only prediction.

    Raises:
        ValueError: There are too few losses, or not as many weights as losses.
        TypeError: A regularizer takes other arguments than the predictions.
    """

    def __init__(
        self,
        given: Any,
        weights: Any,
        predictions: Sequence[Prediction],
        *,
        has_labels: bool,
        losses_of_classes: tuple[type, ...],
    ) -> None:
        self._predictions = predictions
        self._checked_losses = (*losses_of_classes, *_BY_ELEMENT)
        names = [prediction.name for prediction in predictions]
        num_direct = len(names) if has_labels else 0
        losses = given if isinstance(given, tuple) else (given,) * max(1, num_direct)
        if len(losses) < num_direct:
            raise ValueError(
                f"`loss_function` must have a loss for each of the {num_direct} predictions"
                f" {', '.join(names)}, but has {len(losses)}."
            )
        self._direct = losses[:num_direct]
        self._regularizers = [
            _Regularizer(loss, _takes_names(loss, names, f"loss_function[{num_direct + index}]"))
            for index, loss in enumerate(losses[num_direct:])
        ]
        self.takes_names = any(regularizer.takes_names for regularizer in self._regularizers)
        self.weights = _weights_of(weights, len(losses))
        is_only_total = not has_labels and len(losses) == 1
        self.has_one_loss = has_labels and len(losses) == 1 and self.weights[0] == 1.0
        self.terms = [] if is_only_total else names[:num_direct]
        if not is_only_total:
            self.terms += [f"regularizer_{i}" for i in range(1, len(self._regularizers) + 1)]

    def compute(
        self, preds: Sequence[Tensor], labels: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Return the total and each term, with weights.

        Args:
            preds: The predictions in order.
            labels: The labels of as many.
            named: The predictions by name, for regularizers.

        Raises:
            ValueError: There are too few labels, or one has the wrong shape.
        """
        if self.has_one_loss:
            value = self.compute_one(preds[0], labels)
            return [value, value]
        self._check_number(labels)
        values: list[Tensor] = []
        for index, loss in enumerate(self._direct):
            pred, weight = preds[index], self.weights[index]
            value = loss(pred, self.fit(labels[index], pred, index))
            values.append(value if weight == 1.0 else weight * value)
        for regularizer, weight in zip(
            self._regularizers, self.weights[len(self._direct) :], strict=True
        ):
            function = regularizer.function
            value = function(**named) if regularizer.takes_names else function(*preds)
            values.append(value if weight == 1.0 else weight * value)
        total = values[0]
        for value in values[1:]:
            total = total + value
        return [total, *values] if self.terms else [total]

    def compute_one(self, pred: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """Return the loss of the only prediction.

        Args:
            pred: The prediction.
            labels: The labels, of which the first is its.

        Raises:
            ValueError: There is no label, or it has the wrong shape.
        """
        if not labels:
            self._check_number(labels)
        label = labels[0]
        if label.dtype != pred.dtype or label.shape != pred.shape:
            label = self.fit(label, pred, 0)
        value: Tensor = self._direct[0](pred, label)
        return value

    def _check_number(self, labels: Sequence[Tensor]) -> None:
        if len(labels) < len(self._direct):
            raise ValueError(
                f"A sample must have a label for each of the {len(self._direct)} predictions, but"
                f" has {len(labels)}. Hint: labels begin at item `data_label_separation_index`."
            )

    def fit(self, label: Tensor, pred: Tensor, index: int) -> Tensor:
        """Return a label in the type that the loss wants.

        Raises:
            ValueError: Its shape does not fit the prediction.
        """
        if label.shape == pred.shape:
            return label if label.dtype == pred.dtype else label.to(pred.dtype)
        name, kind = self._predictions[index]
        loss = self._direct[index]
        is_index = label.shape == pred.shape[:1] + pred.shape[2:]
        if kind == "cls" and is_index and not isinstance(loss, _BY_ELEMENT):
            return label.long()
        is_strict = isinstance(loss, self._checked_losses)
        if is_strict or label.shape[:1] != pred.shape[:1]:
            raise ValueError(_misfit(name, kind, pred, label))
        return label.to(pred.dtype) if label.is_floating_point() else label


def _misfit(name: str, kind: str, pred: Tensor, label: Tensor) -> str:
    wanted = f"{list(pred.shape)}"
    if kind == "cls":
        wanted += f" as one-hot or {list(pred.shape[:1] + pred.shape[2:])} as indices"
    return (
        f"The label of `{name}` must have the shape {wanted}, as the prediction is"
        f" {list(pred.shape)}, but got {list(label.shape)}. Hint: the first axis is that of the"
        " samples of a batch."
    )


def _weights_of(given: Any, num_losses: int) -> tuple[float, ...]:
    if not isinstance(given, tuple):
        return (given,) * num_losses
    if len(given) != num_losses:
        raise ValueError(
            f"`loss_weights` must be one number or one for each of the {num_losses} losses, but got"
            f" {list(given)!r}."
        )
    return given


def _takes_names(loss: Callable[..., Any], names: Sequence[str], field: str) -> bool:
    """Tell whether a regularizer is called by keyword, else by position; from its signature."""
    target = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(target)
    except ValueError:
        # Functions in C may have none.
        return False
    if _binds(signature, (), dict.fromkeys(names)):
        return True
    if _binds(signature, tuple(names), {}):
        return False
    raise TypeError(
        f"`{field}` is a regularizer and must take the {len(names)} predictions"
        f" {', '.join(names)}, but takes {signature}."
    )


def _binds(signature: inspect.Signature, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True


def accuracy(pred: Tensor, label: Tensor) -> Tensor:
    """Return the part of the samples whose most likely class is the right one.

    Args:
        pred: Scores [batch, classes, ...].
        label: One-hot or probabilities of the same shape, or indices [batch, ...].
    """
    with torch.no_grad():
        right = label.argmax(1) if label.dim() == pred.dim() else label
        return (pred.argmax(1) == right).double().mean()
