"""Samples whose images are decoded late: for one sample, or for a batch at once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.data._decode_files import IMAGES, decode, open_image


class Encoded(NamedTuple):
    """The content of a file, and what messages call it; its suffix tells how it is decoded."""

    content: bytes
    name: str


def decoded(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as users get it.

    Raises:
        DataFormatError: A content is damaged.
    """
    return {
        key: decode(*value) if isinstance(value, Encoded) else value
        for key, value in sample.items()
    }


def decoded_batch(samples: Sequence[Mapping[str, Any]]) -> Any:
    """Return what torch's `default_collate` makes of samples once they are decoded.

    Images of one size are decoded into the memory of the batch. Memory for each of them would
    cost half as much time as to decode it.

    Raises:
        DataFormatError: A content is damaged.
    """
    from torch.utils.data import default_collate

    keys = list(samples[0])
    if any(list(sample) != keys for sample in samples):
        return default_collate([decoded(sample) for sample in samples])
    batch = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        if all(isinstance(value, Encoded) for value in values):
            is_images = all(value.name.lower().endswith(IMAGES) for value in values)
            batch[key] = _images(values) if is_images else default_collate(_each(values))
        else:
            batch[key] = default_collate(values)
    return batch


def _each(values: Sequence[Encoded]) -> list[Any]:
    return [decode(*value) for value in values]


def _images(values: Sequence[Encoded]) -> Any:
    import torch
    from torch.utils.data import default_collate

    batch: Any = None
    for number, value in enumerate(values):
        with open_image(*value) as image:
            if batch is None:
                batch = torch.empty(len(values), image.height, image.width, 3, dtype=torch.uint8)
            if (image.height, image.width) != tuple(batch.shape[1:3]):
                # Torch says what is wrong.
                return default_collate(_each(values))
            batch.numpy()[number] = np.asarray(image)
    return batch
