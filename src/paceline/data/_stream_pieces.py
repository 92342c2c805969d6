"""Pieces of streams: shards of WebDataset and of other iterable data."""

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

_SPLITTERS = ("split_by_node", "split_by_worker", "single_node_only", "check_empty")
_OPENERS = ("StreamingOpen", "FileCache")


class StreamPieces(ABC):
    """Stream in pieces, each readable independently.

    Together the pieces have each sample of an epoch once.

    Attributes:
        num_pieces: The number of pieces.
        is_shuffled: Whether the pieces may come in any order.
        name: The stream's name in messages.
    """

    num_pieces: int
    is_shuffled: bool = False
    name: str = "the stream"

    @abstractmethod
    def read(self, piece: int, epoch: int) -> Iterable[Any]:
        """Return the samples of a piece, the same each time for the same epoch.

        Args:
            piece: The piece, from 0.
            epoch: The epoch, for streams whose order depends on it.
        """


def stream_pieces(data: Any) -> StreamPieces | None:
    """Return an iterable data set in pieces, or None if only readable as a whole.

    Streams of Hugging Face, all others with `num_shards` and `shard(num_shards=, index=)`, and
    WebDataset's pipelines over a list of shards have pieces.

    Args:
        data: The iterable data set.

    Raises:
        ValueError: It was split for the workers already.
    """
    tell = getattr(data, "stream_pieces", None)
    if callable(tell):
        own: StreamPieces | None = tell()
        return own
    if callable(getattr(data, "shard", None)) and isinstance(
        getattr(data, "num_shards", None), int
    ):
        return _Shards(data)
    if _is_webdataset(data):
        return _WebDatasetShards(data)
    return None


class _Shards(StreamPieces):
    """Pieces of a stream with `shard(num_shards, index)`, as in Hugging Face data sets."""

    def __init__(self, data: Any) -> None:
        split = getattr(data, "_distributed", None)
        if split is not None and split.world_size > 1:
            raise ValueError(
                "A stream must be whole, as Paceline deals its shards among the workers, but got"
                f" part {split.rank} of {split.world_size}. Hint: leave out"
                " `split_dataset_by_node`."
            )
        self.num_pieces = int(data.num_shards)
        self.is_shuffled = _mixes_samples(data)
        self.name = f"the {type(data).__name__}"
        self._data = data

    def read(self, piece: int, epoch: int) -> Iterable[Any]:
        shard: Iterable[Any] = self._data.shard(num_shards=self.num_pieces, index=piece)
        set_epoch = getattr(shard, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return shard


def _mixes_samples(data: Any) -> bool:
    """Return whether a Hugging Face stream was shuffled, found from its private steps."""
    step = getattr(data, "_ex_iterable", None)
    while step is not None:
        if "Shuffle" in type(step).__name__:
            return True
        step = getattr(step, "ex_iterable", None)
    return False


def _is_webdataset(data: Any) -> bool:
    """Return whether a data set is a WebDataset pipeline with a single pass over its shards."""
    stages = getattr(data, "pipeline", None)
    if not isinstance(stages, list) or not stages or getattr(data, "repetitions", 1) != 1:
        return False
    kind = type(stages[0])
    return kind.__module__.startswith("webdataset.") and kind.__name__ == "SimpleShardList"


class _WebDatasetShards(StreamPieces):
    """Shards of a WebDataset pipeline, without its splitters among nodes and workers."""

    def __init__(self, data: Any) -> None:
        self._data = data
        shards, *stages = data.pipeline
        # Stages before the opener handle shard URLs only, such as their order and split.
        opener = next((n for n, stage in enumerate(stages) if type(stage).__name__ in _OPENERS), 0)
        self._stages = [stage for stage in stages[opener:] if not _is_splitter(stage)]
        self.num_pieces = len(shards.urls)
        self.is_shuffled = any(map(_is_shuffle, stages)) or shards.seed is not None
        self.name = f"the {type(data).__name__}"

    def read(self, piece: int, epoch: int) -> Iterable[Any]:
        # Copies, as the user's pipeline keeps all its shards.
        pipeline = copy.copy(self._data)
        shards = copy.copy(self._data.pipeline[0])
        shards.urls = [shards.urls[piece]]
        pipeline.pipeline = [shards, *(_exact(stage, epoch) for stage in self._stages)]
        samples: Iterable[Any] = pipeline
        return samples


def _exact(stage: Any, epoch: int) -> Any:
    """Return a mixing stage with the same order each time a shard is read."""
    if type(stage).__name__ == "detshuffle":
        stage = copy.copy(stage)
        stage.epoch = epoch - 1
        return stage
    options = getattr(stage, "kw", {})
    if _is_shuffle(stage) and not {"seed", "rng"} & set(options):
        # Seed from the process's generator, reset for each piece: the stage's default is the time.
        seed = random.getrandbits(32)
        return lambda samples: stage.f(samples, *stage.args, **options, seed=seed)
    return stage


def _is_splitter(stage: Any) -> bool:
    return getattr(stage, "__name__", "") in _SPLITTERS


def _is_shuffle(stage: Any) -> bool:
    function = getattr(stage, "f", stage)
    name = getattr(function, "__name__", type(stage).__name__)
    return "shuffle" in name.lower()
