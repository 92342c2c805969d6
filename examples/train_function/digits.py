"""The images, and how well a model recognises them.

They are the 1,797 digits of 8x8 pixels that come with scikit-learn.
"""

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


def accuracy(model: nn.Module, images: TensorDataset) -> float:
    """Return the part of the images that the model recognises."""
    x, y = images.tensors
    model.eval()
    with torch.no_grad():
        right = model(x.to(train.get_device())).argmax(1).cpu() == y
    model.train()
    return right.float().mean().item()
