"""The tensors of a sharded model in a checkpoint: each rank stores its piece of each.

The state that the chief stores has a `ShardedTensor` in the place of each such tensor, which tells
its name, shape and type. The pieces of rank ``r`` are in ``shard_<r>.safetensors``, under those
names, and ``shard_<r>.json`` tells where in the whole each piece begins.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_map_only

from paceline.engine._tensor_file import TensorFile
from paceline.storage import CheckpointCorruptError

Piece = tuple[Sequence[int], Sequence[int]]
"""Where a part of a tensor begins and what shape it has."""


@dataclass(frozen=True)
class ShardedTensor:
    """What stands for a tensor whose pieces are stored by the ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def is_sharded(value: object) -> bool:
    """Tell whether a tensor is divided among the ranks."""
    # Importing its class takes a second, for nothing where there are none.
    return type(value).__name__ == "DTensor"


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's piece of a divided tensor, in the same memory; others as they are."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local.detach()


@dataclass(slots=True, eq=False)
class OwnPiece:
    """This rank's piece of a sharded tensor.

    Attributes:
        local: The piece, or None if another rank stores it; in a state whose tensors are numbered,
            its number.
        spec: The shape and type of the whole, and how it is divided.
    """

    local: Any
    spec: Any


@dataclass(frozen=True)
class Divided:
    """A part of a checkpoint whose sharded tensors are stored in pieces.

    Attributes:
        state: The nested state.
        name: What the names of its pieces begin with, alike on all ranks that have some.
        first_rank: As for `take_pieces`.
        is_whole: Whether this rank also stores what is not sharded.
    """

    state: Any
    name: str
    first_rank: int = 0
    is_whole: bool = True


def own_piece(tensor: Any, first_rank: int) -> OwnPiece:
    """Return this rank's piece of a sharded tensor; training stands still for it."""
    # What is public makes a new tensor by autograd.
    spec, local = tensor._spec, tensor._local_tensor
    if not local.numel() or _is_copy(spec.mesh, spec.placements, first_rank):
        local = None
    return OwnPiece(local, spec)


def parts_with_shard(parts: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the parts of a checkpoint without sharded tensors, and this rank's pieces as one more.

    Args:
        parts: States by name, some of them `Divided`.
        rank: This rank.
    """
    pieces: dict[str, Any] = {}
    stored = {}
    for name, part in parts.items():
        given = part if isinstance(part, Divided) else Divided(part, name)
        state = take_pieces(given.state, given.name, pieces, given.first_rank)
        if given.is_whole:
            stored[name] = state
    return stored | ({f"shard_{rank}": pieces} if pieces else {})


def take_pieces(state: Any, name: str, pieces: dict[str, Any], first_rank: int = 0) -> Any:
    """Return a state without its sharded tensors, and add this rank's pieces to others.

    Args:
        state: A nested state.
        name: What the names of its tensors begin with.
        pieces: The pieces by name, and under "offsets" where each begins.
        first_rank: One of the ranks that store the tensors. Other ranks that hold them, such as
            another tensor-parallel group, hold copies.
    """
    if is_sharded(state):
        state = own_piece(state, first_rank)
    if isinstance(state, OwnPiece):
        spec = state.spec
        if state.local is not None:
            _, offset = _local_piece(spec.shape, spec.mesh, spec.placements)
            pieces[name] = state.local.detach()
            pieces.setdefault("offsets", {})[name] = list(offset)
        return ShardedTensor(name, tuple(spec.shape), spec.tensor_meta.dtype)
    if isinstance(state, LazyTensor):
        return state.read()
    if isinstance(state, dict):
        return {
            key: take_pieces(item, f"{name}.{key}", pieces, first_rank)
            for key, item in state.items()
        }
    if isinstance(state, (list, tuple)):
        items = [
            take_pieces(item, f"{name}.{i}", pieces, first_rank) for i, item in enumerate(state)
        ]
        return items if isinstance(state, list) else tuple(items)
    return state


@lru_cache(maxsize=4096)
def _is_copy(mesh: Any, placements: Any, first_rank: int) -> bool:
    """Tell whether another rank stores the same piece."""
    return first_rank not in mesh.mesh or any(
        placement.is_replicate() and mesh.get_local_rank(dim)
        for dim, placement in enumerate(placements)
    )


@lru_cache(maxsize=4096)
def _local_piece(shape: torch.Size, mesh: Any, placements: Any) -> Piece:
    """Return the shape and the beginning of this rank's piece."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed = compute_local_shape_and_global_offset(shape, mesh, placements)
    return placed[0], placed[1]


def _piece_here(tensor: Any) -> Piece:
    return _local_piece(tensor.shape, tensor.device_mesh, tensor.placements)


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


def joined_pieces(state: Any, by_rank: Sequence[Mapping[str, Any]]) -> Any:
    """Return a state with its whole tensors, on the CPU.

    Args:
        state: What `take_pieces` returned.
        by_rank: The pieces of each rank.
    """
    if isinstance(state, ShardedTensor):
        result = torch.empty(state.shape, dtype=state.dtype)
        for pieces in by_rank:
            if state.name in pieces:
                piece, start = pieces[state.name], pieces["offsets"][state.name]
                ends = (a + size for a, size in zip(start, piece.shape, strict=True))
                result[tuple(map(slice, start, ends))] = piece
        return result
    if isinstance(state, dict):
        return {key: joined_pieces(item, by_rank) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = [joined_pieces(item, by_rank) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return state


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
            there, here = _overlap(piece.offset, piece.file.shape(piece.name), offset, shape)
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


def _overlap(
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


def fitted(stored: Any, present: Any) -> Any:
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
    shape, offset = _piece_here(present)
    if isinstance(stored, StoredTensor):
        local = stored.read(shape, offset)
    else:
        local = _piece_of(stored, shape, offset)
    return like_piece(local.to(present.device), present)


def like_piece(local: torch.Tensor, present: Any) -> Any:
    """Return this rank's piece as a tensor that is divided as the present one is, if that is."""
    if not is_sharded(present):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        present.device_mesh,
        present.placements,
        run_check=False,
        shape=present.shape,
        stride=present.stride(),
    )


def copy_piece(whole: Any, sharded: Any) -> None:
    """Copy this rank's piece of a whole tensor into a sharded one."""
    sharded.to_local().copy_(_piece_of(whole, *_piece_here(sharded)))


def _piece_of(tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    ends = (begin + size for begin, size in zip(offset, shape, strict=True))
    return tensor[tuple(map(slice, offset, ends))]


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


def lazy(state: Any) -> Any:
    """Return a nested state with tensors in place of what stands for them."""
    if isinstance(state, StoredTensor):
        return LazyTensor(state)
    if isinstance(state, Mapping):
        return {key: lazy(item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = map(lazy, state)
        return list(items) if isinstance(state, list) else tuple(items)
    return state
