"""Sources of samples by number, streams in pieces, default batches, exceptions of data sets."""

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Any, SupportsIndex

from paceline._base.arguments_and_errors import add_note

_HINT = (
    " Hint: `map` makes them alike, such as images of one size, or a number in place of None; or"
    " `collate` of `to_torch` (`collate_fn` of a DataLoader) makes a batch of a list of samples."
)


def _load_and_collate(samples: list[Any]) -> Any:
    # The first batch loads torch; an import statement would cost something with every batch.
    global _default_collate
    from torch.utils.data import default_collate

    _default_collate = default_collate
    return default_collate(samples)


_default_collate: Callable[[list[Any]], Any] = _load_and_collate


def collate_samples(samples: Any) -> Any:
    """Return samples as a batch by torch's `default_collate`, with clearer errors.

    Args:
        samples: A list of samples.

    Raises:
        ValueError: Arrays have different shapes, or dictionaries different keys.
        TypeError: Values such as None are in no tensor.
    """
    try:
        return _default_collate(samples)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        # torch's own error does not say which sample differs, nor in what.
        reason = _batch_reason("a sample", list(samples))
        if reason is None:
            raise
        kind = ValueError if isinstance(error, (KeyError, RuntimeError)) else TypeError
        raise kind(f"The samples of a batch must be alike, but {reason}.{_HINT}") from error


def _batch_reason(name: str, values: Sequence[Any]) -> str | None:
    """Return how the values of a batch differ, or None if no difference is found."""
    for kind, reason_of in ((Mapping, _batch_reason_of_keys), ((list, tuple), _length_reason)):
        if all(isinstance(value, kind) for value in values):
            return reason_of(name, values)
    if all(hasattr(value, "shape") for value in values):
        shapes = dict.fromkeys(str(list(value.shape)) for value in values)
        return f"{name} has the shapes {_first_of(shapes)}" if len(shapes) > 1 else None
    for kinds in ((int, float), (str, bytes)):
        if all(isinstance(value, kinds) for value in values):
            return None
    kinds_had = dict.fromkeys("None" if v is None else type(v).__name__ for v in values)
    return f"{name} is {' or '.join(kinds_had)}"


def _batch_reason_of_keys(name: str, values: Sequence[Mapping[Any, Any]]) -> str | None:
    first = values[0]
    keys = dict.fromkeys(str(sorted(map(str, value))) for value in values)
    if len(keys) > 1:
        return f"{name} has the keys {_first_of(keys)}"
    reasons = (_batch_reason(_named(name, key), [value[key] for value in values]) for key in first)
    return next((reason for reason in reasons if reason), None)


def _length_reason(name: str, values: Sequence[Sequence[Any]]) -> str | None:
    lengths = dict.fromkeys(str(len(value)) for value in values)
    if len(lengths) > 1:
        return f"{name} has the lengths {_first_of(lengths)}"
    places = enumerate(zip(*values, strict=True))
    reasons = (_batch_reason(f"{name}[{place}]", each) for place, each in places)
    return next((reason for reason in reasons if reason), None)


def _first_of(texts: Iterable[str]) -> str:
    return " and ".join(list(texts)[:3])


def _named(name: str, key: Any) -> str:
    return f"`{key}`" if name == "a sample" else f"{name}[{key!r}]"


class DataError(Exception):
    """The base of all errors about files of data; the message names the file."""


class DataChangedError(DataError):
    """Raised when a file has changed since the data set was made."""


class DataFormatError(DataError):
    """Raised when a file is damaged, cut off, or has other columns than the first."""


class DataNotFoundError(DataError, FileNotFoundError):
    """Raised when there is no file."""


Numbers = Any
"""A one-dimensional array of int64, without loading NumPy where only types are read."""


class Source(ABC):
    """Samples by number, from 0.

    Implementers override `__len__` and `fetch`; those whose samples lie in pieces that are read as
    a whole, such as the row groups of a file, override `chunk_sizes` and `expect` as well.
    """

    name: str = "the data set"
    """The name in messages, such as a URL."""

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
        """Keep the pieces of the current samples, and read pieces of later samples ahead."""

    @property
    def is_encoded(self) -> bool:
        """Whether samples, like images, need decoding; `fetch_encoded` returns them raw."""
        return False

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples before they are decoded: dictionaries, some values of them `Encoded`.

        Several threads may call it at once.
        """
        raise NotImplementedError

    def identity(self) -> Mapping[str, Any] | None:
        """Return facts to recognise these samples by in a checkpoint, or None."""
        return None


_TABLES = {
    "pyarrow.lib.Table": "`table.to_pylist()`",
    "pandas.DataFrame": "`frame.to_dict('records')`",
    "pandas.core.frame.DataFrame": "`frame.to_dict('records')`",
    "polars.dataframe.frame.DataFrame": "`frame.to_dicts()`",
}


def is_iterable_only(data: Any) -> bool:
    """Return whether data can only be iterated over.

    Raises:
        TypeError: They cannot be read at all.
    """
    # Compared by name: torch is not imported just to ask.
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


class Stage(ABC):
    """Processing step between reading and delivery; the number of samples stays the same."""

    @abstractmethod
    def apply(self, samples: Any, numbers: Sequence[int] | None = None) -> Any:
        """Return the processed samples of a single fetch.

        Args:
            samples: The samples.
            numbers: Their numbers, for errors.
        """


class MapSamplesStage(Stage):
    """A function of a sample."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def apply(self, samples: Any, numbers: Sequence[int] | None = None) -> list[Any]:
        """Return the function's result for each sample."""
        made: list[Any] = []
        try:
            for sample in samples:
                made.append(self._function(sample))
        except Exception as error:
            if numbers is not None and len(made) < len(numbers):
                add_note(error, f"While reading sample {numbers[len(made)]}, in `map`.")
            raise
        return made


class MapBatchesStage(Stage):
    """Function applied to samples as they are fetched together."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def apply(self, samples: Any, numbers: Sequence[int] | None = None) -> Any:
        """Return the function's result for all the samples together.

        Raises:
            TypeError: It returns something else.
            ValueError: It returns another number of samples.
        """
        plain = getattr(samples, "plain", None)
        if plain is None:
            changed = self._function(samples)
            if not hasattr(changed, "__len__"):
                raise TypeError(
                    "The function of `map_batches` must return a list of samples, but returned"
                    f" {type(changed).__name__}."
                )
        else:
            changed = samples.changed_to(self._function(plain()))
        if len(changed) != len(samples):
            raise ValueError(
                "The function of `map_batches` must return as many samples as it gets, but got"
                f" {len(samples)} and returned {len(changed)}. Hint: `filter` leaves samples out."
            )
        return changed


class StagedSource(Source):
    """Source with stages applied to its samples, for example before a filter."""

    def __init__(self, source: Source, stages: tuple[Stage, ...]) -> None:
        self.name = source.name
        self._source = source
        self._stages = stages

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, numbers: Sequence[int]) -> Any:
        samples = self._source.fetch(numbers)
        for stage in self._stages:
            samples = stage.apply(samples, numbers)
        return samples

    def chunk_sizes(self) -> Any:
        return self._source.chunk_sizes()

    def window(self) -> int:
        return self._source.window()

    def expect(self, now: Any, later: Any) -> None:
        self._source.expect(now, later)

    def identity(self) -> Mapping[str, Any] | None:
        return self._source.identity()


class SamplesInMemory(Source):
    """Samples of any data with a length and access by number.

    Args:
        data: A map-style torch data set, a list, an array, a tensor.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.name = f"the {type(data).__name__}"

    def __len__(self) -> int:
        return len(self.data)

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by a single `__getitems__` call if supported, else in a loop."""
        fetch_all = getattr(self.data, "__getitems__", None)
        if fetch_all is not None:
            samples: list[Any] = fetch_all(list(numbers))
            return samples
        return [self.data[number] for number in numbers]


_COUNTED_AT_ONCE = 1024


class PartOfSource(Source):
    """Some samples of another source; a subclass tells which."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._source = source

    @abstractmethod
    def _in_source(self, numbers: Numbers) -> Numbers:
        """Return the numbers in the source of samples, as arrays."""

    @abstractmethod
    def _selection(self) -> tuple[Numbers, ...]:
        """Return the arrays that tell which samples these are."""

    def _listed(self, numbers: Sequence[int]) -> list[int]:
        import numpy as np

        listed: list[int] = self._in_source(np.asarray(numbers, dtype=np.int64)).tolist()
        return listed

    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return samples of the source."""
        return self._source.fetch(self._listed(numbers))

    @property
    def is_encoded(self) -> bool:
        """Whether the source's are."""
        return self._source.is_encoded

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples of the source before they are decoded."""
        return self._source.fetch_encoded(self._listed(numbers))

    def window(self) -> int:
        """Return the source's."""
        return self._source.window()

    def expect(self, now: Numbers, later: Numbers) -> None:
        """Have the source read ahead."""
        self._source.expect(self._in_source(now), self._in_source(later))

    def identity(self) -> Mapping[str, Any] | None:
        """Return the source's identity with a digest of the selection, or None."""
        return self._identity

    @cached_property
    def _identity(self) -> Mapping[str, Any] | None:
        return _with_selection(self._source.identity(), *self._selection())


class PickedSamples(PartOfSource):
    """Samples of a source, by their numbers there.

    Args:
        source: The source.
        picked: The numbers, as an array.
        chunk_sizes: How many of them lie in each piece, in order; None if any costs the same.
    """

    def __init__(self, source: Source, picked: Numbers, chunk_sizes: Numbers | None = None) -> None:
        super().__init__(source)
        self._picked = picked, chunk_sizes

    def __len__(self) -> int:
        return len(self._picked[0])

    def _in_source(self, numbers: Numbers) -> Numbers:
        return self._picked[0][numbers]

    def _selection(self) -> tuple[Numbers, ...]:
        return self._picked[:1]

    def chunk_sizes(self) -> Numbers | None:
        """Return how many picked samples each piece has."""
        return self._picked[1]


class FilteredSamples(PickedSamples):
    """Samples of a source accepted by a function.

    The samples are counted once: when their number is first asked for, or before they travel to
    another process.

    Args:
        source: The source.
        keeps: The function.
    """

    def __init__(self, source: Source, keeps: Callable[[Any], Any]) -> None:
        PartOfSource.__init__(self, source)
        self._keeps = keeps

    def __reduce__(self) -> Any:
        # The function is of no use any more, and workers need not count again.
        return PickedSamples, (self._source, *self._picked)

    @cached_property
    def _picked(self) -> tuple[Numbers, Numbers | None]:  # type: ignore[override]  # set once
        import numpy as np

        source, total = self._source, len(self._source)
        kept = np.zeros(total, dtype=bool)
        for start in range(0, total, _COUNTED_AT_ONCE):
            numbers = range(start, min(start + _COUNTED_AT_ONCE, total))
            kept[start : numbers.stop] = [bool(self._keeps(each)) for each in source.fetch(numbers)]
        sizes = source.chunk_sizes()
        if sizes is not None:
            ends = np.concatenate(([0], np.cumsum(kept)))
            sizes = np.diff(ends[np.concatenate(([0], np.cumsum(sizes)))])
        return np.flatnonzero(kept), sizes


class SampleRanges(PartOfSource):
    """Ranges of samples of a source in pieces.

    Args:
        source: The source.
        starts: The first number of each range, as an array.
        sizes: The number of samples of each range, none of them 0.
    """

    def __init__(self, source: Source, starts: Numbers, sizes: Numbers) -> None:
        import numpy as np

        super().__init__(source)
        self._starts = starts
        self._sizes = sizes
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _in_source(self, numbers: Numbers) -> Numbers:
        import numpy as np

        index = np.searchsorted(self._ends, numbers, side="right")
        return self._starts[index] + numbers - (self._ends - self._sizes)[index]

    def _selection(self) -> tuple[Numbers, ...]:
        return self._starts, self._sizes

    def chunk_sizes(self) -> Numbers | None:
        """Return the sizes of the ranges."""
        return self._sizes


def _with_selection(
    identity: Mapping[str, Any] | None, *selected: Numbers
) -> Mapping[str, Any] | None:
    if identity is None:
        return None
    import xxhash

    # Digest includes an earlier selection: a split of a split differs from a split.
    hasher = xxhash.xxh3_64(str(identity.get("selection")).encode())
    for array in selected:
        hasher.update(array.tobytes())
    return {**identity, "selection": hasher.hexdigest()}


def split_sizes(total: int, sizes: int | Sequence[float]) -> list[int]:
    """Return the number of samples of each requested part.

    Args:
        total: The number of samples.
        sizes: The number of parts, of which the first may have one sample more; or their sizes; or
            their shares, which sum to at most 1.

    Raises:
        TypeError: It is none of these.
        ValueError: They cannot be had.
    """
    # Arrays of one number have an index as well.
    if isinstance(sizes, SupportsIndex) and not hasattr(sizes, "__len__"):
        sizes = sizes.__index__()
        if not 1 <= sizes <= total:
            raise ValueError(
                f"The number of parts must be from 1 to the number of samples, which is {total},"
                f" but got {sizes}: a part without samples is of no use."
            )
        whole, rest = divmod(total, sizes)
        return [whole + (index < rest) for index in range(sizes)]
    if not isinstance(sizes, Iterable) or not all(isinstance(size, Real) for size in sizes):
        raise TypeError(
            "Parts must be given by their number, such as 3, or by a list of their sizes or shares,"
            f" such as (0.8, 0.2), but got {sizes!r}."
        )
    if all(isinstance(size, Integral) for size in sizes):
        counts = [int(size) for size in sizes]
    # Tolerance for the rounding of shares such as (0.7, 0.2, 0.1).
    elif sum(sizes) > 1 + 1e-9:
        raise ValueError(f"Shares must sum to at most 1, but got {list(sizes)}.")
    else:
        ends = [0, *(round(total * sum(sizes[: n + 1])) for n in range(len(sizes)))]
        counts = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    if not counts or min(counts) < 1 or sum(counts) > total:
        raise ValueError(
            f"Each part must have a sample, and all together at most {total}, but {list(sizes)}"
            f" gives {counts}."
        )
    return counts


def split_into_parts(source: Source, counts: Sequence[int], seed: int | None) -> list[Source]:
    """Return disjoint parts of a source.

    Samples that are read in pieces are mixed piece by piece, so that a part has few pieces.

    Args:
        source: The source.
        counts: The number of samples of each part.
        seed: Mixes the samples before they are cut; None keeps their order.
    """
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]
    spans = list(zip(ends, ends[1:], strict=False))
    return [_source_span(source, [span], seed) for span in spans]


def split_into_folds(
    source: Source, num_folds: int, seed: int | None
) -> list[tuple[Source, Source]]:
    """Return for each fold the samples of the other folds, and its own."""
    counts = split_sizes(len(source), num_folds)
    if num_folds < 2:
        raise ValueError(f"`splits` must be at least 2, but got {num_folds}.")
    total = len(source)
    folds = []
    for index, count in enumerate(counts):
        start = sum(counts[:index])
        rest = [(0, start), (start + count, total)]
        folds.append(
            (_source_span(source, rest, seed), _source_span(source, [(start, start + count)], seed))
        )
    return folds


def range_of(source: Source, numbers: range) -> Source:
    """Return a range of the samples; the step must be 1 if they lie in pieces."""
    import numpy as np

    if source.chunk_sizes() is None:
        return PickedSamples(source, np.arange(numbers.start, numbers.stop, numbers.step))
    return _source_span(source, [(numbers.start, numbers.stop)], None)


def _source_span(source: Source, spans: Sequence[tuple[int, int]], seed: int | None) -> Source:
    """Return the samples in spans of the shuffled sequence of all samples."""
    import numpy as np

    sizes = source.chunk_sizes()
    if sizes is None:
        numbers = np.arange(len(source))
        if seed is not None:
            numbers = np.random.RandomState(seed).permutation(len(source))
        return PickedSamples(source, np.concatenate([numbers[a:b] for a, b in spans]))
    starts = np.cumsum(sizes) - sizes
    if seed is not None:
        order = np.random.RandomState(seed).permutation(len(sizes))
        starts, sizes = starts[order], sizes[order]
    pieces = [cut_line(starts, sizes, a, b) for a, b in spans]
    return SampleRanges(
        source,
        np.concatenate([piece[0] for piece in pieces]),
        np.concatenate([piece[1] for piece in pieces]),
    )


def cut_line(starts: Numbers, sizes: Numbers, begin: int, end: int) -> tuple[Any, Any]:
    """Return the ranges between two places of a line of ranges laid end to end."""
    import numpy as np

    ends = np.cumsum(sizes)
    begins = ends - sizes
    low, high = np.maximum(begins, begin), np.minimum(ends, end)
    is_in = high > low
    return (starts + low - begins)[is_in], (high - low)[is_in]


def worker_part(source: Source, rank: int, num_parts: int) -> range:
    """Return the numbers of the samples of a worker: every so many of those in memory."""
    total = len(source)
    if source.chunk_sizes() is None:
        return range(rank, total, num_parts)
    start = sum(total // num_parts + (part < total % num_parts) for part in range(rank))
    return range(start, start + total // num_parts + (rank < total % num_parts))


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
