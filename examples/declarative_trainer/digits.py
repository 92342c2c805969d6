"""The data and the model: the 1,797 digits of 8x8 pixels that come with scikit-learn."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Digits(TensorDataset):
    """Images [1, 8, 8] from 0 to 1, their class, and the part of the pixels that is dark.

    Args:
        part: "training" for the first 1,437 in a random order, "test" for the others.
    """

    def __init__(self, part: str = "training") -> None:
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        chosen = order[:1437] if part == "training" else order[1437:]
        images = torch.tensor(found.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
        darkness = (images > 0.5).float().mean((1, 2, 3)).unsqueeze(1)
        super().__init__(images, torch.tensor(found.target)[chosen], darkness)


class Net(nn.Module):
    """A convolutional encoder with two heads: scores of the classes [n, 10], darkness [n, 1]."""

    def __init__(self, num_filters: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, num_filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(num_filters, 2 * num_filters, 3, padding=1), nn.ReLU(), nn.Flatten()),
            nn.Dropout(dropout),
        )
        self.digit = nn.Linear(32 * num_filters, 10)
        self.darkness = nn.Linear(32 * num_filters, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return both predictions."""
        encoded = self.encoder(images)
        return self.digit(encoded), self.darkness(encoded)
