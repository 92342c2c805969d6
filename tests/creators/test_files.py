"""States as files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.creators._files import read_state, write_state

SMALL = {"version": 1, "ranks": [], "models": [{"weight": torch.ones(3)}]}
LARGE = {"version": 1, "ranks": [], "models": [{"weight": torch.ones(1 << 19)}]}


def test_a_full_disk_leaves_the_earlier_file(
    small_disk: Path, are_same: Callable[[Any, Any], bool]
) -> None:
    path = small_disk / "checkpoint"
    write_state(SMALL, path)
    with pytest.raises(OSError, match="No space left on device"):
        write_state(LARGE, path)
    assert list(small_disk.iterdir()) == [path]
    assert are_same(read_state(path), SMALL)
