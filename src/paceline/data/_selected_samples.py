"""Some of the samples of another source: of a filter, a split or a fold."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from paceline.data._sample_source import Numbers, Source

_COUNTED_AT_ONCE = 1024


class PickedSamples(Source):
    """Samples of a source, by their numbers there.

    Args:
        source: The source.
        picked: The numbers, as an array.
        chunk_sizes: How many of them lie in each piece, in order; None if any costs the same.
    """

    def __init__(self, source: Source, picked: Numbers, chunk_sizes: Numbers | None = None) -> None:
        self.name = source.name
        self._source = source
        self._picked = picked
        self._chunk_sizes = chunk_sizes

    def __len__(self) -> int:
        return len(self._picked)

    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return samples of the source."""
        return self._source.fetch(self._picked[list(numbers)].tolist())

    @property
    def is_encoded(self) -> bool:
        """Whether the source's are."""
        return self._source.is_encoded

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples of the source before they are decoded."""
        return self._source.fetch_encoded(self._picked[list(numbers)].tolist())

    def chunk_sizes(self) -> Numbers | None:
        """Return how many picked samples each piece has."""
        return self._chunk_sizes

    def window(self) -> int:
        """Return the source's."""
        return self._source.window()

    def expect(self, now: Numbers, later: Numbers) -> None:
        """Have the source read ahead."""
        self._source.expect(self._picked[now], self._picked[later])

    def identity(self) -> Mapping[str, Any] | None:
        """Return the source's identity, and what tells the picked samples from others."""
        return self._identity

    @cached_property
    def _identity(self) -> Mapping[str, Any] | None:
        return _with_selection(self._source.identity(), self._picked)


class FilteredSamples(Source):
    """The samples of a source for which a function is true.

    The samples are counted once: when their number is first asked for, or before they travel to
    another process.

    Args:
        source: The source.
        keeps: The function.
    """

    def __init__(self, source: Source, keeps: Callable[[Any], Any]) -> None:
        self.name = source.name
        self._source = source
        self._keeps = keeps

    def __reduce__(self) -> Any:
        # The function is of no use any more, and workers need not count again.
        return _as_it_is, (self.counted,)

    @cached_property
    def counted(self) -> PickedSamples:
        """The kept samples."""
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
        return PickedSamples(source, np.flatnonzero(kept), sizes)

    def __len__(self) -> int:
        return len(self.counted)

    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return kept samples."""
        return self.counted.fetch(numbers)

    @property
    def is_encoded(self) -> bool:
        """Whether the source's are."""
        return self._source.is_encoded

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples of the source before they are decoded."""
        return self.counted.fetch_encoded(numbers)

    def chunk_sizes(self) -> Numbers | None:
        """Return how many kept samples each piece has."""
        return self.counted.chunk_sizes()

    def window(self) -> int:
        """Return the source's."""
        return self._source.window()

    def expect(self, now: Numbers, later: Numbers) -> None:
        """Have the source read ahead."""
        self.counted.expect(now, later)

    def identity(self) -> Mapping[str, Any] | None:
        """Return the source's identity, and what tells the kept samples from others."""
        return self.counted.identity()


def _as_it_is(source: PickedSamples) -> PickedSamples:
    return source


class SampleRanges(Source):
    """Ranges of the samples of a source whose samples lie in pieces.

    Args:
        source: The source.
        starts: The first number of each range, as an array.
        sizes: The number of samples of each range, none of them 0.
    """

    def __init__(self, source: Source, starts: Numbers, sizes: Numbers) -> None:
        import numpy as np

        self.name = source.name
        self._source = source
        self._starts = starts
        self._sizes = sizes
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _in_source(self, numbers: Numbers) -> Numbers:
        import numpy as np

        index = np.searchsorted(self._ends, numbers, side="right")
        return self._starts[index] + numbers - (self._ends - self._sizes)[index]

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

    def _listed(self, numbers: Sequence[int]) -> list[int]:
        import numpy as np

        listed: list[int] = self._in_source(np.asarray(numbers, dtype=np.int64)).tolist()
        return listed

    def chunk_sizes(self) -> Numbers | None:
        """Return the sizes of the ranges."""
        return self._sizes

    def window(self) -> int:
        """Return the source's."""
        return self._source.window()

    def expect(self, now: Numbers, later: Numbers) -> None:
        """Have the source read ahead."""
        self._source.expect(self._in_source(now), self._in_source(later))

    def identity(self) -> Mapping[str, Any] | None:
        """Return the source's identity, and what tells the ranges from others."""
        return self._identity

    @cached_property
    def _identity(self) -> Mapping[str, Any] | None:
        return _with_selection(self._source.identity(), self._starts, self._sizes)


def _with_selection(
    identity: Mapping[str, Any] | None, *selected: Numbers
) -> Mapping[str, Any] | None:
    if identity is None:
        return None
    import xxhash

    hasher = xxhash.xxh3_64(str(identity.get("selection")).encode())
    for array in selected:
        hasher.update(array.tobytes())
    return {**identity, "selection": hasher.hexdigest()}
