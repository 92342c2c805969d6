"""Metrics of torchmetrics as reducers."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline._training.engine.metric_reducers import MetricReducer


def is_torchmetric(value: object) -> bool:
    """Return whether a value is a metric of torchmetrics, or a collection of metrics."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, (library.Metric, library.MetricCollection))


class TorchmetricReducer(MetricReducer):
    """Reducer of a metric of torchmetrics, or of a `MetricCollection`; feed it by `update`.

    The states of all ranks are put together by the metric's own functions, and a copy computes the
    result. The metric itself never synchronises.

    Args:
        metric: The metric. It stays usable by itself, and moves to the device of what `update`
            gets first.
    """

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the metric."""
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        if (first := next(given, None)) is not None:
            self.metric.to(first.device)
        self.metric.update(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Update the metric; unlike torchmetrics' call, return no value of the batch."""
        self.update(*args, **kwargs)

    def reset(self) -> None:
        self.metric.reset()

    def per_slot_reduce(self) -> Any:
        return self.state_dict()["parts"]

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        whole = self.metric.clone().cpu()
        for metric, shares in zip(_parts(whole), zip(*per_slot_metrics, strict=True), strict=True):
            metric.distributed_available_fn = _alone
            for name, function in metric._reductions.items():
                setattr(metric, name, _merged(function, [each["states"][name] for each in shares]))
            metric._update_count = sum(each["count"] for each in shares)
            metric._computed = None
        return _plain(whole.compute())

    def state_dict(self) -> dict[str, Any]:
        if hasattr(self.metric, "compute_groups"):
            # Metrics of a group share one metric's states, until they are asked for copies.
            list(self.metric.values())
        return {
            "parts": [
                {
                    "states": {name: _copied(state) for name, state in part.metric_state.items()},
                    "count": part.update_count,
                }
                for part in _parts(self.metric)
            ]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for metric, part in zip(_parts(self.metric), state_dict["parts"], strict=True):
            for name, state in part["states"].items():
                setattr(metric, name, _copied(state, metric.device))
            metric._update_count = part["count"]
            metric._computed = None


def _parts(metric: Any) -> Iterator[Any]:
    """Yield the metrics that a metric or a collection consists of, itself included."""
    kind = sys.modules["torchmetrics"].Metric
    return (each for each in metric.modules() if isinstance(each, kind))


def _copied(state: Any, device: Any = "cpu") -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to(device, copy=True)
    return [_copied(each, device) for each in state]


def _merged(function: Any, states: list[Any]) -> Any:
    """Return one state for those of all ranks, in the order of the ranks."""
    if isinstance(states[0], list):
        return [each for state in states for each in state]
    stacked = torch.stack(states)
    return stacked if function is None else function(stacked)


def _alone() -> bool:
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value
