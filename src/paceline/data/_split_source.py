"""Disjoint parts of a source."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, SupportsIndex

from paceline.data._sample_source import Numbers, Source
from paceline.data._selected_samples import PickedSamples, SampleRanges


def sizes_of_split(total: int, sizes: int | Sequence[float]) -> list[int]:
    """Return the numbers of samples of the parts that a user asks for.

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
    return [_span_of_source(source, [span], seed) for span in spans]


def split_into_folds(
    source: Source, num_folds: int, seed: int | None
) -> list[tuple[Source, Source]]:
    """Return for each fold the samples of the other folds, and its own."""
    counts = sizes_of_split(len(source), num_folds)
    if num_folds < 2:
        raise ValueError(f"`splits` must be at least 2, but got {num_folds}.")
    total = len(source)
    folds = []
    for index, count in enumerate(counts):
        start = sum(counts[:index])
        rest = [(0, start), (start + count, total)]
        folds.append(
            (
                _span_of_source(source, rest, seed),
                _span_of_source(source, [(start, start + count)], seed),
            )
        )
    return folds


def range_of(source: Source, numbers: range) -> Source:
    """Return a range of the samples; those that are read in pieces must follow each other."""
    import numpy as np

    if source.chunk_sizes() is None:
        return PickedSamples(source, np.arange(numbers.start, numbers.stop, numbers.step))
    return _span_of_source(source, [(numbers.start, numbers.stop)], None)


def _span_of_source(source: Source, spans: Sequence[tuple[int, int]], seed: int | None) -> Source:
    """Return the samples that lie in some spans of the mixed line of all samples."""
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
