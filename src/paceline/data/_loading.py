"""Torch's view of a data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data._memory import MemorySource
from paceline.data._stream import Stream

if TYPE_CHECKING:
    from paceline.data._dataset import Dataset


class SampleView(torch.utils.data.Dataset[Any]):
    """The samples of a data set by their numbers, as a loader fetches them for one batch.

    Args:
        dataset: The data set, none that is a stream.
    """

    def __init__(self, dataset: "Dataset") -> None:
        self.dataset = dataset
        self._length = len(dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.dataset.fetch(numbers)


class StreamView(IterableDataset[Any]):
    """The samples of a stream.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)


class PlacedStreamView(StreamView):
    """The samples of a stream that can tell its place."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the place."""
        data: Any = self._stream.data
        state: Mapping[str, Any] = data.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place."""
        data: Any = self._stream.data
        data.load_state_dict(state)


def make_loader(
    dataset: "Dataset",
    batch_size: int,
    num_workers: int,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> "DataLoader[Any]":
    """Return a torch loader of a data set; see `Dataset.to_torch`."""
    options = {**options, "num_workers": num_workers, "collate_fn": collate}
    source = dataset.source
    if isinstance(source, Stream):
        return DataLoader(_stream_view(source), batch_size, **options)
    data: Any = SampleView(dataset)
    if isinstance(source, MemorySource) and not dataset.has_stages:
        data = source.data
    return DataLoader(data, batch_size, shuffle=dataset.plan.is_shuffled, **options)


def _stream_view(stream: Stream) -> IterableDataset[Any]:
    data: Any = stream.data
    if isinstance(data, IterableDataset) and not stream.steps:
        return data
    has_place = hasattr(data, "state_dict") and not stream.holds_samples
    return PlacedStreamView(stream) if has_place else StreamView(stream)
