"""Samples whose images are decoded late: for one sample, or for a batch at once."""

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.data._decode_files import IMAGES, decode, open_image
from paceline.data._default_batches import collate_samples


class Encoded(NamedTuple):
    """The content of a file, and what messages call it; its suffix tells how it is decoded."""

    content: bytes
    name: str


class ImageBatchMemory:
    """Memory of the batches that nobody holds any more, for the next ones.

    New memory costs a third as much time as the images that are decoded into it.

    Args:
        most: How many batches are kept.
    """

    def __init__(self, most: int) -> None:
        # Only CPython with its global lock counts all references at once, so that a count tells
        # whether somebody holds a batch. Elsewhere each batch gets new memory.
        has_exact_counts = sys.implementation.name == "cpython" and _has_global_lock()
        self._most = most if has_exact_counts else 0
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        # A tensor, and whatever shares its memory, holds the array that it was made of.
        unused = [np.empty(0)]
        self._num_unused = sys.getrefcount(unused[0])

    def take(self, shape: tuple[int, ...]) -> Any:
        """Return an array of uint8 whose contents are not set."""
        with self._lock:
            kept = self._kept
            for number in range(len(kept)):
                if sys.getrefcount(kept[number]) == self._num_unused:
                    if kept[number].shape == shape:
                        return kept[number]
                    del kept[number]
                    break
            array = np.empty(shape, np.uint8)
            if len(kept) < self._most:
                kept.append(array)
            return array


def _has_global_lock() -> bool:
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def decoded_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as users get it.

    Raises:
        DataFormatError: A content is damaged.
    """
    return {
        key: decode(*value) if isinstance(value, Encoded) else value
        for key, value in sample.items()
    }


def decoded_batch(samples: Sequence[Mapping[str, Any]], memory: ImageBatchMemory) -> Any:
    """Return what `collate_samples` makes of samples once they are decoded.

    Images of one size are decoded into the memory of the batch. Memory for each of them would
    cost half as much time as to decode it.

    Args:
        samples: The samples.
        memory: Gives the memory.

    Raises:
        DataFormatError: A content is damaged.
        ValueError: Images have different sizes.
    """
    keys = list(samples[0])
    if any(list(sample) != keys for sample in samples):
        return collate_samples([decoded_sample(sample) for sample in samples])
    batch = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        is_encoded = all(isinstance(value, Encoded) for value in values)
        if is_encoded and all(value.name.lower().endswith(IMAGES) for value in values):
            batch[key] = _images(values, memory)
        if batch.get(key) is None:
            each = [decode(*value) if isinstance(value, Encoded) else value for value in values]
            batch[key] = collate_samples([{key: value} for value in each])[key]
    return batch


def _images(values: Sequence[Encoded], memory: ImageBatchMemory) -> Any:
    """Return images in one tensor, or None if their sizes differ."""
    import torch

    batch: Any = None
    for number, value in enumerate(values):
        with open_image(*value) as image:
            if batch is None:
                batch = memory.take((len(values), image.height, image.width, 3))
            if (image.height, image.width) != batch.shape[1:3]:
                return None
            batch[number] = np.asarray(image)
    return torch.from_numpy(batch)
