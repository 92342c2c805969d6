"""Samples of a torch data set, a sequence or an array."""

from collections.abc import Sequence
from typing import Any

from paceline.data._sample_source import Source


class SamplesInMemory(Source):
    """What has a length and gives samples by number.

    Args:
        data: A map-style torch data set, a list, an array, a tensor.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.name = f"the {type(data).__name__}"

    def __len__(self) -> int:
        return len(self.data)

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples one by one, or at once if the data set can."""
        fetch_all = getattr(self.data, "__getitems__", None)
        if fetch_all is not None:
            samples: list[Any] = fetch_all(list(numbers))
            return samples
        return [self.data[number] for number in numbers]
