"""Folds of a cross validation."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.data._dataset import Dataset


class Fold(NamedTuple):
    """One way to part a data set for cross validation.

    Attributes:
        train: The samples of the other folds.
        validation: The samples of this fold.
    """

    train: "Dataset"
    validation: "Dataset"
