"""The 1,797 digits of 8x8 pixels that come with scikit-learn, and a net that learns them."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train

NUM_TEST_IMAGES = 360


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images [n, 64] in 0 to 1, and 10 classes."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    test, training = slice(0, NUM_TEST_IMAGES), slice(NUM_TEST_IMAGES, None)
    return TensorDataset(images[training], labels[training]), TensorDataset(
        images[test], labels[test]
    )


def make_net() -> nn.Module:
    """Return the net."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(net: nn.Module) -> float:
    """Return the part of the test images that the net recognises."""
    images, labels = load_images()[1].tensors
    net.eval()
    with torch.no_grad():
        right = net(images).argmax(1) == labels
    net.train()
    return right.float().mean().item()


def run_on_workers(fit: Callable[[Any], Any]) -> None:
    """Run a function on two workers, or on as many as the command line says, and print its end."""
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with train.Trainer(num_workers=num_workers) as trainer:
        results = trainer.run(fit, {"epochs": 12}, callbacks=[train.PrintCallback()])
    print(f"The net recognises {results[0]:.1%} of the test images.")
    print(f"{len(results.checkpoints)} checkpoints are in {results.run_dir}.")
