"""What the training of `step_loops.py` computes: nearly nothing, a ResNet or a transformer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_EXPANSION = 4


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and its data.

    Attributes:
        make_body: Makes the model; None for the linear layer of `step_loops.Model`.
        make_data: Makes so many samples.
        batch_size: The samples of a batch.
        block: The steps of a block.
    """

    make_body: Callable[[], nn.Module] | None
    make_data: Callable[[int], TensorDataset]
    batch_size: int
    block: int

    def loader(self, num_steps: int) -> DataLoader[Any]:
        """Return shuffled data for a number of steps."""
        samples = self.make_data(num_steps * self.batch_size)
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = width * _EXPANSION
        self.path = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            shortcut = nn.Conv2d(num_in, num_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a batch [batch, channels, height, width], with other channels."""
        return torch.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual net for images; by default of 25.6 million parameters, as ResNet-50 has."""

    def __init__(
        self,
        widths: tuple[int, ...] = (64, 128, 256, 512),
        depths: tuple[int, ...] = (3, 4, 6, 3),
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0])]
        blocks: list[nn.Module] = [*stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        num_in = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                blocks.append(Bottleneck(num_in, width, 2 if stage and not index else 1))
                num_in = width * _EXPANSION
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, num_classes)]
        self.layers = nn.Sequential(*blocks, *head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, classes] of images [batch, 3, height, width]."""
        return self.layers(x)


class Transformer(nn.Module):
    """A language model; by default of 98 million parameters."""

    def __init__(
        self, width: int = 768, depth: int = 12, num_words: int = 16384, length: int = 256
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, words, length] of the next words of texts [batch, length]."""
        hidden = self.layers(self.words(x) + self.places, mask=self.mask, is_causal=True)
        return (hidden @ self.words.weight.t()).transpose(1, 2)


def _numbers(num_samples: int) -> TensorDataset:
    x = torch.randn(num_samples, 4)
    return TensorDataset(x, x.sum(1, True))


def _images(size: int, num_classes: int) -> Callable[[int], TensorDataset]:
    def make(num_samples: int) -> TensorDataset:
        # One image in the place of all: it is copied as others are, and takes no memory.
        x = torch.randn(1, 3, size, size).expand(num_samples, 3, size, size)
        return TensorDataset(x, torch.randint(num_classes, (num_samples,)))

    return make


def _texts(length: int, num_words: int) -> Callable[[int], TensorDataset]:
    def make(num_samples: int) -> TensorDataset:
        words = torch.randint(num_words, (1, length + 1)).expand(num_samples, length + 1)
        return TensorDataset(*(words[:, start : start + length] for start in (0, 1)))

    return make


NULL = Load(make_body=None, make_data=_numbers, batch_size=4, block=100)
LOADS: dict[str, Load] = {
    "null": NULL,
    "resnet 25M": Load(make_body=ResNet, make_data=_images(64, 1000), batch_size=32, block=20),
    "transformer 100M": Load(
        make_body=Transformer, make_data=_texts(256, 16384), batch_size=8, block=20
    ),
}
# The same in small, for a machine without a GPU.
SMALL_LOADS: dict[str, Load] = {
    "null": NULL,
    "resnet, small": Load(
        make_body=lambda: ResNet((4, 8), (1, 1), 10),
        make_data=_images(16, 10),
        batch_size=2,
        block=5,
    ),
    "transformer, small": Load(
        make_body=lambda: Transformer(16, 2, 32, 8),
        make_data=_texts(8, 32),
        batch_size=2,
        block=5,
    ),
}
