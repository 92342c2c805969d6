"""Images in ten classes: Fashion-MNIST if Debian's package is there, else scikit-learn's digits.

Nothing is downloaded.
"""

import gzip
import logging
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

logger = logging.getLogger(__name__)

FOLDER = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
NUM_TEST_DIGITS = 360


def load_images(side: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set: images [n, 1, side, side] from -1 to 1, and their classes.

    Args:
        side: The height and width; by default that of the files, 28 or 8.
    """
    pairs = _fashion() if FOLDER.is_dir() else _digits()
    logger.info("The images are %s.", "Fashion-MNIST" if FOLDER.is_dir() else "digits")
    sets = []
    for images, classes in pairs:
        images = images.unsqueeze(1) * 2 - 1
        if side is not None:
            images = torch.nn.functional.interpolate(images, (side, side), mode="bilinear")
        sets.append(TensorDataset(images, classes))
    return sets[0], sets[1]


def _fashion() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (_idx(f"{part}-images-idx3-ubyte.gz") / 255.0, _idx(f"{part}-labels-idx1-ubyte.gz").long())
        for part in ("train", "t10k")
    ]


def _idx(name: str) -> torch.Tensor:
    """Read bytes in the IDX format: the number of axes, their big-endian sizes, the values."""
    content = gzip.decompress((FOLDER / name).read_bytes())
    num_axes = content[3]
    sizes = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes)
    return torch.tensor(values).reshape(sizes)


def _digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
    classes = torch.tensor(digits.target)[order]
    test, training = slice(0, NUM_TEST_DIGITS), slice(NUM_TEST_DIGITS, None)
    return [(images[training], classes[training]), (images[test], classes[test])]
