"""Streams readable in pieces, for example file by file."""

import copy
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

logger = logging.getLogger(__name__)

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


_FETCHED_TOGETHER = 256


class Stream:
    """Iterable of samples with processing steps.

    Args:
        data: An iterable; an iterable torch data set keeps its place in a checkpoint if it has
            `state_dict`.
        steps: The steps, in order.
    """

    def __init__(self, data: Iterable[Any], steps: tuple["StreamStep", ...] = ()) -> None:
        self.data = data
        self.steps = steps
        self.name = f"the {type(data).__name__}"
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun and isinstance(self.data, Iterator):
            logger.warning(
                "The samples of %s are there once, and this is another epoch of it: what was read"
                " before is not read again. Hint: an object whose `__iter__` begins anew.",
                self.name,
            )
        self._has_begun = True
        return _run_steps(self.data, self.steps)

    def then(self, step: "StreamStep") -> "Stream":
        """Return the stream with an added step."""
        return Stream(self.data, (*self.steps, step))

    def pieces(self) -> StreamPieces | None:
        """Return the stream in pieces, or None if only readable as a whole."""
        pieces = stream_pieces(self.data)
        return pieces and _SteppedPieces(pieces, self.steps)

    @property
    def holds_samples(self) -> bool:
        """Whether a step buffers samples already read but not yet yielded."""
        return any(step.holds_samples for step in self.steps)


def _run_steps(data: Iterable[Any], steps: tuple["StreamStep", ...]) -> Iterator[Any]:
    samples = iter(data)
    for step in steps:
        samples = step(samples)
    return samples


class _SteppedPieces(StreamPieces):
    """Pieces of a stream with steps applied to the samples of each piece."""

    def __init__(self, pieces: StreamPieces, steps: tuple["StreamStep", ...]) -> None:
        self.num_pieces, self.name = pieces.num_pieces, pieces.name
        self.is_shuffled = pieces.is_shuffled or any(type(s) is MixingStreamStep for s in steps)
        self._pieces = pieces
        self._steps = steps

    def read(self, piece: int, epoch: int) -> Iterable[Any]:
        return _run_steps(self._pieces.read(piece, epoch), self._steps)


class StreamStep:
    """Processing step for the samples of a stream."""

    holds_samples = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the processed samples."""
        raise NotImplementedError


class MappingStreamStep(StreamStep):
    """A function of each sample."""

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the function's result for each sample."""
        return map(self._function, samples)


class FilterStreamStep(StreamStep):
    """Leaves samples out."""

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples accepted by the function."""
        return filter(self._function, samples)


class BatchStreamStep(StreamStep):
    """A function of some samples at once."""

    holds_samples = True

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the function's results for groups of samples."""
        while batch := list(islice(samples, _FETCHED_TOGETHER)):
            yield from self._function(batch)


class MixingStreamStep(StreamStep):
    """Shuffle buffer: yields samples drawn at random.

    Args:
        size: The samples in the buffer.
    """

    holds_samples = True

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples in another order, by the process's own generator."""
        buffer = list(islice(samples, self._size))
        for sample in samples:
            place = random.randrange(len(buffer))  # noqa: S311
            buffer[place], sample = sample, buffer[place]
            yield sample
        random.shuffle(buffer)
        yield from buffer


class StreamPartStep(StreamStep):
    """Every so many samples.

    Args:
        rank: The first of them.
        num_parts: How many parts there are.
    """

    def __init__(self, rank: int, num_parts: int) -> None:
        self._rank = rank
        self._num_parts = num_parts

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples of the part."""
        return islice(samples, self._rank, None, self._num_parts)
