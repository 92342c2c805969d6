"""The data set and the model that run.yaml names."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Points(TensorDataset):
    """Noisy points of a line.

    Args:
        number: How many points.
        seed: Seed of the points.
    """

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(number, 1, generator=generator)
        super().__init__(x, 3 * x - 1 + 0.1 * torch.randn(number, 1, generator=generator))


class Net(nn.Module):
    """Net with one hidden layer; takes [batch, 1], returns [batch, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions."""
        return self.layers(x)
