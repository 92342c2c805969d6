"""The tensors of a sharded model in a checkpoint: each rank stores its piece of each.

The state that the chief stores has a `ShardedTensor` in the place of each such tensor, which tells
its name, shape and type. The pieces of rank ``r`` are in ``shard_<r>.safetensors``, under those
names, and ``shard_<r>.json`` tells where in the whole each piece begins.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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


def take_pieces(state: Any, name: str, pieces: dict[str, Any]) -> Any:
    """Return a state without its sharded tensors, and add this rank's pieces to others.

    Args:
        state: A nested state.
        name: What the names of its tensors begin with.
        pieces: The pieces by name, and under "offsets" where each begins.
    """
    if is_sharded(state):
        _add_piece(state, name, pieces)
        return ShardedTensor(name, tuple(state.shape), state.dtype)
    if isinstance(state, dict):
        return {key: take_pieces(item, f"{name}.{key}", pieces) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = [take_pieces(item, f"{name}.{i}", pieces) for i, item in enumerate(state)]
        return items if isinstance(state, list) else tuple(items)
    return state


def _add_piece(tensor: Any, name: str, pieces: dict[str, Any]) -> None:
    mesh = tensor.device_mesh
    is_copy = any(
        placement.is_replicate() and mesh.get_local_rank(dim)
        for dim, placement in enumerate(tensor.placements)
    )
    local = tensor.to_local()
    if local.numel() and not is_copy:
        _, offset = _local_piece(tensor)
        pieces[name] = local.detach()
        pieces.setdefault("offsets", {})[name] = list(offset)


def _local_piece(tensor: Any) -> Piece:
    """Return the shape and the beginning of this rank's piece."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return placed[0], placed[1]


class StoredTensor:
    """A tensor of a checkpoint whose pieces are in several files; only what is asked for is read.

    Args:
        stands_for: What the chief has stored for it.
        files: The files with the pieces.
    """

    def __init__(self, stands_for: ShardedTensor, files: "ShardFiles") -> None:
        self.name = stands_for.name
        self.shape = torch.Size(stands_for.shape)
        self.dtype = stands_for.dtype
        self._files = files

    def read(self, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
        """Return a part of it, on the CPU.

        Raises:
            CheckpointCorruptError: Pieces of it are missing.
        """
        result = torch.empty(tuple(shape), dtype=self.dtype)
        num_read = 0
        for file, start in self._files.pieces(self.name):
            piece = file.get_slice(self.name)
            there, here = _overlap(start, piece.get_shape(), offset, shape)
            if there is not None:
                values = piece[there]
                result[here] = values
                num_read += values.numel()
        if num_read != math.prod(shape):
            raise CheckpointCorruptError(
                f"The checkpoint must hold all pieces of {self.name!r}, but"
                f" {math.prod(shape) - num_read} of {math.prod(shape)} values are in none of its"
                " files shard_<rank>.safetensors. Hint: use another checkpoint."
            )
        return result

    def whole(self) -> torch.Tensor:
        """Return all of it, on the CPU."""
        return self.read(self.shape, [0] * len(self.shape))


class ShardFiles:
    """The files ``shard_<r>`` of a checkpoint, which may be removed once this has been made.

    Raises:
        CheckpointCorruptError: One cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._pieces: dict[str, list[tuple[Any, list[int]]]] = {}
        for path in sorted(directory.glob("shard_*.json")):
            try:
                # It stays mapped after its name is gone.
                file = safe_open(path.with_suffix(".safetensors"), framework="pt")
                offsets = json.loads(path.read_text())["offsets"]
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                raise CheckpointCorruptError(
                    f"{path.name} and {path.stem}.safetensors in {str(directory)!r} must be whole,"
                    f" but cannot be read ({type(error).__name__}: {error}). Hint: download the"
                    " checkpoint again, or use another one."
                ) from error
            for name, offset in offsets.items():
                self._pieces.setdefault(name, []).append((file, offset))

    def pieces(self, name: str) -> Sequence[tuple[Any, list[int]]]:
        """Return the pieces of a tensor: the file, and where in the whole it begins."""
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
        stored: A whole tensor, a `StoredTensor`, or anything else, which is returned as it is.
        present: The tensor of the model, of the same shape.
    """
    if not is_sharded(present) or not isinstance(stored, (torch.Tensor, StoredTensor)):
        return stored.whole() if isinstance(stored, StoredTensor) else stored
    from torch.distributed.tensor import DTensor

    shape, offset = _local_piece(present)
    if isinstance(stored, StoredTensor):
        local = stored.read(shape, offset)
    else:
        ends = (begin + size for begin, size in zip(offset, shape, strict=True))
        local = stored[tuple(map(slice, offset, ends))]
    return DTensor.from_local(
        local.to(present.device),
        present.device_mesh,
        present.placements,
        run_check=False,
        shape=present.shape,
        stride=present.stride(),
    )


def whole(state: Any) -> Any:
    """Return a nested state with all its tensors in memory."""
    if isinstance(state, StoredTensor):
        return state.whole()
    if isinstance(state, Mapping):
        return {key: whole(item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = map(whole, state)
        return list(items) if isinstance(state, list) else tuple(items)
    return state
