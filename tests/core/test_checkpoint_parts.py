"""Checkpoints of which each rank stores a part by itself."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core import CheckpointParts
from paceline.journal import RunDirectory
from paceline.storage import DirectoryStorage

UUID = "6558c952-a9a2-5b5b-8bfa-a0a6ecf191c0"
OTHER = "7558c952-a9a2-5b5b-8bfa-a0a6ecf191c0"

MakeParts = Callable[..., CheckpointParts]


@pytest.fixture
def committed() -> list[str]:
    return []


@pytest.fixture
def make_parts(tmp_path: Path, committed: list[str]) -> MakeParts:
    """Return a function that makes what a rank stores by."""
    storage = DirectoryStorage(tmp_path / "checkpoints")

    def make(rank: int = 0, world_size: int = 1) -> CheckpointParts:
        def commit(uuid: str, metadata: dict[str, Any]) -> None:
            storage.commit(uuid, metadata, num_shards=world_size)
            committed.append(uuid)

        return CheckpointParts(
            RunDirectory(tmp_path), storage, rank=rank, world_size=world_size, commit=commit
        )

    return make


def store(parts: CheckpointParts, name: str, uuid: str = UUID) -> None:
    with parts.store(uuid, {"steps_completed": 1}) as (path, _):
        (path / name).write_text(name)


def test_a_checkpoint_is_committed_when_the_last_rank_has_stored_its_part(
    make_parts: MakeParts, committed: list[str], tmp_path: Path
) -> None:
    ranks = [make_parts(rank, 3) for rank in range(3)]
    store(ranks[0], "a")
    store(ranks[1], "b")
    assert ranks[0].finish(timeout_s=0.2) == 1
    assert not committed
    assert UUID in RunDirectory(tmp_path).begun_checkpoints()
    store(ranks[2], "c")
    assert ranks[0].finish() == 0
    assert committed == [UUID]
    assert RunDirectory(tmp_path).begun_checkpoints() == {}
    manifest = DirectoryStorage(tmp_path / "checkpoints").verify(UUID)
    assert sorted(manifest.files) == ["a", "b", "c"]


def test_checkpoints_are_committed_in_their_order(
    make_parts: MakeParts, committed: list[str]
) -> None:
    chief, other = make_parts(0, 2), make_parts(1, 2)
    store(chief, "a", UUID)
    store(chief, "a", OTHER)
    assert chief.num_pending == 2
    store(other, "b", OTHER)
    assert chief.finish(1, timeout_s=0.2) == 2
    store(other, "b", UUID)
    chief.finish()
    assert committed == [UUID, OTHER]


def test_what_still_waits_is_given_up_by_close(make_parts: MakeParts) -> None:
    chief = make_parts(0, 2)
    store(chief, "a")
    chief.close()
    assert "paceline-commit" not in {thread.name for thread in threading.enumerate()}


def test_two_ranks_that_disagree_about_a_file_are_told(make_parts: MakeParts) -> None:
    chief, other = make_parts(0, 2), make_parts(1, 2)
    store(chief, "a")
    with pytest.raises(FileExistsError, match="'a'"), other.store(UUID, {}) as (path, _):
        (path / "a").write_text("of another rank")
    chief.close()


def test_checkpoint_that_cannot_be_committed_is_not_waited_for(
    make_parts: MakeParts, tmp_path: Path
) -> None:
    def refuse(uuid: str, metadata: dict[str, Any]) -> None:
        raise OSError(f"no more space for {uuid}")

    storage = DirectoryStorage(tmp_path / "checkpoints")
    alone = CheckpointParts(RunDirectory(tmp_path), storage, rank=0, world_size=1, commit=refuse)
    with pytest.raises(OSError, match=UUID):
        store(alone, "a")
    assert alone.num_pending == 0
    chief = CheckpointParts(RunDirectory(tmp_path), storage, rank=0, world_size=2, commit=refuse)
    store(make_parts(1, 2), "b", OTHER)
    store(chief, "a", OTHER)
    # The error of the thread is raised once.
    with pytest.raises(OSError, match=OTHER):
        chief.finish()
    assert chief.finish() == 0
