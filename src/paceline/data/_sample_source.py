"""Samples by number: what every data set stands on that is no stream."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Numbers = Any
"""A one-dimensional array of int64, without loading NumPy where only types are read."""


class Source(ABC):
    """Samples that have numbers from 0 on.

    Implementers override `__len__` and `fetch`; those whose samples lie in pieces that are read as
    a whole, such as the row groups of a file, override `chunk_sizes` and `expect` as well.
    """

    name: str = "the data set"
    """What messages call it, such as a URL."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return samples in the order of their numbers, as a list or as `Columns`."""

    def chunk_sizes(self) -> Numbers | None:
        """Return the number of samples of each piece, or None if any sample costs the same."""
        return None

    def window(self) -> int:
        """Return how many samples are mixed with each other, if these lie in pieces."""
        return 1

    def expect(self, now: Numbers, later: Numbers) -> None:  # noqa: B027
        """Keep the pieces in which some samples lie, and read others ahead."""

    @property
    def is_encoded(self) -> bool:
        """Whether samples have to be decoded, such as images, and `fetch_encoded` gives them."""
        return False

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples before they are decoded: dictionaries, some values of them `Encoded`.

        Several threads may call it at once.
        """
        raise NotImplementedError

    def identity(self) -> Mapping[str, Any] | None:
        """Return what tells these samples from others, for checkpoints; None if nothing does."""
        return None


_TABLES = {
    "pyarrow.lib.Table": "`table.to_pylist()`",
    "pandas.DataFrame": "`frame.to_dict('records')`",
    "pandas.core.frame.DataFrame": "`frame.to_dict('records')`",
    "polars.dataframe.frame.DataFrame": "`frame.to_dicts()`",
}


def is_iterable_only(data: Any) -> bool:
    """Tell whether data can only be iterated over.

    Raises:
        TypeError: They cannot be read at all.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(data).__mro__}
    if "torch.utils.data.dataset.IterableDataset" in kinds:
        return True
    if isinstance(data, Mapping) and data and 0 not in data:
        raise TypeError(
            "A data set must be made of samples with numbers, but got a"
            f" {type(data).__name__} with the keys {sorted(map(str, data))[:8]}. Hint: for columns,"
            " a list of dictionaries, or torch.utils.data.TensorDataset."
        )
    if table := kinds & _TABLES.keys():
        raise TypeError(
            "A data set must be made of samples with numbers, but got a table,"
            f" {type(data).__name__}. Hint: {_TABLES[table.pop()]} makes a list of samples; a"
            " large one is better written to a Parquet file, for `data.read`."
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        try:
            len(data)
        except TypeError as error:
            raise TypeError(
                "A data set must be made of data with a length, but got"
                f" {type(data).__name__}: {error}."
            ) from error
        return False
    if not hasattr(data, "__iter__"):
        raise TypeError(
            "A data set must be made of a torch data set, a sequence, an array or an iterable, but"
            f" got {type(data).__name__}."
        )
    return True
