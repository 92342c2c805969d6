"""Data sets for every front door: lazy, split before they are read, with an exact order.

Importing this loads no torch.
"""

from paceline.data._dataset import Dataset, Fold, read, read_images, write_index
from paceline.data._default_batches import (
    DataChangedError,
    DataError,
    DataFormatError,
    DataNotFoundError,
    collate_samples,
)
from paceline.data._streams import StreamPieces, stream_pieces

__all__ = [
    "DataChangedError",
    "DataError",
    "DataFormatError",
    "DataNotFoundError",
    "Dataset",
    "Fold",
    "StreamPieces",
    "collate_samples",
    "read",
    "read_images",
    "stream_pieces",
    "write_index",
]
