"""Tensors of a checkpoint, read on first use: from a single file, or in pieces from several."""

import itertools
import json
import math
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch.utils._pytree import tree_map_only

from paceline._training.engine.tensor_copies_and_digests import (
    is_sharded,
    like_piece,
    part_of,
    piece_here,
)
from paceline.storage._checkpoint_errors import CheckpointCorruptError

# How the format calls the types of torch.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT_BYTES = 8
# Smaller pieces of a file are copied together, up to so many bytes.
_SMALL_BYTES = 64 * 1024
_JOINED_BYTES = 1024 * 1024


class TensorFile:
    """Safetensors file read in parts, without loading or mapping the whole.

    It stays open after its name is gone. It is not mapped: of a mapped file, memory holds all that
    was read so far.

    Raises:
        SafetensorError: It is no whole safetensors file.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt"):
            pass  # this checks the header against the size
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        self._begin = 8 + length
        header: dict[str, Any] = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        self._entries = header

    @property
    def names(self) -> Iterable[str]:
        """The names of its tensors."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor.

        Raises:
            ValueError: The type is not supported.
        """
        kind = self._entries[name]["dtype"]
        if kind not in _DTYPES:
            raise ValueError(
                f"The type of a tensor must be one of {', '.join(_DTYPES)}, but {name!r} in"
                f" {str(self._path)!r} has {kind}."
            )
        return _DTYPES[kind]

    def read(self, name: str, where: Sequence[slice]) -> torch.Tensor:
        """Return a part of a tensor, on the CPU.

        Args:
            name: The name of the tensor.
            where: For each dimension, where the part begins and ends.
        """
        shape, dtype = self.shape(name), self.dtype(name)
        # Range to read: the span of the first dimension with more than a single index.
        dim = next((d for d, part in enumerate(where) if part.stop - part.start != 1), 0)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        begin = sum(part.start * strides[d] for d, part in enumerate(where[: dim + 1]))
        size = (where[dim].stop - where[dim].start) * strides[dim] if shape else 1
        values = self._elements(name, begin, size, dtype)
        if not shape:
            return values.reshape(())
        rows = values.reshape([1] * dim + [-1, *shape[dim + 1 :]])
        return rows[(slice(None),) * (dim + 1) + tuple(where[dim + 1 :])]

    def _elements(self, name: str, begin: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        data = bytearray(size * dtype.itemsize)
        offset = self._begin + self._entries[name]["data_offsets"][0] + begin * dtype.itemsize
        view, num_read = memoryview(data), 0
        # Loop of reads: Linux returns at most 2 GiB per call.
        while num_read < len(data):
            count = os.preadv(self._descriptor, [view[num_read:]], offset + num_read)
            if count == 0:
                raise OSError(f"{str(self._path)!r} ends within {name!r}.")
            num_read += count
        return torch.frombuffer(data, dtype=dtype)


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int], Iterable[torch.Tensor]]],
    metadata: Mapping[str, str],
) -> None:
    """Write a new safetensors file.

    Args:
        path: The file.
        tensors: For each name the type, the shape and the values: blocks, one after the other.
        metadata: Texts that the file holds besides.

    Raises:
        FileExistsError: It is there already.
        ValueError: A type is not supported.
    """
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    order, beginning, _ = _file_layout(shapes, {"__metadata__": dict(metadata)})
    with path.open("xb") as file:
        file.write(beginning)
        for name in order:
            for block in tensors[name][2]:
                file.write(_bytes_of(block.contiguous()))


def tensor_file_pieces(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[int, Iterator[memoryview]] | None:
    """Return the size and the pieces of a safetensors file; large tensors are not copied.

    Args:
        tensors: Contiguous tensors of the CPU, which must stay as they are.

    Returns:
        None if a type is one that only the library knows.
    """
    if not {tensor.dtype for tensor in tensors.values()} <= _NAMES.keys():
        return None
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    order, beginning, num_bytes = _file_layout(shapes, {})
    blocks = chain([memoryview(beginning)], (_bytes_of(tensors[name]) for name in order))
    return len(beginning) + num_bytes, _without_small_ones(blocks)


def _file_layout(
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], header: dict[str, Any]
) -> tuple[Sequence[str], bytes, int]:
    """Return the order of tensors in a file, the header bytes, and the size of the data."""
    # Large elements first, so that all of them are aligned.
    order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
    end = 0
    for name in order:
        dtype, shape = shapes[name]
        if dtype not in _NAMES:
            raise ValueError(
                f"The type of a tensor must be one that safetensors knows, but {name!r} is of"
                f" {dtype}."
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padding: the values after the header begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return order, len(text).to_bytes(8, "little") + text, end


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _without_small_ones(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield pieces with small neighbours joined: a state may have thousands of small pieces."""
    small = bytearray()
    for piece in pieces:
        if len(piece) < _SMALL_BYTES:
            small += piece
            if len(small) < _JOINED_BYTES:
                continue
        if small:
            yield memoryview(small)
            small = bytearray()
        if len(piece) >= _SMALL_BYTES:
            yield piece
    if small:
        yield memoryview(small)


def write_whole_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write CPU tensors to a safetensors file, replacing an existing file.

    Raises:
        OSError: It cannot be written.
    """
    # safetensors' own `save_file` makes an array of each tensor first, which keeps training from
    # the interpreter for 30 ms per 1,000 tensors; the rest runs without the interpreter's lock.
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    }
    try:
        serialize_file(specs, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        # A full disk must be reported as such, not as a broken file.
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


@dataclass(frozen=True)
class ShardedTensor:
    """Placeholder for a tensor stored in pieces by the ranks: name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PieceFile(Protocol):
    """A file with pieces of tensors."""

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a piece."""

    def read(self, name: str, where: Sequence[slice]) -> torch.Tensor:
        """Return a part of a piece, on the CPU."""


@dataclass(frozen=True)
class StoredPiece:
    """Piece of a tensor: its file, its name in the file, and its offset within the whole."""

    file: PieceFile
    name: str
    offset: Sequence[int]


class PieceFiles(Protocol):
    """The files of a checkpoint with the pieces of its tensors."""

    def pieces(self, name: str) -> Sequence[StoredPiece]:
        """Return the pieces of a tensor."""


class StoredTensor:
    """Tensor of a checkpoint in a file or more, read only in the parts needed.

    Args:
        stands_for: The chief's stored value for this tensor.
        files: The files with the pieces.
    """

    def __init__(self, stands_for: ShardedTensor, files: PieceFiles) -> None:
        self.name = stands_for.name
        self.shape = torch.Size(stands_for.shape)
        self.dtype = stands_for.dtype
        self._files = files

    def read(self, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
        """Return a part of the tensor, on the CPU.

        Raises:
            CheckpointCorruptError: Pieces of the tensor are missing.
        """
        size = torch.Size(shape)
        result, num_read = None, 0
        for piece in self._files.pieces(self.name):
            there, here = _piece_overlap(piece.offset, piece.file.shape(piece.name), offset, shape)
            if there is None:
                continue
            values = piece.file.read(piece.name, there)
            if values.shape == size and values.dtype == self.dtype and values.is_contiguous():
                return values
            result = torch.empty(size, dtype=self.dtype) if result is None else result
            result[here] = values
            num_read += values.numel()
        if num_read != size.numel():
            raise CheckpointCorruptError(
                f"The checkpoint must hold all pieces of {self.name!r}, but"
                f" {size.numel() - num_read} of {size.numel()} values are in none of its files."
                " Hint: use another checkpoint."
            )
        return torch.empty(size, dtype=self.dtype) if result is None else result

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, on the CPU."""
        return self.read(self.shape, [0] * len(self.shape))

    @property
    def num_bytes(self) -> int:
        """The size of the whole in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def identity(self) -> object:
        """A key equal for tied weights, as they are stored only once."""
        pieces = self._files.pieces(self.name)
        return tuple((id(piece.file), piece.name) for piece in pieces) or (self.name,)

    def blocks(self, max_bytes: int) -> Iterator[torch.Tensor]:
        """Yield all its values in their order, in blocks of this size at most.

        Raises:
            CheckpointCorruptError: Pieces of the tensor are missing.
        """
        inner = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        num_elements = max(1, max_bytes // self.dtype.itemsize)
        dim = next((d for d, size in enumerate(inner) if size <= num_elements), None)
        if dim is None or not self.shape.numel():
            yield self.whole()
            return
        rest, step = self.shape[dim + 1 :], num_elements // inner[dim]
        for lead in itertools.product(*map(range, self.shape[:dim])):
            for begin in range(0, self.shape[dim], step):
                num_rows = min(step, self.shape[dim] - begin)
                yield self.read((1,) * dim + (num_rows, *rest), (*lead, begin, *(0 for _ in rest)))


class WholeTensors:
    """File with whole tensors, each as its only piece."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def pieces(self, name: str) -> Sequence[StoredPiece]:
        """Return the tensor as the only piece."""
        return (StoredPiece(self._file, name, [0] * len(self._file.shape(name))),)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors of the file."""
        file = self._file
        return {
            name: StoredTensor(ShardedTensor(name, file.shape(name), file.dtype(name)), self)
            for name in file.names
        }


class ShardFiles:
    """Pieces in the files ``shard_<r>`` of a checkpoint; the files may be removed once open.

    Raises:
        CheckpointCorruptError: One cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._pieces: dict[str, list[StoredPiece]] = {}
        for path in sorted(directory.glob("shard_*.json")):
            try:
                file = TensorFile(path.with_suffix(".safetensors"))
                stored = json.loads(path.read_text())
                for name, offset in stored["offsets"].items():
                    # Weights that share memory are stored under the name of the first.
                    piece = StoredPiece(file, stored[name]["$tensor"], offset)
                    file.shape(piece.name)
                    self._pieces.setdefault(name, []).append(piece)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                raise CheckpointCorruptError(
                    f"{path.name} and {path.stem}.safetensors in {str(directory)!r} must be whole,"
                    f" but cannot be read ({type(error).__name__}: {error}). Hint: download the"
                    " checkpoint again, or use another one."
                ) from error

    def pieces(self, name: str) -> Sequence[StoredPiece]:
        """Return the pieces of a tensor."""
        return self._pieces.get(name, ())


def _piece_overlap(
    start: Sequence[int], shape: Sequence[int], other_start: Sequence[int], other: Sequence[int]
) -> tuple[Any, Any]:
    """Return the overlap of two pieces as slices of each; None twice without an overlap."""
    there, here = [], []
    for a, size, b, other_size in zip(start, shape, other_start, other, strict=True):
        low, high = max(a, b), min(a + size, b + other_size)
        if low >= high:
            return None, None
        there.append(slice(low - a, high - a))
        here.append(slice(low - b, high - b))
    return tuple(there), tuple(here)


class LazyTensor(torch.Tensor):
    """Tensor of a checkpoint read on first use; a sharded model reads only its own piece.

    Attributes:
        source: The stored tensor, or once it was read the tensor in memory.
    """

    source: StoredTensor | torch.Tensor

    # Plain result type: operations on a lazy tensor return ordinary tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, stored: StoredTensor) -> "LazyTensor":
        """Return a tensor without memory."""
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=stored.dtype
        )
        made.source = stored
        return made

    def read(self) -> torch.Tensor:
        """Return the whole tensor, on the CPU."""
        if isinstance(self.source, StoredTensor):
            self.source = self.source.whole()
        return self.source

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let an operation have the tensors themselves."""
        args, kwargs = tree_map_only(cls, cls.read, (args, kwargs or {}))
        return function(*args, **kwargs)

    def numpy(self, **options: Any) -> Any:
        """Return the array of the tensor."""
        return self.read().numpy(**options)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def fit_stored_tensor(stored: Any, present: Any) -> Any:
    """Return a stored tensor in place of the present tensor, divided in the same way.

    Args:
        stored: A whole tensor, a `StoredTensor`, or anything else, such as a tensor that is divided
            already, which is returned as it is.
        present: The tensor of the model, of the same shape.
    """
    if is_sharded(stored):
        return stored
    if isinstance(stored, LazyTensor):
        stored = stored.source
    if not is_sharded(present) or not isinstance(stored, (torch.Tensor, StoredTensor)):
        return stored.whole() if isinstance(stored, StoredTensor) else stored
    shape, offset = piece_here(present)
    if isinstance(stored, StoredTensor):
        local = stored.read(shape, offset)
    else:
        local = part_of(stored, shape, offset)
    return like_piece(local.to(present.device), present)


def with_items(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a nested value with the items of the outermost container converted."""
    if isinstance(value, Mapping):
        return {key: convert(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(convert, value)
        return list(items) if isinstance(value, list) else tuple(items)
    return value


def lazy_stored_tensors(state: Any) -> Any:
    """Return a nested state with each `StoredTensor` wrapped in a `LazyTensor`."""
    if isinstance(state, StoredTensor):
        return LazyTensor(state)
    return with_items(state, lazy_stored_tensors)


def whole(state: Any) -> Any:
    """Return a nested state with all its tensors in memory."""
    if isinstance(state, StoredTensor):
        return state.whole()
    if isinstance(state, LazyTensor):
        return state.read()
    return with_items(state, whole)
