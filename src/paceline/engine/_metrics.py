"""Metrics that stay on the device during the loop and are reduced when they are reported."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.core import DistributedContext


class KeySetError(ValueError):
    """Raised when batches or ranks report different metric names."""


class WeightedMeans:
    """Means of metrics over batches and ranks, weighted by samples.

    `add` starts no transfer and no synchronisation: tensors are accumulated where they are.
    """

    def __init__(self, distributed: DistributedContext, what: str) -> None:
        self._distributed = distributed
        self._what = what
        self._sums: dict[str, Any] = {}
        self._weight = 0.0

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Add one batch's metrics: numbers or tensors (the mean of each tensor's elements counts).

        Raises:
            KeySetError: The names differ from those of the batches before.
        """
        if self._weight and metrics.keys() != self._sums.keys():
            raise KeySetError(
                f"All batches must return the same {self._what} metrics, but one returned"
                f" {sorted(metrics)} and those before {sorted(self._sums)}."
            )
        sums = self._sums
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                value = value.detach()
                if value.dim():
                    value = value.double().mean()
                held = sums.get(name)
                if held is None:
                    sums[name] = value.double() * weight
                else:
                    held.add_(value, alpha=weight)
            else:
                sums[name] = sums.get(name, 0.0) + float(value) * weight
        self._weight += weight

    def reduce(self) -> dict[str, float]:
        """Return the means over all ranks, on every rank, and start anew.

        Raises:
            KeySetError: Ranks hold different names.
        """
        names = self._agree(tuple(sorted(self._sums)))
        # A rank that had no samples since the last report adds nothing, but must take part.
        values = [float(self._sums.get(name, 0.0)) for name in names]
        totals = torch.tensor([*values, self._weight], dtype=torch.float64)
        if self._distributed.size > 1 and names:
            totals = sum_over_ranks(totals)
        self._sums, self._weight = {}, 0.0
        weight = float(totals[-1])
        return {name: float(totals[index]) / weight for index, name in enumerate(names)}

    def state(self) -> dict[str, Any]:
        """Return the open sums of this rank, for a checkpoint."""
        return {"sums": dict(self._sums), "weight": self._weight}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        self._sums, self._weight = dict(state["sums"]), state["weight"]

    def _agree(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of all ranks that have any."""
        if self._distributed.size == 1:
            return names
        # Every rank must take part even if only one has new names, so all ask each time.
        by_rank = self._distributed.allgather(names)
        first = next((rank for rank, other in enumerate(by_rank) if other), 0)
        for rank, other in enumerate(by_rank):
            if other and other != by_rank[first]:
                raise KeySetError(
                    f"All ranks must return the same {self._what} metrics, but rank {first}"
                    f" returned {list(by_rank[first])} and rank {rank} {list(other)}."
                )
        return by_rank[first]


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return a small CPU tensor summed over all ranks, in rank order."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered = [torch.zeros_like(values, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.to(device))
    return torch.stack([part.cpu() for part in gathered]).sum(0)
