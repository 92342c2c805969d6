"""Data sets for every front door: lazy, split before they are read, with an exact order.

Importing this loads no torch.
"""

from paceline.data._dataset import Dataset, Fold

__all__ = ["Dataset", "Fold"]
