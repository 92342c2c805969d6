"""Metrics that stay on the device during the loop and are reduced when they are reported."""

import math
from collections.abc import Mapping
from operator import mul
from typing import Any

import torch
import torch.distributed as dist

from paceline.core import DistributedContext

# Values of so many shards are held before they are folded into the sum. On the CPU they are folded
# while they are still in its cache; elsewhere each time costs a few kernels.
_NUM_HELD_ON_CPU, _NUM_HELD = 16, 128


class KeySetError(ValueError):
    """Raised when batches or ranks report different metric names."""


class NonFiniteError(ArithmeticError):
    """Raised when a training metric is NaN or infinite and training is to stop then."""


class _Column:
    """The weighted sum of one metric: a plain number, or a tensor where the values are tensors."""

    __slots__ = ("device_index", "held", "is_tensor", "total")

    def __init__(self, device: torch.device | None) -> None:
        self.is_tensor = device is not None
        self.total: Any = 0.0
        self.device_index = -1
        if device is not None:
            self.total = torch.zeros((), dtype=torch.float64, device=device)
            self.device_index = self.total.get_device()
        self.held: list[torch.Tensor] = []


class WeightedMeans:
    """Means of metrics over batches and ranks, weighted by samples.

    `add` starts no transfer and no synchronisation: a few tensors are held where they are and then
    folded into a sum.

    Args:
        distributed: Where the ranks meet.
        what: What kind of metrics these are, for messages.
        stop_on_nan: Whether `check_finite` looks for values that are NaN or infinite.
    """

    def __init__(
        self, distributed: DistributedContext, what: str, *, stop_on_nan: bool = False
    ) -> None:
        self.stop_on_nan = stop_on_nan
        self._distributed = distributed
        self._what = what
        self._columns: dict[str, _Column] | None = None
        self._weights: list[float] = []
        self._batches: list[int] = []
        self._weight = 0.0
        self._num_held = _NUM_HELD
        self._non_finite: tuple[str, int] | None = None

    def add(self, metrics: Mapping[str, Any], weight: float, batch: int = 0) -> None:
        """Add one shard's metrics: numbers or tensors (the mean of each tensor's elements counts).

        Args:
            metrics: The values by name.
            weight: The shard's samples.
            batch: The global batch, for the message about a value that is not finite.

        Raises:
            KeySetError: The names differ from those of the batches before.
        """
        columns = self._columns
        if columns is None:
            columns = self._make_columns(metrics)
        if len(metrics) != len(columns):
            raise self._key_set_error(metrics)
        for name, value in metrics.items():
            column = columns.get(name)
            if column is None:
                raise self._key_set_error(metrics)
            if column.is_tensor:
                if (
                    type(value) is torch.Tensor
                    and not value.is_leaf
                    and value.get_device() == column.device_index
                    and not value.dim()
                ):
                    # It was computed for this batch, so nobody will change it; the quick way.
                    column.held.append(value.data)
                else:
                    column.held.append(_held(value).to(column.total.device))
                continue
            number = float(value)
            column.total += number * weight
            if self.stop_on_nan and not math.isfinite(number):
                self._note_non_finite(name, batch)
        self._weight += weight
        self._weights.append(weight)
        if self.stop_on_nan:
            self._batches.append(batch)
        if len(self._weights) >= self._num_held:
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
        self._columns, self._weight = None, 0.0
        if names is None:
            return None
        return {name: values[index] / values[-1] for index, name in enumerate(names)}

    def check_finite(self) -> None:
        """Look at all values so far, if that is wanted; every rank must call it alike.

        Raises:
            NonFiniteError: One was NaN or infinite; the message names metric, rank and batch.
        """
        if not self.stop_on_nan:
            return
        self._fold()
        by_rank = self._distributed.allgather(self._non_finite)
        found = [(which[1], rank, which[0]) for rank, which in enumerate(by_rank) if which]
        if found:
            # A step later every rank has it, so the earliest batch tells where it began.
            batch, rank, name = min(found)
            raise NonFiniteError(
                f"The training metric {name!r} must be finite, but it is not on rank {rank} at"
                f" batch {batch}. Hint: resume from the last checkpoint with a smaller learning"
                " rate or gradient clipping, or leave out `stop_on_nan`."
            )

    def state(self) -> dict[str, Any]:
        """Return the open sums of this rank, for a checkpoint."""
        columns = self._columns or {}
        return {
            "is_empty": self._columns is None,
            "totals": {name: column.total for name, column in columns.items()},
            "held": {
                name: torch.stack(column.held).double()
                for name, column in columns.items()
                if column.held
            },
            "weights": list(self._weights),
            "weight": self._weight,
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Take up what `state` returned; tensors move to the device of the values to come."""
        columns: dict[str, _Column] = {}
        for name, total in state["totals"].items():
            is_tensor = isinstance(total, torch.Tensor)
            column = columns[name] = _Column(device if is_tensor else None)
            column.total = total.to(device) if is_tensor else total
            if name in state["held"]:
                column.held = list(state["held"][name].to(device).unbind())
        self._columns = None
        if not state.get("is_empty", not columns):
            self._set_columns(columns)
        self._weights = list(state["weights"])
        self._batches = [0] * len(self._weights)
        self._weight = state["weight"]

    def _make_columns(self, metrics: Mapping[str, Any]) -> dict[str, _Column]:
        return self._set_columns(
            {
                name: _Column(value.device if isinstance(value, torch.Tensor) else None)
                for name, value in metrics.items()
            }
        )

    def _set_columns(self, columns: dict[str, _Column]) -> dict[str, _Column]:
        self._columns = columns
        is_on_cpu = all(column.device_index < 0 for column in columns.values())
        self._num_held = _NUM_HELD_ON_CPU if is_on_cpu else _NUM_HELD
        return columns

    def _fold(self) -> None:
        """Add the values held to the sums."""
        if not self._weights:
            return
        if self.stop_on_nan:
            self._look_for_non_finite()
        for column in (self._columns or {}).values():
            if not column.held:
                continue
            if column.device_index < 0:
                # On the CPU there is nothing to wait for, and this takes a fifth of the time.
                numbers = [value.item() for value in column.held]
                column.total += sum(map(mul, numbers, self._weights))
            else:
                values = torch.stack(column.held).double()
                weights = torch.tensor(self._weights, dtype=torch.float64)
                column.total += torch.dot(values, weights.to(values.device, non_blocking=True))
            column.held = []
        self._weights, self._batches = [], []

    def _look_for_non_finite(self) -> None:
        for name, column in (self._columns or {}).items():
            if column.held and self._non_finite is None:
                wrong = torch.nonzero(~torch.isfinite(torch.stack(column.held)))
                if len(wrong):
                    self._note_non_finite(name, self._batches[int(wrong[0])])

    def _totals(self, names: tuple[str, ...]) -> list[float]:
        present = self._columns or {}
        columns = [present.get(name) for name in names]
        on_device = [c.total for c in columns if c is not None and c.is_tensor]
        if len({total.device for total in on_device}) == 1:
            # One transfer for all of them.
            moved = iter(torch.stack(on_device).tolist())
            return [
                0.0 if c is None else next(moved) if c.is_tensor else float(c.total)
                for c in columns
            ]
        return [0.0 if c is None else float(c.total) for c in columns]

    def _note_non_finite(self, name: str, batch: int) -> None:
        if self._non_finite is None:
            self._non_finite = (name, batch)

    def _key_set_error(self, metrics: Mapping[str, Any]) -> KeySetError:
        return KeySetError(
            f"All batches must return the same {self._what} metrics, but one returned"
            f" {sorted(metrics)} and those before {sorted(self._columns or ())}."
        )

    def _agree(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the names of all ranks that had a batch; None if none had."""
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


def _held(value: Any) -> torch.Tensor:
    """Return a value to look at later, whatever becomes of the original by then."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value))
    if value.dim():
        return value.detach().double().mean()
    return value.detach().clone()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return a small CPU tensor summed over all ranks, in rank order."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered = [torch.zeros_like(values, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.to(device))
    return torch.stack([part.cpu() for part in gathered]).sum(0)
