"""Sources of samples by number: changed, filtered, split into parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Any, SupportsIndex

from paceline._base.exceptions import add_note

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
