"""The images: Fashion-MNIST if Debian's package `dataset-fashion-mnist` is there, else digits.

Nothing is downloaded. The digits are the 1,797 small images that come with scikit-learn.
"""

import gzip
import logging
import os
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

logger = logging.getLogger(__name__)

FASHION_MNIST = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
NUM_TEST_DIGITS = 360


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: images [n, 1, side, side] in 0 to 1, and 10 classes."""
    if FASHION_MNIST.is_dir():
        logger.info("The images are Fashion-MNIST, from %s.", FASHION_MNIST)
        return read_fashion_mnist("train"), read_fashion_mnist("t10k")
    logger.info("The images are scikit-learn's digits, as there is no %s.", FASHION_MNIST)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    test = slice(0, NUM_TEST_DIGITS)
    train = slice(NUM_TEST_DIGITS, None)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def read_fashion_mnist(part: str) -> TensorDataset:
    """Read one part, "train" or "t10k", whose two files are in the IDX format."""
    images = read_idx(FASHION_MNIST / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(FASHION_MNIST / f"{part}-labels-idx1-ubyte.gz")
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


def read_idx(path: Path) -> torch.Tensor:
    """Read unsigned bytes: a zero, the type, the number of axes, their big-endian sizes, values."""
    content = gzip.decompress(path.read_bytes())
    num_axes = content[3]
    shape = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes)
    return torch.tensor(values).reshape(shape)
