"""States as files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engine import load_pass_state, read_pass_state, store_pass_state, write_pass_state
from paceline.storage import CheckpointNotFoundError, storage_from

SMALL = {"version": 1, "ranks": [], "models": [{"weight": torch.ones(3)}]}
LARGE = {"version": 1, "ranks": [], "models": [{"weight": torch.ones(1 << 19)}]}


def weight_of(state: dict[str, Any]) -> torch.Tensor:
    assert state.keys() == SMALL.keys()
    weight: torch.Tensor = state["models"][0]["weight"]
    return weight


def test_a_full_disk_leaves_the_earlier_file(small_disk: Path) -> None:
    path = small_disk / "checkpoint"
    write_pass_state(SMALL, path)
    with pytest.raises(OSError, match="No space left on device"):
        write_pass_state(LARGE, path)
    assert list(small_disk.iterdir()) == [path]
    assert weight_of(read_pass_state(path)).equal(torch.ones(3))


def test_a_state_goes_to_a_bucket_and_comes_back(s3: str) -> None:
    place = store_pass_state(LARGE, storage_from(s3), "best")
    assert place == f"{s3}/best"
    assert weight_of(load_pass_state(place)).equal(torch.ones(1 << 19))
    with pytest.raises(FileExistsError, match="immutable"):
        store_pass_state(SMALL, storage_from(s3), "best")
    with pytest.raises(CheckpointNotFoundError, match="other must be committed"):
        load_pass_state(f"{s3}/other")
