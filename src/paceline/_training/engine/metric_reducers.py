"""Reducers of metrics over batches and ranks, explained variance.

Weighted means of metrics, kept on the device during the loop and reduced for reports.

Metrics of torchmetrics as reducers.
"""

import copy
import logging
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, chain, repeat
from math import isfinite
from operator import itemgetter, mul
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline._training.engine.checkpoints.state_files import is_storable
from paceline._training.engine.optimizer_stepper import Stepper
from paceline.core._arguments import NonFiniteError
from paceline.core._distributed_context import DistributedContext
from paceline.data._sharded_streams import sum_over_ranks

logger = logging.getLogger(__name__)

# Stands for a model or an optimizer of the trial in the state to be stored.
_REFERENCE = object()
# Values of so many shards are held before they are folded into the sum. On the CPU they are folded
# while they are still in its cache; elsewhere each time costs a few kernels.
_NUM_HELD_ON_CPU, _NUM_HELD = 16, 128
# A gradient scaler leaves out steps whose gradients are not finite, and scales less then.
MAX_SKIPPED_STEPS = 10


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
        known = {id(reference): _REFERENCE for reference in self._references()}
        copies = [_copied_metric(entry[0], known) for entry in self._entries]
        collected = [
            {name: value for name, value in state.items() if value is not _REFERENCE}
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


class KeySetError(ValueError):
    """Raised when batches or ranks report different metric names."""


class _WeightedSum:
    """Weighted sum of a single metric.

    Sums of numbers and of tensors on the CPU are numbers; on other devices nothing is waited for.
    """

    __slots__ = ("device", "is_on_host", "total")

    def __init__(self, device: torch.device | None) -> None:
        """Make an empty sum of numbers (without a device) or of tensors."""
        self.device = device
        self.is_on_host = device is None or device.type == "cpu"
        self.total: Any = 0.0
        if not self.is_on_host:
            self.total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, values: Sequence[Any], weights: Sequence[float]) -> Tensor | None:
        """Add values times weights; return the values as a tensor if on a device, else None."""
        if self.is_on_host:
            # A fifth of the time of tensors. One after the other: when a checkpoint folds values
            # into the sum, which depends on time for some, must not change its bits.
            terms = map(mul, _numbers(values), weights)
            [self.total] = deque(accumulate(terms, initial=self.total), maxlen=1)
            return None
        stacked = self.stack(values)
        factors = torch.tensor(weights, dtype=torch.float64)
        # Non-blocking transfer: adding a metric must not make the host wait for the device.
        self.total += torch.dot(stacked, factors.to(self.device, non_blocking=True))
        return stacked

    def stack(self, values: Sequence[Any]) -> Tensor:
        """Return values as a single float64 tensor, on the device of the sum."""
        if self.is_on_host:
            return torch.tensor(_numbers(values), dtype=torch.float64)
        scalars = [torch.as_tensor(_scalar(value), device=self.device) for value in values]
        return torch.stack(scalars).double()


class WeightedMeans:
    """Means of metrics over batches and ranks, weighted by samples.

    `add` starts no transfer and no synchronisation: a few tensors are held where they are and then
    folded into a sum.

    Args:
        distributed: Where the ranks meet.
        what: What kind of metrics these are, for messages.
        stop_on_nan: Whether `check_finite` looks for losses that are NaN or infinite: metrics with
            "loss" in their names and those with a gradient, or all of them if no name does.
        rank: The rank that messages name; the rank of `distributed` by default.

    Attributes:
        max_in_a_row: How many such losses in a row `check_finite` refuses: 1, or more where a
            gradient scaler leaves out the steps of some.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        what: str,
        *,
        stop_on_nan: bool = False,
        rank: int | None = None,
    ) -> None:
        self.stop_on_nan = stop_on_nan
        self.max_in_a_row = 1
        self._rank = distributed.rank if rank is None else rank
        self._distributed = distributed
        self._what = what
        self._columns: dict[str, _WeightedSum] | None = None
        # The names of values that can be held as they come, in their order.
        self._names: tuple[str, ...] | None = None
        # Weight, batch and values of the shards that are in no sum yet, one after the other.
        self._held: list[Any] = []
        self._max_held = 0
        self._losses: frozenset[str] = frozenset()
        self._weight = 0.0
        # Searches for non-finite losses by metric name, and the finiteness flags still on a device.
        self._searches: dict[str, _NonFiniteSearch] = {}
        self._flags: list[tuple[str, list[int], Tensor]] = []

    def add(self, metrics: Mapping[str, Any], weight: float, batch: int = 0) -> None:
        """Add the metrics of a shard: numbers, or tensors (of several elements the mean counts).

        Args:
            metrics: The values by name.
            weight: The shard's samples.
            batch: The global batch, for the message about a value that is not finite.

        Raises:
            KeySetError: The names differ from the names in earlier batches.
        """
        if tuple(metrics) != self._names:
            metrics = self._prepared(metrics)
        held = self._held
        held.append(weight)
        held.append(batch)
        for value in metrics.values():
            if type(value) is not Tensor or not value.is_cpu or value.is_leaf or value._is_view():
                held.append(_held(value))
            else:
                # Fast path: a fresh result on the CPU never changes later, so no copy is made. On
                # a GPU the next run of a CUDA graph may reuse the memory.
                held.append(value.data)
        if len(held) >= self._max_held:
            self._fold()

    def reduce(self) -> dict[str, float] | None:
        """Return the means over all ranks, on every rank, and start anew.

        Returns:
            None if there was no batch on any rank.

        Raises:
            KeySetError: Ranks hold different names.
        """
        self._fold()
        names = self._agree(None if self._columns is None else tuple(sorted(self._columns)))
        # A rank that had no samples since the last report adds nothing, but must take part.
        values = [*self._totals(names or ()), self._weight]
        if self._distributed.size > 1 and names:
            values = sum_over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        self._columns, self._names, self._weight = None, None, 0.0
        if names is None:
            return None
        return {name: values[index] / values[-1] for index, name in enumerate(names)}

    def peek(self) -> dict[str, float]:
        """Return this rank's present means of the metrics on the CPU; nothing is changed."""
        weights, _, values = self._rows()
        weight = self._weight + sum(weights)
        return {
            name: (column.total + sum(map(mul, _numbers(values[name]), weights))) / weight
            for name, column in (self._columns or {}).items()
            if column.is_on_host and weight
        }

    def check_finite(self, means: Mapping[str, float] | None = None) -> None:
        """Check all losses so far for NaN and infinity, if enabled; every rank must call this.

        Args:
            means: The result of the last `reduce`, if there is one: if all values are finite,
                so were the losses of all ranks.

        Raises:
            NonFiniteError: One was NaN or infinite; the message names metric, rank and batch.
        """
        if not self.stop_on_nan:
            return
        self._fold()
        if means is not None and all(map(isfinite, means.values())):
            self._flags.clear()
            self._searches.clear()
            return
        own = self._first_non_finite()
        by_rank = self._distributed.allgather(None if own is None else (*own, self._rank))
        found = [which for which in by_rank if which]
        if found:
            # A step later every rank is affected, so the earliest batch shows where it began.
            self._searches.clear()
            batch, name, rank = min(found)
            raise NonFiniteError(
                f"The training metric {name!r} must be finite, but it is not on rank {rank} at"
                f" batch {batch}.",
                rank=rank,
                batch=batch,
            )

    def _first_non_finite(self) -> tuple[int, str] | None:
        """Return the batch and name of the first loss in too long a non-finite row, or None."""
        for name, batches, are_finite in self._flags:
            self._search_of(name).add(batches, are_finite.tolist())
        self._flags.clear()
        found = [(each.found, name) for name, each in self._searches.items()]
        return min(((batch, name) for batch, name in found if batch is not None), default=None)

    def _search_of(self, name: str) -> "_NonFiniteSearch":
        return self._searches.setdefault(name, _NonFiniteSearch(self.max_in_a_row))

    def state(self) -> dict[str, Any]:
        """Return the open sums of this rank, for a checkpoint."""
        columns = self._columns or {}
        weights, _, values = self._rows()
        return {
            "is_empty": self._columns is None,
            "totals": {
                name: column.total
                if column.device is None
                else torch.as_tensor(column.total, dtype=torch.float64)
                for name, column in columns.items()
            },
            "held": {name: columns[name].stack(values[name]) for name in columns},
            "weights": weights,
            "weight": self._weight + sum(weights),
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the sums of `state`; tensors move to the device of the later values."""
        columns: dict[str, _WeightedSum] = {}
        weights, held = state["weights"], []
        for name, total in state["totals"].items():
            column = columns[name] = _WeightedSum(device if isinstance(total, Tensor) else None)
            column.total = float(total) if column.is_on_host else total.to(device)
            values = state["held"][name]
            held.append(values.tolist() if column.is_on_host else values.to(device).unbind())
        self._columns = self._names = None
        if not state["is_empty"]:
            self._set_columns(columns)
        rows = zip(weights, repeat(0), *held, strict=False)
        self._held = [each for row in rows for each in row]
        self._weight = state["weight"] - sum(weights)

    def _prepared(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metrics in the order of the columns, without tensors of several elements.

        Raises:
            KeySetError: The names differ from the names in earlier batches.
        """
        if self._columns is None:
            self._set_columns(
                {
                    name: _WeightedSum(value.device if isinstance(value, Tensor) else None)
                    for name, value in metrics.items()
                },
                (k for k, v in metrics.items() if isinstance(v, Tensor) and v.requires_grad),
            )
        assert self._columns is not None
        if metrics.keys() != self._columns.keys():
            raise KeySetError(
                f"All batches must return the same {self._what} metrics, but one returned"
                f" {sorted(metrics)} and those before {sorted(self._columns)}."
            )
        scalars = {name: _scalar(metrics[name]) for name in self._columns}
        if all(scalars[name] is metrics[name] for name in scalars):
            self._names = tuple(scalars)
        return scalars

    def _set_columns(
        self, columns: dict[str, _WeightedSum], with_gradient: Iterable[str] = ()
    ) -> None:
        self._columns = columns
        named = [name for name in columns if "loss" in name.lower()]
        self._losses = frozenset([*named, *with_gradient] if named else columns)
        is_on_host = all(column.is_on_host for column in columns.values())
        self._max_held = (_NUM_HELD_ON_CPU if is_on_host else _NUM_HELD) * (2 + len(columns))

    def _rows(self) -> tuple[list[float], list[int], dict[str, list[Any]]]:
        """Return weights, batches and values of the shards not yet in the sums."""
        names = tuple(self._columns or ())
        width, held = 2 + len(names), self._held
        values = {name: held[index::width] for index, name in enumerate(names, 2)}
        return held[::width], held[1::width], values

    def _fold(self) -> None:
        """Add the values held to the sums."""
        weights, batches, values = self._rows()
        if not weights:
            return
        for name, column in (self._columns or {}).items():
            stacked = column.add(values[name], weights)
            if self.stop_on_nan and name in self._losses:
                if stacked is not None:
                    self._flags.append((name, batches, torch.isfinite(stacked)))
                elif name in self._searches or not isfinite(column.total):
                    self._search_of(name).add(batches, map(isfinite, _numbers(values[name])))
        self._weight += sum(weights)
        self._held = []

    def _totals(self, names: tuple[str, ...]) -> list[float]:
        present = self._columns or {}
        columns = [present.get(name) for name in names]
        on_device = [c.total for c in columns if c is not None and not c.is_on_host]
        if len({total.device for total in on_device}) == 1:
            # Stacked first: a single transfer serves all metrics.
            moved = iter(torch.stack(on_device).tolist())
            return [
                0.0 if c is None else next(moved) if not c.is_on_host else float(c.total)
                for c in columns
            ]
        return [0.0 if c is None else float(c.total) for c in columns]

    def _agree(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the metric names shared by all ranks with batches; None without any batch."""
        if self._distributed.size == 1:
            return names
        # Every rank must take part even if only one has new names, so all ask each time.
        by_rank = self._distributed.allgather(names)
        told = [(rank, other) for rank, other in enumerate(by_rank) if other is not None]
        for rank, other in told:
            if other != told[0][1]:
                raise KeySetError(
                    f"All ranks must return the same {self._what} metrics, but rank {told[0][0]}"
                    f" returned {list(told[0][1])} and rank {rank} {list(other)}."
                )
        return told[0][1] if told else None


class _NonFiniteSearch:
    """Search for consecutive batches with non-finite losses."""

    def __init__(self, max_in_a_row: int) -> None:
        self.found: int | None = None
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = self._first = 0

    def add(self, batches: Iterable[int], are_finite: Iterable[bool]) -> None:
        """Look at further batches."""
        for batch, is_finite in zip(batches, are_finite, strict=True):
            if is_finite:
                self._num_in_a_row = 0
                continue
            self._first = self._first if self._num_in_a_row else batch
            self._num_in_a_row += 1
            if self._num_in_a_row >= self._max_in_a_row and self.found is None:
                self.found = self._first


def _held(value: Any) -> Any:
    """Return a value to look at later, whatever becomes of the original by then."""
    if not isinstance(value, Tensor):
        return float(value)
    return _scalar(value).detach().clone()


def _scalar(value: Any) -> Any:
    """Return the mean of a tensor of several elements, and other values as they are."""
    if isinstance(value, Tensor) and value.dim():
        return value.detach().double().mean()
    return value


def _numbers(values: Sequence[Any]) -> list[float]:
    try:
        return [*map(float, values)]
    except RuntimeError:  # a tensor of several elements
        return [float(_scalar(value)) for value in values]


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
