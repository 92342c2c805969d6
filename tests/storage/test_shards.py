"""Checkpoints to which several ranks bring files at once."""

from pathlib import Path

import pytest

from paceline.storage import DirectoryStorage


def store(storage: DirectoryStorage, rank: int, **files: str) -> None:
    with storage.store_shard("one", rank) as path:
        for name, text in files.items():
            target = path / name.replace("__", "/")
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)


def fail_to_store(storage: DirectoryStorage, rank: int) -> None:
    with storage.store_shard("one", rank) as path:
        (path / "b").write_text("half")
        raise KeyError("half")


def test_shards_lie_side_by_side_once_all_are_stored(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    with storage.store_shard("one", 1) as path:
        (path / "b").write_text("of rank 1")
        store(storage, 0, a="of rank 0", extra__c="deeper")
        assert storage.missing_shards("one", 2) == [1]
    assert storage.missing_shards("one", 2) == []
    assert not storage.exists("one")
    manifest = storage.commit("one", {"steps_completed": 1}, num_shards=2)
    assert list(manifest.files) == ["a", "b", "extra/c"]
    with storage.restore_path("one") as path:
        assert (path / "b").read_text() == "of rank 1"
        assert (path / "extra" / "c").read_text() == "deeper"


def test_failing_shard_leaves_the_others(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    store(storage, 0, a="of rank 0")
    with pytest.raises(KeyError, match="half"):
        fail_to_store(storage, 1)
    assert storage.missing_shards("one", 2) == [1]
    assert not (tmp_path / "one" / "b").exists()
    store(storage, 1, b="of rank 1")
    assert list(storage.commit("one", {}, num_shards=2).files) == ["a", "b"]


def test_ranks_must_not_store_the_same_file_or_twice(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    store(storage, 0, a="of rank 0")
    with pytest.raises(FileExistsError, match="or the same content, but another 'a'"):
        store(storage, 1, a="of rank 1")
    with pytest.raises(FileExistsError, match="has a shard of rank 0 already"):
        store(storage, 0, b="again")


def test_begun_shard_is_swept(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    store(storage, 1, b="of rank 1")
    assert storage.sweep(older_than_s=0) == ["one"]
    assert not (tmp_path / "one").exists()
