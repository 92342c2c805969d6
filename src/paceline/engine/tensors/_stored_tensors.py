"""Tensors of a checkpoint, read when they are used: from one file, or in pieces from several.

The state that the chief stores has a `ShardedTensor` in the place of each tensor that the ranks
store in pieces. The pieces of rank ``r`` are in ``shard_<r>.safetensors``, and ``shard_<r>.json``
says where in the whole each one begins.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_map_only

from paceline.engine.tensors._safetensors_file import TensorFile
from paceline.engine.tensors._sharded_tensors import is_sharded, like_piece, part_of, piece_here
from paceline.storage import CheckpointCorruptError


@dataclass(frozen=True)
class ShardedTensor:
    """What stands for a tensor whose pieces are stored by the ranks."""

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
    """A piece of a tensor: its file, its name there, and where in the whole it begins."""

    file: PieceFile
    name: str
    offset: Sequence[int]


class PieceFiles(Protocol):
    """The files of a checkpoint with the pieces of its tensors."""

    def pieces(self, name: str) -> Sequence[StoredPiece]:
        """Return the pieces of a tensor."""


class StoredTensor:
    """A tensor of a checkpoint, in one file or more; only what is asked for is read.

    Args:
        stands_for: What the chief has stored for it.
        files: The files with the pieces.
    """

    def __init__(self, stands_for: ShardedTensor, files: PieceFiles) -> None:
        self.name = stands_for.name
        self.shape = torch.Size(stands_for.shape)
        self.dtype = stands_for.dtype
        self._files = files

    def read(self, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
        """Return a part of it, on the CPU.

        Raises:
            CheckpointCorruptError: Pieces of it are missing.
        """
        size = torch.Size(shape)
        result, num_read = None, 0
        for piece in self._files.pieces(self.name):
            there, here = _overlap_of_pieces(
                piece.offset, piece.file.shape(piece.name), offset, shape
            )
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
        """Return all of it, on the CPU."""
        return self.read(self.shape, [0] * len(self.shape))

    @property
    def num_bytes(self) -> int:
        """The size of the whole in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def identity(self) -> object:
        """What tied weights, which are stored once, have in common."""
        pieces = self._files.pieces(self.name)
        return tuple((id(piece.file), piece.name) for piece in pieces) or (self.name,)

    def blocks(self, max_bytes: int) -> Iterator[torch.Tensor]:
        """Yield all its values in their order, in blocks of this size at most.

        Raises:
            CheckpointCorruptError: Pieces of it are missing.
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
    """A file with tensors in one piece each."""

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
    """The files ``shard_<r>`` of a checkpoint, which may be removed once this has been made.

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


def _overlap_of_pieces(
    start: Sequence[int], shape: Sequence[int], other_start: Sequence[int], other: Sequence[int]
) -> tuple[Any, Any]:
    """Return what two pieces have in common, as slices of each; None if nothing."""
    there, here = [], []
    for a, size, b, other_size in zip(start, shape, other_start, other, strict=True):
        low, high = max(a, b), min(a + size, b + other_size)
        if low >= high:
            return None, None
        there.append(slice(low - a, high - a))
        here.append(slice(low - b, high - b))
    return tuple(there), tuple(here)


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint that is read when it is used; sharded models read their piece alone.

    Attributes:
        source: The stored tensor, or once it was read the tensor in memory.
    """

    source: StoredTensor | torch.Tensor

    # What operations return is no lazy tensor.
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
    """Return a stored tensor as the present one is divided, which takes its place.

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


def lazy_stored_tensors(state: Any) -> Any:
    """Return a nested state with tensors in place of what stands for them."""
    if isinstance(state, StoredTensor):
        return LazyTensor(state)
    if isinstance(state, Mapping):
        return {key: lazy_stored_tensors(item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = map(lazy_stored_tensors, state)
        return list(items) if isinstance(state, list) else tuple(items)
    return state


def whole(state: Any) -> Any:
    """Return a nested state with all its tensors in memory."""
    if isinstance(state, StoredTensor):
        return state.whole()
    if isinstance(state, LazyTensor):
        return state.read()
    if isinstance(state, Mapping):
        return {key: whole(item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = map(whole, state)
        return list(items) if isinstance(state, list) else tuple(items)
    return state
