"""What the tests of trainers of creators share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bits(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return type(left) is type(right) and left == right


@pytest.fixture
def are_same() -> Callable[[Any, Any], bool]:
    """Return a function that tells whether two states are the same, bit for bit."""
    return same_bits


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
