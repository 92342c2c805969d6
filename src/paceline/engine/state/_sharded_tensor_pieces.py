"""Capture of a state with sharded tensors: each rank stores its pieces, and one all that is left.

The state that is stored has a `ShardedTensor` in the place of each such tensor, with its name,
shape and type. `paceline.engine.tensors._stored_tensors` reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from paceline.engine.tensors._sharded_tensors import is_sharded, local_piece
from paceline.engine.tensors._stored_tensors import LazyTensor, ShardedTensor


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
class StateInPieces:
    """A part of a checkpoint whose sharded tensors are stored in pieces.

    Attributes:
        state: The nested state.
        name: What the names of its pieces begin with, alike on all ranks that have some.
        first_rank: As for `take_sharded_tensor_pieces`.
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
        parts: States by name, some of them `StateInPieces`.
        rank: This rank.
    """
    pieces: dict[str, Any] = {}
    stored = {}
    for name, part in parts.items():
        given = part if isinstance(part, StateInPieces) else StateInPieces(part, name)
        state = take_sharded_tensor_pieces(given.state, given.name, pieces, given.first_rank)
        if given.is_whole:
            stored[name] = state
    return stored | ({f"shard_{rank}": pieces} if pieces else {})


def take_sharded_tensor_pieces(
    state: Any, name: str, pieces: dict[str, Any], first_rank: int = 0
) -> Any:
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
            _, offset = local_piece(spec.shape, spec.mesh, spec.placements)
            pieces[name] = state.local.detach()
            pieces.setdefault("offsets", {})[name] = list(offset)
        return ShardedTensor(name, tuple(spec.shape), spec.tensor_meta.dtype)
    if isinstance(state, LazyTensor):
        return state.read()
    if isinstance(state, dict):
        return {
            key: take_sharded_tensor_pieces(item, f"{name}.{key}", pieces, first_rank)
            for key, item in state.items()
        }
    if isinstance(state, (list, tuple)):
        items = [
            take_sharded_tensor_pieces(item, f"{name}.{i}", pieces, first_rank)
            for i, item in enumerate(state)
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


def joined_pieces(state: Any, by_rank: Sequence[Mapping[str, Any]]) -> Any:
    """Return a state with its whole tensors, on the CPU.

    Args:
        state: What `take_sharded_tensor_pieces` returned.
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
