"""Losses: their plan from predictions and labels, classes, history."""

import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline._base.files import replacing_atomically

logger = logging.getLogger(__name__)


class NegativeCosineSimilarity(nn.Module):
    """The mean of minus the cosine between two batches of vectors [batch, features].

    Args:
        stop_gradient: Whether the second one counts as a constant.
    """

    def __init__(self, stop_gradient: bool = True) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient

    def forward(self, p: Tensor, z: Tensor) -> Tensor:
        """Return a number from -1 to 1."""
        target = z.detach() if self.stop_gradient else z
        return -nn.functional.cosine_similarity(p, target, dim=1).mean()


class SymmetricNegativeCosineSimilarity(nn.Module):
    """The loss of SimSiam: of two views' predictions p and projections z, crosswise."""

    def __init__(self) -> None:
        super().__init__()
        self._one_way = NegativeCosineSimilarity()

    def forward(self, p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        """Return a number from -1 to 1."""
        loss: Tensor = (self._one_way(p1, z2) + self._one_way(p2, z1)) / 2
        return loss


class MarginLoss(nn.Module):
    """The margin loss of capsule networks, summed over classes.

    Args:
        m_plus: Lengths of the right class count below this.
        m_minus: Lengths of other classes count above this.
        negative_weight: The factor of other classes.
    """

    def __init__(
        self, m_plus: float = 0.9, m_minus: float = 0.1, negative_weight: float = 0.5
    ) -> None:
        super().__init__()
        self.m_plus = m_plus
        self.m_minus = m_minus
        self.negative_weight = negative_weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over samples, given lengths and one-hot labels [batch, classes]."""
        right = labels * (self.m_plus - x).clamp_min(0) ** 2
        others = (1 - labels) * (x - self.m_minus).clamp_min(0) ** 2
        return (right + self.negative_weight * others).sum(1).mean()


class TotalVariationLoss(nn.Module):
    """A regularizer: the mean step between neighbouring pixels of images [batch, channel, y, x].

    Args:
        weight: The factor of the sum over all images.
    """

    def __init__(self, weight: float = 0.1) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, *images: Tensor, **named_images: Tensor) -> Tensor:
        """Return the sum over all predictions."""
        total = torch.zeros(())
        for image in (*images, *named_images.values()):
            steps = image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()
            total = total.to(steps.device) + steps
        return self.weight * total


_TYPES = ("loss", "val_loss", "test_loss")


class LossTracker(dict[str, Any]):
    """Losses by epoch, in lists by name.

    `loss`, `val_loss` and `test_loss` are totals, and with `_<name>` behind them the losses of each
    prediction and regularizer; `train_acc_<name>`, `val_acc_<name>` and `test_acc_<name>` are
    accuracies, `epochs` the epochs, and `lrs` the learning rates after each batch.
    `best_val_loss` is the least total of validations, `epoch_best_val_loss` its epoch, and
    `best_val_loss_<name>` are the parts of that one.

    Args:
        pred_names: The names of the predictions.
        terms: The names of all losses that make up the total; the predictions by default.
    """

    def __init__(self, pred_names: Sequence[str], terms: Sequence[str] | None = None) -> None:
        super().__init__()
        self.pred_names = tuple(pred_names)
        self.terms = tuple(pred_names if terms is None else terms)
        for name in ("epochs", *_TYPES, "lrs"):
            self[name] = []
        self["best_val_loss"], self["epoch_best_val_loss"] = math.inf, 0
        for term in self.terms:
            self.update({f"{kind}_{term}": [] for kind in _TYPES})
            self[f"best_val_loss_{term}"] = math.inf
        for name in self.pred_names:
            self.update({f"{part}_acc_{name}": [] for part in ("train", "val", "test")})

    @property
    def current_epoch(self) -> int:
        """The last trained epoch, from 0; -1 before the first."""
        return self["epochs"][-1] if self["epochs"] else -1

    def update_losses(
        self,
        losses: Sequence[float],
        type: str = "loss",
        epoch: int | None = None,
        lr: float | None = None,
    ) -> bool:
        """Add the losses of an epoch.

        Args:
            losses: The total, then each term.
            type: "loss", "val_loss" or "test_loss".
            epoch: The epoch; the next one by default. Training losses begin a new one.
            lr: A learning rate to add.

        Returns:
            Whether it is the least total of validations so far.

        Raises:
            ValueError: `type` is unknown, or there are not as many losses as terms.
        """
        if type not in _TYPES:
            raise ValueError(f"`type` must be one of {', '.join(_TYPES)}, but got {type!r}.")
        if len(losses) != len(self.terms) + 1:
            raise ValueError(
                f"`losses` must hold the total and {len(self.terms)} terms, but got {losses!r}."
            )
        if type == "loss":
            self["epochs"].append(self.current_epoch + 1 if epoch is None else epoch)
        if lr is not None:
            self["lrs"].append(lr)
        self[type].append(losses[0])
        for term, value in zip(self.terms, losses[1:], strict=True):
            self[f"{type}_{term}"].append(value)
        if type != "val_loss" or not losses[0] < self["best_val_loss"]:
            return False
        self["best_val_loss"] = losses[0]
        self["epoch_best_val_loss"] = self.current_epoch if epoch is None else epoch
        for term, value in zip(self.terms, losses[1:], strict=True):
            self[f"best_val_loss_{term}"] = value
        return True

    def update_accuracies(self, metrics: Mapping[str, Any], part: str) -> None:
        """Add an epoch's accuracies, `<part>_acc_<name>`, found among its metrics.

        Args:
            metrics: The metrics by name.
            part: "train", "val" or "test".
        """
        for name in self.pred_names:
            key = f"{part}_acc_{name}"
            if key in metrics:
                self[key].append(metrics[key])

    def get_all_losses(self, type: str = "loss") -> list[list[float]]:
        """Return the histories of the total and the terms.

        Args:
            type: "loss", "val_loss" or "test_loss".
        """
        return [self[type], *(self[f"{type}_{term}"] for term in self.terms)]

    def get_metric_names_for_hyperparam_tuning(self) -> list[str]:
        """Return the names of the metrics for a search to minimise."""
        best = [f"best_val_loss_{term}" for term in self.terms]
        return ["best_val_loss", *best, "epoch_best_val_loss"]

    def print_losses(self) -> None:
        """Log the losses of the last epoch, numbered from 1 in the log."""
        epoch = self.current_epoch + 1
        for term in ("", *(f"_{term}" for term in self.terms)):
            shown = [
                f"{label} {self[f'{kind}{term}'][-1]:.5g}"
                for kind, label in zip(_TYPES, ("training", "validation", "test"), strict=True)
                if self[f"{kind}{term}"]
            ]
            name = f" of {term[1:]}" if term else ""
            logger.info("Epoch %d: loss%s: %s", epoch, name, ", ".join(shown))

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write all as lines `name = value`, with values as JSON.

        Args:
            path: The file; it is replaced as a whole.
        """
        with replacing_atomically(Path(path)) as file:
            file.write_text("".join(f"{key} = {json.dumps(self[key])}\n" for key in self))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file written by `dump`.

        Raises:
            ValueError: The file holds something else.
        """
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            name, equals, text = line.partition(" = ")
            try:
                self[name] = json.loads(text)
            except ValueError:
                equals = ""
            if not equals:
                raise ValueError(
                    f"`path` must hold lines `name = value`, but line {number} of {path} is"
                    f" {line[:80]!r}."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return all for a checkpoint."""
        return {**self, "lrs": torch.tensor(self["lrs"], dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.update(state)
        self["lrs"] = state["lrs"].tolist()


# Element-wise losses broadcast a misshapen label and train on nonsense without an error.
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
    """Output of the model; `kind` is "cls" or "regr"."""

    name: str
    kind: str


class _Regularizer(NamedTuple):
    function: Callable[..., Any]
    takes_names: bool


class LossPlan:
    """Compute the losses of a batch.

    Args:
        given: One loss for all predictions, or a tuple of one for each, followed by regularizers.
        weights: Their factors: one number, or a tuple of one for each.
        predictions: The model's output.
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
        """Return a label converted to the type expected by the loss.

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
    """Return whether a regularizer is called by keyword, else by position; from its signature."""
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
    """Return the share of samples with the correct most likely class.

    Args:
        pred: Scores [batch, classes, ...].
        label: One-hot or probabilities of the same shape, or indices [batch, ...].
    """
    with torch.no_grad():
        right = label.argmax(1) if label.dim() == pred.dim() else label
        return (pred.argmax(1) == right).double().mean()
