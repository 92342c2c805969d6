"""The pieces of a window end to end, so that a batch takes its samples from one array."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.data._sample_columns import Columns, join_columns

# A batch of few pieces costs as little without, and these are large.
_FEWEST = 6
# Batches that were planned before the present window may still come.
_KEPT = 2


class FoundInPieces(NamedTuple):
    """Samples that lie in joined pieces.

    Attributes:
        rows: Which of the wanted samples these are.
        columns: The joined pieces.
        places: Their places there.
    """

    rows: Any
    columns: Columns
    places: Any


class ConcatenatedPieces:
    """The columns of the pieces of the present window, and of the one before.

    Args:
        sizes: The number of samples of every piece.
        get: Returns a piece.
        forget: Called with the pieces that need not be kept any more.
        limit_bytes: The most that two windows may take. With many partitions or large pieces, they
            would take more, most of which is not used.
    """

    def __init__(
        self,
        sizes: Any,
        get: Callable[[int], Any],
        forget: Callable[[Sequence[int]], None],
        limit_bytes: int,
    ) -> None:
        self._sizes = sizes
        self._get = get
        self._forget = forget
        self._limit_bytes = limit_bytes
        self._planned: Any = None
        self._windows: list[_Window] = []

    def plan(self, chunks: Any, num_bytes: int) -> None:
        """Have the pieces of a window joined when a sample of them is needed.

        Args:
            chunks: Their numbers, in any order.
            num_bytes: Their size in bytes.
        """
        is_of_use = len(chunks) >= _FEWEST and _KEPT * num_bytes <= self._limit_bytes
        self._planned = np.sort(chunks) if is_of_use else None

    def find(self, chunks: Any, places: Any) -> Iterator[FoundInPieces]:
        """Yield the samples that lie in joined pieces.

        Args:
            chunks: The piece of each wanted sample.
            places: The place of each wanted sample in its piece.
        """
        rows = np.arange(len(chunks))
        for window in self._windows_of(chunks):
            is_in = window.has(chunks[rows])
            if is_in.any():
                found = rows[is_in]
                yield FoundInPieces(
                    found, window.columns, window.places(chunks[found], places[found])
                )
                rows = rows[~is_in]
            if not len(rows):
                return

    def _windows_of(self, chunks: Any) -> "Iterator[_Window]":
        yield from self._windows
        # Asked for a window only if some samples are in none before.
        if self._planned is not None and _is_in(chunks, self._planned).any():
            planned, self._planned = self._planned, None
            window = self._join(planned)
            if window is not None:
                yield window

    def _join(self, planned: Any) -> "_Window | None":
        numbers = planned.tolist()
        pieces = [self._piece(number) for number in numbers]
        if not all(isinstance(piece, Columns) for piece in pieces):
            return None
        counts = self._sizes[planned]
        # New memory costs more than to fill what an earlier window had.
        unused = self._windows.pop().columns if len(self._windows) == _KEPT else None
        window = _Window(planned, np.cumsum(counts) - counts, join_columns(pieces, unused))
        self._windows.insert(0, window)
        self._forget(numbers)
        return window

    def _piece(self, number: int) -> Any:
        """Return a piece; one that two windows share is in the memory of the first."""
        if self._windows and self._windows[0].has(np.array([number]))[0]:
            return self._windows[0].piece(number, int(self._sizes[number]))
        return self._get(number)


class _Window(NamedTuple):
    chunks: Any
    begins: Any
    columns: Columns

    def has(self, chunks: Any) -> Any:
        return _is_in(chunks, self.chunks)

    def places(self, chunks: Any, places: Any) -> Any:
        return self.begins[np.searchsorted(self.chunks, chunks)] + places

    def piece(self, chunk: int, size: int) -> Columns:
        begin = int(self.begins[np.searchsorted(self.chunks, chunk)])
        return self.columns.part(begin, begin + size)


def _is_in(values: Any, ordered: Any) -> Any:
    """Tell which values are in a sorted array."""
    at = np.searchsorted(ordered, values)
    return ordered[np.minimum(at, len(ordered) - 1)] == values
