"""Safetensors files, read and written piece by piece in memory of a fixed size, or as a whole."""

import json
import math
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

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
    """A safetensors file of which only what is asked for is read.

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
        # What is between the ends of the first dimension that is not a single index is read.
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
    order, beginning, _ = _layout_of_file(shapes, {"__metadata__": dict(metadata)})
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
    order, beginning, num_bytes = _layout_of_file(shapes, {})
    blocks = chain([memoryview(beginning)], (_bytes_of(tensors[name]) for name in order))
    return len(beginning) + num_bytes, _without_small_ones(blocks)


def _layout_of_file(
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], header: dict[str, Any]
) -> tuple[Sequence[str], bytes, int]:
    """Return the order of the tensors in a file, the file's beginning, and the bytes behind it."""
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
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return order, len(text).to_bytes(8, "little") + text, end


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _without_small_ones(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Join pieces that are small, of which a state may have thousands."""
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
    """Write tensors of the CPU to a safetensors file, which replaces one that is there.

    Raises:
        OSError: It cannot be written.
    """
    # safetensors' own `save_file` makes an array of each tensor first, which keeps training from
    # the interpreter for 30 ms per 1,000 tensors; the rest goes on without the interpreter's lock.
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
        # A full disk is to be told as what it is.
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
