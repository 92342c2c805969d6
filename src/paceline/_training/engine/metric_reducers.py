"""Reducers of metrics over batches and ranks: functions, explained variance, torchmetrics."""

import copy
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline._training.engine.checkpoints.state_format import is_storable
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.weighted_means import REFERENCE
from paceline.core._distributed_context import DistributedContext

logger = logging.getLogger(__name__)


class Reducer(Enum):
    """Method of combining a validation metric over batches and ranks.

    AVG weights by samples; the others take the batches' values as they are.
    """

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4


class MetricReducer(ABC):
    """Base class of metrics without a simple mean; feed in `train_batch` or `evaluate_batch`.

    Values collected for training are part of checkpoints and survive a validation. Wrapped
    models and optimizers that it refers to are neither copied nor stored.
    """

    @abstractmethod
    def reset(self) -> None:
        """Clear the collected values."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return this rank's share, a picklable value."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric from all ranks' shares, in rank order; runs on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the collected values for a checkpoint: all attributes, unless overridden."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        vars(self).update(state_dict)


class _FunctionReducer(MetricReducer):
    """Collect values and hand them all to a function, in the order of the samples.

    Args:
        function: What makes the metric of the values.
        holder: What knows the present global batch.
    """

    def __init__(self, function: Callable[[list[Any]], Any], holder: "ReducerSet") -> None:
        self._function = function
        self._holder = holder
        # Each with its global batch.
        self._values: list[tuple[int, Any]] = []

    def update(self, value: Any) -> None:
        """Collect a value."""
        self._values.append((self._holder.batch, value))

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> Any:
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        values = list(chain.from_iterable(per_slot_metrics))
        if len(per_slot_metrics) > 1:
            # A rank runs neighbouring shards of a global batch, and the next rank those after them.
            values.sort(key=itemgetter(0))
        return self._function([value for _, value in values])

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": [value for _, value in self._values],
            "batches": [batch for batch, _ in self._values],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values = list(zip(state_dict["batches"], state_dict["values"], strict=True))


class ReducerSet:
    """Set of the reducers of a training.

    Args:
        stepper: What knows the models and optimizers.

    Attributes:
        batch: The global batch that is being trained or evaluated, if there are several ranks.
    """

    def __init__(self, stepper: Stepper | None = None) -> None:
        self.batch = 0
        self._stepper = stepper
        self._entries: list[tuple[MetricReducer, str | None, bool, bool]] = []
        self._has_warned = False

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None,
        *,
        for_training: bool,
        for_validation: bool,
    ) -> MetricReducer:
        """Register a reducer and return the object to feed with values."""
        wrapped = self._as_reducer(reducer)
        given = [getattr(entry[0], "metric", entry[0]) for entry in self._entries]
        if any(reducer is each for each in given):
            raise ValueError("A reducer must be wrapped once only, but this one was before.")
        self._entries.append((wrapped, name, for_training, for_validation))
        return wrapped

    def _as_reducer(self, reducer: MetricReducer | Callable[..., Any]) -> MetricReducer:
        # Imported late, as that module imports this one.

        if isinstance(reducer, MetricReducer):
            return reducer
        if is_torchmetric(reducer):
            return TorchmetricReducer(reducer)
        return _FunctionReducer(reducer, self)

    def reset(self) -> None:
        """Clear the collected values of all reducers."""
        for reducer, *_ in self._entries:
            reducer.reset()

    def reduce(self, distributed: DistributedContext, *, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the training or validation reducers; every rank must call."""
        if not self._chosen(for_training=for_training):
            return {}
        shares: Sequence[Any] = distributed.allgather(self.shares(for_training=for_training))
        if self._stepper is not None:
            shares = self._stepper.grid.one_per_group(shares)
        return self.combined(shares, for_training=for_training)

    def shares(self, *, for_training: bool) -> list[Any]:
        """Return this rank's share of each training or validation reducer."""
        return [entry[0].per_slot_reduce() for entry in self._chosen(for_training=for_training)]

    def combined(self, shares: Sequence[Sequence[Any]], *, for_training: bool) -> dict[str, Any]:
        """Return the training or validation metrics from the shares of all ranks."""
        metrics: dict[str, Any] = {}
        for index, (reducer, name, *_) in enumerate(self._chosen(for_training=for_training)):
            value = reducer.cross_slot_reduce([share[index] for share in shares])
            metrics.update(_named_metrics(name, value))
        return metrics

    def _chosen(self, *, for_training: bool) -> list[tuple[MetricReducer, str | None, bool, bool]]:
        return [entry for entry in self._entries if entry[2 if for_training else 3]]

    def state(self) -> list[dict[str, Any]]:
        """Return copies of all reducers' collected values."""
        known = {id(reference): reference for reference in self._references()}
        return [_copied_metric(entry[0], known) for entry in self._entries]

    def load_state(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore states of the same reducers, from `state` or `storable_state`."""
        if len(states) != len(self._entries):
            self._warn(
                f"The state of {len(states)} reducers does not fit {len(self._entries)}: they begin"
                " anew."
            )
            return
        for (reducer, *_), state in zip(self._entries, states, strict=True):
            if state is not None:
                reducer.load_state_dict(state)

    def storable_state(self) -> list[dict[str, Any] | None]:
        """Return states like `state`, with None for values unfit for a checkpoint."""
        known = {id(reference): REFERENCE for reference in self._references()}
        copies = [_copied_metric(entry[0], known) for entry in self._entries]
        collected = [
            {name: value for name, value in state.items() if value is not REFERENCE}
            for state in copies
        ]
        states = [state if is_storable(state) else None for state in collected]
        if None in states and not self._has_warned:
            self._has_warned = True
            reducer = self._entries[states.index(None)][0]
            self._warn(
                f"What {type(reducer).__name__} collects between reports is not part of"
                " checkpoints: its `state_dict()` must consist of tensors and plain values."
            )
        return states

    def _warn(self, text: str) -> None:
        """Log a warning on the first rank only, as all ranks find the same."""
        if self._stepper is None or self._stepper.grid.rank == 0:
            logger.warning("%s", text)

    def _references(self) -> list[Any]:
        """Return objects referenced by reducers but not collected: models, parts, optimizers."""
        if self._stepper is None or not self._entries:
            return []
        references: list[Any] = [*self._stepper.optimizers]
        for model in self._stepper.models:
            references += [*model.modules(), *model.parameters(), *model.buffers()]
        return references


class _DetachedCopies(TorchFunctionMode):
    """Mode copying tensors without their autograd graph; torch refuses to copy them otherwise."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _copied_metric(reducer: MetricReducer, known: dict[int, Any]) -> dict[str, Any]:
    """Return a copy of a reducer's state.

    Args:
        reducer: The reducer.
        known: What stands for objects that are not copied, by their identity.
    """
    copies = {}
    for name, value in reducer.state_dict().items():
        try:
            with _DetachedCopies():
                copies[name] = copy.deepcopy(value, known.copy())
        except TypeError:
            # Object unfit for copying, for example a context or a lock: no collected value.
            copies[name] = value
    return copies


def _named_metrics(name: str | None, value: Any) -> dict[str, Any]:
    if name is None:
        if not isinstance(value, dict):
            raise TypeError(
                "A reducer wrapped with name=None must return a dictionary, but it did not return"
                f" a dict: {value!r}."
            )
        return value
    if isinstance(value, dict):
        raise TypeError(
            f"The reducer {name!r} must return one value, but with name set it returned a dict"
            " anyway."
        )
    return {name: value}


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
        """Clear the collected values."""
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
        """Restore a state returned by `state_dict`."""
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
