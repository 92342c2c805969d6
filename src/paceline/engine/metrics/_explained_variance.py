"""Explained variance of labels, without keeping predictions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.engine.metrics._metric_reducers import MetricReducer


class ExplainedVariance(MetricReducer):
    """R squared of several predictions, averaged over their values.

    Batches and ranks are merged by their means and squared deviations, in double precision.

    Args:
        names: The predictions.
        name_of: Returns a metric's name for a prediction's.
    """

    def __init__(self, names: Sequence[str], name_of: Callable[[str], str]) -> None:
        self._names = tuple(names)
        self._name_of = name_of
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, name: str, pred: Tensor, label: Tensor) -> None:
        """Add a batch of a prediction; both are [batch, ...] of the same size."""
        with torch.no_grad():
            found, right = (x.detach().double().flatten(1) for x in _label_columns(pred, label))
            mean = right.mean(0)
            batch = [
                # `torch.tensor` would wait for a GPU.
                torch.full((), float(len(right)), dtype=torch.float64, device=right.device),
                mean,
                (right - mean).square().sum(0),
                (right - found).square().sum(0),
            ]
        held = self._sums.get(name)
        self._sums[name] = batch if held is None else _merged_variance(held, batch)

    def reset(self) -> None:
        """Forget what was collected."""
        self._sums = {}

    def per_slot_reduce(self) -> Any:
        """Return this rank's sums."""
        return {name: [part.cpu() for part in parts] for name, parts in self._sums.items()}

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> dict[str, float]:
        """Return R squared by metric name; 0 where labels do not vary."""
        metrics = {}
        for name in self._names:
            shares = [share[name] for share in per_slot_metrics if name in share]
            if not shares:
                continue
            total = shares[0]
            for share in shares[1:]:
                total = _merged_variance(total, share)
            _, _, variance, error = total
            explained = 1 - error / variance
            explained = torch.where(variance > 0, explained, (error == 0).double())
            metrics[self._name_of(name)] = explained.mean().item()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, for a checkpoint."""
        return {"sums": self.per_slot_reduce()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._sums = {name: list(parts) for name, parts in state_dict["sums"].items()}


def _label_columns(pred: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    if pred.numel() != label.numel():
        raise ValueError(
            "An accuracy of a regression needs a label for each value, but the prediction is"
            f" {list(pred.shape)} and the label {list(label.shape)}. Hint: task_type=None leaves"
            " accuracies out."
        )
    rows = len(label)
    return pred.reshape(rows, -1), label.reshape(rows, -1)


def _merged_variance(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    size, mean, variance, error = (part.to(other[0].device) for part in one)
    total = size + other[0]
    step = other[1] - mean
    return [
        total,
        mean + step * (other[0] / total),
        variance + other[2] + step.square() * (size * other[0] / total),
        error + other[3],
    ]
