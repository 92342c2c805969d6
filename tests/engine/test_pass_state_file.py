"""States as files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engine import load_pass_state, read_pass_state, store_pass_state, write_pass_state
from paceline.storage import CheckpointNotFoundError, storage_from

SMALL = {"version": 1, "ranks": [], "models": [{"weight": torch.ones(3)}]}
LARGE = {"version": 1, "ranks": [], "models": [{"weight": torch.ones(1 << 19)}]}


def test_a_full_disk_leaves_the_earlier_file(
    small_disk: Path, are_same: Callable[[Any, Any], bool]
) -> None:
    path = small_disk / "checkpoint"
    write_pass_state(SMALL, path)
    with pytest.raises(OSError, match="No space left on device"):
        write_pass_state(LARGE, path)
    assert list(small_disk.iterdir()) == [path]
    assert are_same(read_pass_state(path), SMALL)


def test_a_state_goes_to_a_bucket_and_comes_back(
    s3: str, are_same: Callable[[Any, Any], bool]
) -> None:
    place = store_pass_state(LARGE, storage_from(s3), "best")
    assert place == f"{s3}/best"
    assert are_same(load_pass_state(place), LARGE)
    with pytest.raises(FileExistsError, match="immutable"):
        store_pass_state(SMALL, storage_from(s3), "best")
    with pytest.raises(CheckpointNotFoundError, match="other must be committed"):
        load_pass_state(f"{s3}/other")
