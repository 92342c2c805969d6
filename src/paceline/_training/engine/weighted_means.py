"""Means of metrics over batches and ranks, weighted by samples; search for non-finite losses.

The means are kept on the device during the loop and reduced for reports.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from math import isfinite
from operator import mul
from typing import Any

import torch
from torch import Tensor

from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import NonFiniteError
from paceline.data._sharded_streams import sum_over_ranks

# Stands for a model or an optimizer of the trial in the state to be stored.
REFERENCE = object()
# Values of so many shards are held before they are folded into the sum. On the CPU they are folded
# while they are still in its cache; elsewhere each time costs a few kernels.
_NUM_HELD_ON_CPU, _NUM_HELD = 16, 128
# A gradient scaler leaves out steps whose gradients are not finite, and scales less then.
MAX_SKIPPED_STEPS = 10


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
