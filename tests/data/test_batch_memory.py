"""Memory of batches that is used again."""

import pytest
import torch

from paceline.data import _torch_loaders
from paceline.data._torch_loaders import ImageBatchMemory

SHAPE = (2, 3)


def place(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]


def test_memory_is_given_again_once_nobody_holds_it() -> None:
    memory = ImageBatchMemory(8)
    array = memory.take(SHAPE)
    first = place(array)
    # A tensor shares its memory, and so does a part of it.
    held = torch.from_numpy(array)
    del array
    assert place(memory.take(SHAPE)) != first
    held = held[1:].flatten()
    assert place(memory.take(SHAPE)) != first
    del held
    given = [memory.take(SHAPE) for _ in range(4)]
    assert first in map(place, given)


def test_no_memory_is_given_again_where_references_are_not_counted_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in CPython without its global lock."""
    monkeypatch.setattr(_torch_loaders, "_has_global_lock", lambda: False)
    memory = ImageBatchMemory(8)
    arrays = [memory.take(SHAPE) for _ in range(4)]
    assert len({*map(place, arrays)}) == 4
    assert memory._kept == []
