"""Samples as columns, as files of tables hold them, and pieces end to end (pyarrow)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from paceline.data._default_batches import collate_samples

_DTYPES = {
    getattr(pa, name)(): np.dtype(name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}


class Columns:
    """Samples as columns: arrays with the samples along the first axis.

    Numbers without gaps are NumPy arrays, also vectors of one length; all else, such as text, is an
    array of Arrow until a sample is asked for.

    Args:
        arrays: The columns by name, all of one length.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values()))) if self.arrays else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each sample as a dictionary."""
        names = list(self.arrays)
        values = [_column_row_values(array) for array in self.arrays.values()]
        return (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))

    @property
    def num_bytes(self) -> int:
        """The memory of the columns."""
        return sum(_num_bytes(array) for array in self.arrays.values())

    def take(self, places: Any) -> "Columns":
        """Return some samples, by an array of their places."""
        return Columns(
            {name: _take_from_column(array, places) for name, array in self.arrays.items()}
        )

    def part(self, begin: int, end: int) -> "Columns":
        """Return the samples between two places, in the same memory."""
        return Columns({name: array[begin:end] for name, array in self.arrays.items()})

    def plain(self) -> dict[str, Any]:
        """Return the columns as NumPy arrays, columns of text and the like as arrays of objects."""
        return {name: _column_as_numpy(array) for name, array in self.arrays.items()}

    def changed_to(self, arrays: Any) -> "Columns":
        """Return the result of a user's function on these samples, checked.

        Args:
            arrays: The result: a dictionary of arrays, tensors or lists.

        Raises:
            TypeError: It is something else.
            ValueError: A column has another number of values than there are samples.
        """
        if not isinstance(arrays, Mapping):
            raise TypeError(
                "The function of `map_batches` must return a dictionary of arrays, as it gets one,"
                f" but returned {type(arrays).__name__}."
            )
        changed = {}
        for name, values in arrays.items():
            if not hasattr(values, "__len__") or isinstance(values, (str, bytes, Mapping)):
                raise TypeError(
                    "The function of `map_batches` must return an array for each column, but"
                    f" {name!r} is {values!r}."
                )
            if len(values) != len(self):
                raise ValueError(
                    "The function of `map_batches` must return as many samples as it gets, but got"
                    f" {len(self)} and returned {len(values)} in {name!r}. Hint: `filter` leaves"
                    " samples out."
                )
            changed[name] = _column_as_array(values)
        return Columns(changed)

    def to_torch(self) -> dict[str, Any]:
        """Return a batch: tensors for columns of numbers or vectors, lists for the rest."""
        return {name: _column_batch(name, array) for name, array in self.arrays.items()}


def join_columns(parts: Sequence[Columns], unused: Columns | None = None) -> Columns:
    """Return the concatenated samples of several parts.

    Args:
        parts: The parts.
        unused: Columns whose memory is written over if it is large enough.
    """
    if len(parts) == 1:
        return parts[0]
    memory = {} if unused is None else unused.arrays
    return Columns(
        {
            name: _join_columns_of([part.arrays[name] for part in parts], memory.get(name))
            for name in parts[0].arrays
        }
    )


def gather_columns(total: int, taken: Sequence[tuple[Any, Any, Any]]) -> Any:
    """Return samples of several pieces, put into the wanted order.

    Args:
        total: The number of samples.
        taken: For some places in the result: these places, a piece, and the places in the piece.

    Returns:
        A list, or `Columns` if the pieces are.
    """
    if len(taken) == 1 and isinstance(taken[0][1], Columns):
        rows, piece, places = taken[0]
        # Single piece: `places` are already in the wanted order.
        return piece.take(places)
    parts = [piece.take(places) for _, piece, places in taken]
    if not parts or not isinstance(parts[0], Columns):
        samples: list[Any] = [None] * total
        for (rows, _, _), part in zip(taken, parts, strict=True):
            for row, sample in zip(rows.tolist(), part, strict=True):
                samples[row] = sample
        return samples
    back = np.empty(total, dtype=np.int64)
    back[np.concatenate([rows for rows, _, _ in taken])] = np.arange(total)
    return join_columns(parts).take(back)


def table_columns(table: Any) -> Columns:
    """Return the columns of an Arrow table or record batch."""
    return Columns(
        {name: _decode_column(table.column(name)) for name in dict.fromkeys(table.schema.names)}
    )


def _decode_column(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            # Text of more than 2 GB stays in several.
            column = pa.concat_arrays(column.chunks)
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if column.null_count and not pa.types.is_floating(kind):
        return column
    if _is_number(kind):
        return _column_numbers(column)
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        # `flatten` would load all of Arrow's functions.
        values = column.values.slice(column.offset * kind.list_size, len(column) * kind.list_size)
        if not values.null_count:
            return _column_numbers(values).reshape(len(column), kind.list_size)
    return column


def _column_numbers(column: Any) -> Any:
    """Return numbers as an array, NaN for gaps; Arrow's own method would load pandas."""
    size, (valid, data) = len(column), column.buffers()
    if not size or data is None:
        return np.full(size, np.nan, _DTYPES.get(column.type, np.bool_))
    if pa.types.is_boolean(column.type):
        return _bits(column, data)
    values = np.frombuffer(data, dtype=_DTYPES[column.type])[column.offset : column.offset + size]
    if column.null_count:
        values = values.copy()
        values[~_bits(column, valid)] = np.nan
    return values


def _bits(column: Any, buffer: Any) -> Any:
    end = column.offset + len(column)
    bits = np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), bitorder="little", count=end)
    return bits[column.offset :].astype(np.bool_)


def _is_number(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_vector(kind: Any) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and _is_number(kind.value_type))


def _num_bytes(array: Any) -> int:
    return int(array.nbytes)


def _take_from_column(array: Any, places: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array[places]
    return array.take(pa.array(places))


def _join_columns_of(arrays: Sequence[Any], memory: Any = None) -> Any:
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return pa.concat_arrays([_column_as_arrow(array) for array in arrays])
    total, first = sum(map(len, arrays)), arrays[0]
    if any((each.dtype, each.shape[1:]) != (first.dtype, first.shape[1:]) for each in arrays):
        return np.concatenate(arrays)
    held: Any = memory.base if isinstance(memory, np.ndarray) else None
    fits = held is not None and (held.dtype, held.shape[1:]) == (first.dtype, first.shape[1:])
    if not fits or len(held) < total:
        # The next window may have a few samples more.
        held = np.empty((total + total // 4, *first.shape[1:]), first.dtype)
    return np.concatenate(arrays, out=held[:total])


def _column_as_arrow(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array
    if array.ndim == 1:
        return pa.array(array)
    # The vectors of another piece have gaps.
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])


def _column_as_array(values: Any) -> Any:
    """Return values as an array: numbers and equal-length vectors as numbers, else objects."""
    numpy = getattr(values, "numpy", None)
    if callable(numpy):
        return numpy()
    if not isinstance(values, (list, tuple)):
        return values
    # Lists of unequal lengths make no array.
    with suppress(ValueError):
        array = np.array(values)
        if array.dtype.kind in "biuf":
            return array
    # `np.array` would turn nested lists into further axes.
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _column_row_values(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    if _is_vector(array.type):
        return [_vector(value.values) if value.is_valid else None for value in array]
    return array.to_pylist()


def _vector(values: Any) -> Any:
    is_gapless = not values.null_count or pa.types.is_floating(values.type)
    return np.array(_column_numbers(values)) if is_gapless else np.array(values)


def _column_as_numpy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    values = np.empty(len(array), dtype=object)
    values[:] = _column_row_values(array)
    return values


def _column_batch(name: str, array: Any) -> Any:
    import torch

    if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":
        # Copy of read-only arrays: these belong to a whole piece, writable ones to this batch.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    values = _column_row_values(array)
    is_vectors = len(values) > 0 and isinstance(values[0], np.ndarray)
    if not is_vectors:
        return list(values)
    return collate_samples([{name: value} for value in values])[name]


# A batch of few pieces costs as little without, and these are large.
_FEWEST = 6
# Batches that were planned before the present window may still come.
_KEPT = 2


class FoundInPieces(NamedTuple):
    """Samples found in joined pieces.

    Attributes:
        rows: Which of the wanted samples these are.
        columns: The joined pieces.
        places: Their places there.
    """

    rows: Any
    columns: Columns
    places: Any


@dataclass(eq=False, repr=False)
class ConcatenatedPieces:
    """Joined columns of the pieces of the current window and the previous window.

    Args:
        sizes: The number of samples of every piece.
        get: Returns a piece.
        forget: Called with the pieces that need not be kept any more.
        limit_bytes: The most that two windows may take. With many partitions or large pieces, they
            would take more, most of which is not used.
    """

    sizes: Any
    get: Callable[[int], Any]
    forget: Callable[[Sequence[int]], None]
    limit_bytes: int

    def __post_init__(self) -> None:
        self._planned: Any = None
        self._windows: list[_Window] = []

    def plan(self, chunks: Any, num_bytes: int) -> None:
        """Have the pieces of a window joined when a sample of them is needed.

        Args:
            chunks: Their numbers, in any order.
            num_bytes: Their size in bytes.
        """
        is_of_use = len(chunks) >= _FEWEST and _KEPT * num_bytes <= self.limit_bytes
        self._planned = np.sort(chunks) if is_of_use else None

    def find(self, chunks: Any, places: Any) -> Iterator[FoundInPieces]:
        """Yield the samples contained in joined pieces.

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
        counts = self.sizes[planned]
        # New memory costs more than reusing the memory of an earlier window.
        unused = self._windows.pop().columns if len(self._windows) == _KEPT else None
        window = _Window(planned, np.cumsum(counts) - counts, join_columns(pieces, unused))
        self._windows.insert(0, window)
        # Joined pieces leave the cache: the window has a copy of their samples.
        self.forget(numbers)
        return window

    def _piece(self, number: int) -> Any:
        """Return a piece, from the newest window if already joined there."""
        if self._windows and self._windows[0].has(np.array([number]))[0]:
            return self._windows[0].piece(number, int(self.sizes[number]))
        return self.get(number)


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
    """Return a mask of the values contained in a sorted array."""
    at = np.searchsorted(ordered, values)
    return ordered[np.minimum(at, len(ordered) - 1)] == values
