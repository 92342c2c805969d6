"""Tensors that are divided among the ranks (torch's DTensor), and this rank's piece of each."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

Piece = tuple[Sequence[int], Sequence[int]]
"""The shape of a part of a tensor, and where in the whole it begins."""


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


@lru_cache(maxsize=4096)
def local_piece(shape: torch.Size, mesh: Any, placements: Any) -> Piece:
    """Return the shape and the beginning of this rank's piece."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed = compute_local_shape_and_global_offset(shape, mesh, placements)
    return placed[0], placed[1]


def piece_here(tensor: Any) -> Piece:
    """Return the shape and the beginning of this rank's piece of a sharded tensor."""
    return local_piece(tensor.shape, tensor.device_mesh, tensor.placements)


def part_of(tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    """Return a part of a whole tensor, in the same memory."""
    ends = (begin + size for begin, size in zip(offset, shape, strict=True))
    return tensor[tuple(map(slice, offset, ends))]


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
    sharded.to_local().copy_(part_of(whole, *piece_here(sharded)))
