"""Data sets for every front door: lazy, split before they are read, with an exact order.

Importing this loads no torch.
"""

from paceline._base.imports import show_public_errors
from paceline.data._data_errors import (
    DataChangedError,
    DataError,
    DataFormatError,
    DataNotFoundError,
)
from paceline.data._dataset import Dataset, read, read_images, write_index
from paceline.data._default_batches import collate_samples
from paceline.data._stream_pieces import stream_pieces

__all__ = [
    "DataChangedError",
    "DataError",
    "DataFormatError",
    "DataNotFoundError",
    "Dataset",
    "collate_samples",
    "read",
    "read_images",
    "stream_pieces",
    "write_index",
]

show_public_errors(__name__, globals())
