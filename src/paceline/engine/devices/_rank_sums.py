"""Small sums over the ranks, in rank order."""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return a small CPU tensor summed over all ranks, in rank order."""
    return gather_from_ranks(values).sum(0)


def gather_from_ranks(values: Tensor) -> Tensor:
    """Return a small CPU tensor of each rank, stacked in rank order."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered = [torch.zeros_like(values, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.to(device))
    return torch.stack([part.cpu() for part in gathered])
