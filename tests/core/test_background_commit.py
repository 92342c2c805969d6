"""Checkpoints of which each rank stores a part by itself."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._base.run_directory import RunInfo
from paceline.core import _background_checkpoints as _checkpoint_parts
from paceline.core._background_checkpoints import CheckpointParts
from paceline.core._run_storage import discard_unfinished
from paceline.journal import RunDirectory
from paceline.storage import CheckpointWriteError, DirectoryStorage

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


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_disagree_about_a_file_are_told(
    make_parts: MakeParts, committed: list[str], late: int
) -> None:
    ranks = [make_parts(rank, 3) for rank in range(3)]
    store(ranks[2 - late], "a")
    store(ranks[1], "b")
    with pytest.raises(FileExistsError, match="'a'"), ranks[late].store(UUID, {}) as (path, _):
        (path / "a").write_text("of another rank")
    ranks[0].close()
    assert committed == []


def test_ranks_that_do_not_store_are_named_in_time(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_checkpoint_parts, "_WARN_AFTER_S", 0.0)
    ranks = [make_parts(rank, 3) for rank in range(3)]
    store(ranks[1], "b")
    store(ranks[0], "a")
    deadline = time.monotonic() + 60
    while "waits for rank(s) 2: all ranks must store" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(_checkpoint_parts, "_LIMIT_S", 0.0)
    message = r"step 1 is not whole: rank\(s\) 2 did not store"
    with pytest.raises(CheckpointWriteError, match=message):
        ranks[0].finish()


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


def test_a_checkpoint_that_a_rank_could_not_store_is_given_up_when_a_later_one_is_whole(
    make_parts: MakeParts,
    committed: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.core._background_checkpoints._LOOK_LATER_S", 0.01)
    ranks = [make_parts(rank, 3) for rank in range(3)]
    for rank in (0, 1):
        store(ranks[rank], "abc"[rank])
    with pytest.raises(CheckpointWriteError), ranks[2].store(UUID, {"steps_completed": 1}):
        raise CheckpointWriteError("no space")
    # Nobody knows yet whether rank 2 is only slow.
    assert ranks[0].finish(timeout_s=0.2) == 1
    for rank in range(3):
        store(ranks[rank], "abc"[rank], OTHER)
    assert ranks[0].finish() == 0
    assert committed == [OTHER]
    assert "The checkpoint of step 1 is not whole: rank(s) 2 did not store." in caplog.text
    assert RunDirectory(tmp_path).begun_checkpoints() == {}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {OTHER}


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_the_chief_could_not_store_is_removed_after_the_next_checkpoint(
    make_parts: MakeParts, committed: list[str], tmp_path: Path, world_size: int
) -> None:
    ranks = [make_parts(rank, world_size) for rank in range(world_size)]
    with pytest.raises(CheckpointWriteError), ranks[0].store(UUID, {"steps_completed": 1}):
        raise CheckpointWriteError("no space")
    for uuid in (UUID, OTHER):
        for rank in range(uuid == UUID, world_size):
            store(ranks[rank], "abc"[rank], uuid)
    assert ranks[0].finish() == 0
    assert committed == [OTHER]
    assert RunDirectory(tmp_path).begun_checkpoints() == {}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {OTHER}


def test_a_checkpoint_that_the_chief_lost_stays_while_other_ranks_store_theirs(
    make_parts: MakeParts, committed: list[str], tmp_path: Path
) -> None:
    chief, other = make_parts(0, 2), make_parts(1, 2)
    store(chief, "a")
    with pytest.raises(CheckpointWriteError), chief.store(OTHER, {"steps_completed": 2}):
        raise CheckpointWriteError("no space")
    store(other, "b")
    with other.store(OTHER, {"steps_completed": 2}) as (path, _):
        assert chief.finish() == 0
        assert committed == [UUID]
        (path / "b").touch()
    assert set(RunDirectory(tmp_path).begun_checkpoints()) == {OTHER}


def test_a_checkpoint_that_is_never_whole_ends_in_time_as_the_error_of_the_newest(
    make_parts: MakeParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.core._background_checkpoints._LIMIT_S", 0.05)
    chief = make_parts(0, 3)
    store(chief, "a")
    with pytest.raises(CheckpointWriteError, match=r"step 1 is not whole: rank\(s\) 1, 2 did not"):
        chief.finish()
    # It was told, and training goes on.
    chief.check()


def test_training_ends_when_three_commits_in_a_row_fail_for_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "1e-9")

    def commit(uuid: str, metadata: dict[str, Any]) -> None:
        raise CheckpointWriteError("no answer")

    storage = DirectoryStorage(tmp_path / "checkpoints")
    ranks = [
        CheckpointParts(RunDirectory(tmp_path), storage, rank=rank, world_size=2, commit=commit)
        for rank in range(2)
    ]
    for number in range(3):
        for rank in ranks:
            store(rank, str(number), f"{number}{UUID[1:]}")
        while ranks[0].num_pending:
            time.sleep(0.01)
        if number < 2:
            ranks[0].check()

    def check() -> None:
        # The thread says so a moment after the checkpoint waits no more.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ranks[0].check()
            time.sleep(0.01)

    with pytest.raises(CheckpointWriteError, match="no answer"):
        check()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_checkpoint_that_another_node_has_recorded_is_not_removed(
    make_parts: MakeParts, tmp_path: Path, rank: int
) -> None:
    """The run directory of a node without the chief tells of parts alone."""
    storage = DirectoryStorage(tmp_path / "checkpoints")
    info = RunInfo(run_id="trial-1", name="x", created=0.0, checkpoint_storage=str(storage.root))
    there = RunDirectory.create(tmp_path / "there", info)
    for uuid in (UUID, OTHER):
        for each in range(3):
            run = there if each == rank else RunDirectory(tmp_path)
            parts = CheckpointParts(run, storage, rank=each, world_size=3, commit=lambda *_: None)
            store(parts, str(each), uuid)
            parts.close()
    storage.commit(UUID, {"steps_completed": 1}, num_shards=3)
    discard_unfinished(there)
    assert storage.list() == [UUID]
    assert not (tmp_path / "checkpoints" / OTHER).exists()
    assert not there.begun_checkpoints(is_part=True)
    assert set(RunDirectory(tmp_path).begun_checkpoints()) == {UUID, OTHER}
