"""What every storage does, whatever it is made of: a directory, or a store of objects."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest

from paceline.storage import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStorage,
    CheckpointVersionError,
    CheckpointWriteError,
    DirectoryStorage,
    ObjectStorage,
    storage_from,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "sqlite_storage.py"
# More than what is read at once.
FILES = {"model": b"weights" * 1_500_000, "deep/er/state.json": b"{}", "empty": b""}


def sqlite_storage(path: Path) -> ObjectStorage:
    spec = importlib.util.spec_from_file_location("sqlite_storage", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module.SqliteStorage.from_url(f"sqlite://{path}/checkpoints.db")  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[Path], CheckpointStorage]] = {
    "directory": DirectoryStorage,
    "objects": sqlite_storage,
    "s3": lambda path: storage_from(f"s3://checkpoints{quote(str(path))}"),
    "google": lambda path: storage_from(f"gs://checkpoints{quote(str(path))}"),
    "azure": lambda path: storage_from(f"az://checkpoints{quote(str(path))}"),
}
# Those that need a server, by the fixture that starts it.
SERVERS = ("s3", "google", "azure")


@pytest.fixture(
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind == "azure")) for kind in KINDS]
)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStorage:
    if request.param in SERVERS:
        request.getfixturevalue(request.param)
    return KINDS[request.param](tmp_path / "storage")


def write_files(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def read_files(path: Path) -> dict[str, bytes]:
    found = (each for each in path.rglob("*") if each.is_file())
    names = {each.relative_to(path).as_posix(): each.read_bytes() for each in found}
    return {name: data for name, data in names.items() if name in FILES}


def store(storage: CheckpointStorage, files: dict[str, bytes] = FILES) -> str:
    uuid = str(uuid4())
    with storage.store_path(uuid) as path:
        write_files(path, files)
    storage.commit(uuid, {"steps_completed": 3})
    return uuid


def damage(storage: CheckpointStorage, uuid: str, name: str, content: bytes, tmp: Path) -> None:
    if isinstance(storage, ObjectStorage):
        (tmp / "damage").write_bytes(content)
        storage.put(f"{uuid}/{name}", tmp / "damage")
        return
    assert storage.local_root is not None
    (storage.local_root / uuid / name).unlink()
    (storage.local_root / uuid / name).write_bytes(content)


def test_what_is_stored_comes_back(storage: CheckpointStorage, tmp_path: Path) -> None:
    uuid = store(storage)
    with storage.restore_path(uuid) as path:
        assert read_files(path) == FILES
    manifest = storage.download(uuid, tmp_path / "copy")
    assert read_files(tmp_path / "copy") == FILES
    assert manifest == storage.manifest(uuid) == storage.verify(uuid)
    assert manifest.resources == {name: len(data) for name, data in sorted(FILES.items())}
    assert manifest.metadata == {"steps_completed": 3}
    assert storage.list() == [uuid]


def test_a_copied_directory_comes_back(storage: CheckpointStorage, tmp_path: Path) -> None:
    source, uuid = write_files(tmp_path / "source", FILES), str(uuid4())
    storage.copy_in(uuid, source)
    storage.commit(uuid, {})
    storage.download(uuid, tmp_path / "copy")
    assert read_files(tmp_path / "copy") == read_files(source) == FILES
    with pytest.raises(NotADirectoryError, match="must be stored from a directory"):
        storage.copy_in(str(uuid4()), tmp_path / "missing")


def test_selected_files_alone_come_back(storage: CheckpointStorage, tmp_path: Path) -> None:
    uuid = store(storage)
    damage(storage, uuid, "model", b"damaged", tmp_path)

    def selects(name: str) -> bool:
        return name.startswith("deep/")

    # What is not wanted may be damaged.
    manifest = storage.download(uuid, tmp_path / "copy", selects=selects)
    assert read_files(tmp_path / "copy") == {"deep/er/state.json": b"{}"}
    assert list(manifest.files) == ["deep/er/state.json"]
    with storage.restore_path(uuid, selects=selects) as path:
        assert (path / "deep/er/state.json").read_bytes() == b"{}"
    with storage.restore_path(uuid, selects=lambda name: False) as path:
        assert path.is_dir()
    with (
        pytest.raises(CheckpointCorruptError, match="'model' was altered"),
        storage.restore_path(uuid, selects=lambda name: name == "model"),
    ):
        pass


def test_single_files_are_deleted_for_good(storage: CheckpointStorage, tmp_path: Path) -> None:
    uuid = store(storage)
    assert storage.delete_files(uuid, lambda name: False) == storage.manifest(uuid)
    smaller = storage.delete_files(uuid, lambda name: name == "model")
    assert smaller == storage.verify(uuid)
    assert (list(smaller.files), smaller.deleted) == (["deep/er/state.json", "empty"], ["model"])
    assert smaller.metadata == {"steps_completed": 3}
    with pytest.raises(FileNotFoundError):
        storage.read_file(uuid, "model", 0, 1)
    storage.download(uuid, tmp_path / "copy")
    assert read_files(tmp_path / "copy") == {n: c for n, c in FILES.items() if n != "model"}
    assert storage.delete_files(uuid, lambda name: name == "empty").deleted == ["empty", "model"]
    with pytest.raises(ValueError, match="must keep a file, but all 1 of"):
        storage.delete_files(uuid, lambda name: True)
    assert storage.list() == [uuid]
    storage.delete(uuid)
    with pytest.raises(CheckpointNotFoundError):
        storage.delete_files(uuid, lambda name: True)


def test_pieces_of_a_file_are_read(storage: CheckpointStorage) -> None:
    uuid = store(storage)
    model = FILES["model"]
    assert storage.read_file(uuid, "model", 9_000_001, 10) == model[9_000_001:9_000_011]
    assert storage.read_file(uuid, "model", len(model) - 3, 10) == model[-3:]
    assert storage.read_file(uuid, "model", len(model), 10) == b""
    assert storage.read_file(uuid, "empty", 0, 10) == b""
    with pytest.raises(FileNotFoundError):
        storage.read_file(uuid, "missing", 0, 10)


def test_without_a_commit_there_is_nothing(storage: CheckpointStorage) -> None:
    uuid = str(uuid4())
    with storage.store_path(uuid) as path:
        write_files(path, FILES)
    assert storage.list() == []
    assert not storage.exists(uuid)
    for use in (storage.manifest, storage.verify, storage.delete):
        with pytest.raises(CheckpointNotFoundError, match=uuid):
            use(uuid)
    storage.discard(uuid)
    with pytest.raises(CheckpointCorruptError, match="shards to be committed, but that of rank 0"):
        storage.commit(uuid, {})


def test_a_body_that_fails_leaves_nothing(storage: CheckpointStorage) -> None:
    uuid = str(uuid4())

    def fail() -> None:
        with storage.store_path(uuid) as path:
            write_files(path, FILES)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert storage.missing_shards(uuid, 1) == [0]
    # The name is free again.
    with storage.store_path(uuid) as path:
        assert [*path.iterdir()] == []


@pytest.mark.parametrize("name", ["manifest.json", "rank-3.done"])
def test_names_of_the_protocol_are_refused(storage: CheckpointStorage, name: str) -> None:
    with (
        pytest.raises(ValueError, match=f"protocol, but got {name!r}"),
        storage.store_path("one") as path,
    ):
        (path / name).touch()
    assert storage.list() == []


def test_a_link_is_refused_and_one_that_is_copied_is_followed(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    (tmp_path / "real").write_text("content")
    with pytest.raises(ValueError, match="'link' is a link"), storage.store_path("one") as path:
        (path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link").symlink_to(tmp_path / "real")
    storage.copy_in("two", tmp_path / "source")
    assert storage.commit("two", {}).resources == {"link": 7}


def test_ranks_store_their_shards_and_disagree_by_name(storage: CheckpointStorage) -> None:
    for rank in (1, 0):
        with storage.store_shard("one", rank) as path:
            write_files(path, {f"of/{rank}": b"x" * rank, "common": b"same"})
    assert storage.missing_shards("one", 3) == [2]
    again = storage.store_shard("one", 1)
    with pytest.raises(FileExistsError, match="has a shard of rank 1 already"):
        again.__enter__()
    assert storage.commit("one", {}, num_shards=2).resources == {"common": 4, "of/0": 0, "of/1": 1}

    def disagree() -> None:
        for rank in (0, 1):
            with storage.store_shard("two", rank) as path:
                write_files(path, {"same": b"%d" % rank})
        storage.commit("two", {}, num_shards=2)

    with pytest.raises((FileExistsError, CheckpointCorruptError), match="'same'"):
        disagree()
    assert storage.list() == ["one"]


def test_a_committed_checkpoint_is_immutable(storage: CheckpointStorage) -> None:
    uuid = store(storage)
    with pytest.raises(FileExistsError), storage.store_path(uuid) as path:
        write_files(path, {"model": b"other"})
    storage.discard(uuid)
    storage.verify(uuid)


@pytest.mark.parametrize("content", [b"weightz" * 1_500_000, b"w"])
def test_damage_is_named(storage: CheckpointStorage, tmp_path: Path, content: bytes) -> None:
    uuid = store(storage)
    damage(storage, uuid, "model", content, tmp_path)
    match = "'model' was altered"
    assert storage.problems(storage.manifest(uuid)).keys() == {"model"}
    with pytest.raises(CheckpointCorruptError, match=match):
        storage.verify(uuid)
    with pytest.raises(CheckpointCorruptError, match=match), storage.restore_path(uuid):
        pass
    with pytest.raises(CheckpointCorruptError, match=match):
        storage.download(uuid, tmp_path / "copy")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_lost_shard_is_named(storage: CheckpointStorage, tmp_path: Path, rank: int) -> None:
    for each in range(3):
        with storage.store_shard("one", each) as path:
            write_files(path, {f"shard_{each}": b"pieces"})
    storage.commit("one", {}, num_shards=3)
    if isinstance(storage, ObjectStorage):
        storage.remove([f"one/shard_{rank}"])
    else:
        assert storage.local_root is not None
        (storage.local_root / "one" / f"shard_{rank}").unlink()
    match = f"'shard_{rank}' is missing"
    with pytest.raises(CheckpointCorruptError, match=match):
        storage.verify("one")
    with pytest.raises(CheckpointCorruptError, match=match), storage.restore_path("one"):
        pass
    with pytest.raises(CheckpointCorruptError, match=match):
        storage.download("one", tmp_path / "copy")


def test_a_checkpoint_of_a_newer_format_is_refused_and_stays(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    uuid = store(storage)
    with storage.restore_path(uuid) as path:
        written = read_files(path)
    manifest = storage.manifest(uuid)
    files = {name: {"size": len(data), "digest": "later"} for name, data in written.items()}
    later = {"version": manifest.version + 1, "uuid": uuid, "files": files}
    damage(storage, uuid, "manifest.json", json.dumps(later).encode(), tmp_path)
    match = "must have format version 1, but manifest.json has 2"
    with pytest.raises(CheckpointVersionError, match=match):
        storage.verify(uuid)
    with pytest.raises(CheckpointVersionError, match=match), storage.restore_path(uuid):
        pass
    assert storage.sweep(older_than_s=0) == []
    assert storage.list() == [uuid]


def test_a_damaged_manifest_is_no_checkpoint(storage: CheckpointStorage, tmp_path: Path) -> None:
    uuid = store(storage)
    damage(storage, uuid, "manifest.json", b'{"version": 1', tmp_path)
    with pytest.raises(CheckpointCorruptError, match="manifest.json is damaged"):
        storage.manifest(uuid)
    storage.delete(uuid)
    assert storage.list() == []


def test_what_was_deleted_is_gone(storage: CheckpointStorage) -> None:
    first, second = store(storage), store(storage)
    storage.delete(first)
    assert storage.list() == [second]
    with pytest.raises(CheckpointNotFoundError, match=first):
        storage.delete(first)
    storage.verify(second)


def test_old_leftovers_are_swept_and_young_ones_stay(storage: CheckpointStorage) -> None:
    whole = store(storage)
    with storage.store_path("left") as path:
        write_files(path, {"a": b"1"})
    assert storage.sweep(older_than_s=60) == []
    assert storage.sweep(older_than_s=0, among=["other"]) == []
    assert storage.missing_shards("left", 1) == []
    time.sleep(0.05)
    assert storage.sweep(older_than_s=0) == ["left"]
    assert storage.missing_shards("left", 1) == [0]
    assert storage.list() == [whole]
    storage.verify(whole)


def test_a_sweep_goes_by_the_clock_of_the_storage(
    storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    with storage.store_path("young") as path:
        write_files(path, {"a": b"1"})
        monkeypatch.setattr(time, "time", lambda: now() + 7200)
        assert storage.sweep(older_than_s=3600) == []
    assert storage.sweep(older_than_s=3600) == []
    storage.commit("young", {"steps_completed": 1})
    storage.verify("young")


def test_what_others_keep_in_the_same_place_stays(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    if isinstance(storage, ObjectStorage):
        (tmp_path / "data").write_text("theirs")
        storage.put("others/data", tmp_path / "data")
    else:
        assert storage.local_root is not None
        write_files(storage.local_root, {"others/data": b"theirs"})
    uuid = store(storage)
    assert storage.sweep(older_than_s=0) == []
    storage.delete(uuid)
    assert storage.sweep(older_than_s=0) == []
    assert storage.list() == []
    assert storage.read_file("others", "data", 0, 100) == b"theirs"


@pytest.mark.parametrize("uuid", ["", "..", "a/b", "/a"])
def test_unsafe_uuids_are_refused(storage: CheckpointStorage, uuid: str) -> None:
    for use in (storage.manifest, storage.discard, storage.delete):
        with pytest.raises(ValueError, match="UUID"):
            use(uuid)
    with pytest.raises(ValueError, match="UUID"), storage.store_path(uuid):
        pass


@pytest.mark.root
def test_a_full_disk_is_a_clear_error(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of objects needs room for a while."""
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    storage = sqlite_storage(tmp_path)
    with (
        pytest.raises(CheckpointWriteError, match="No space left"),
        storage.store_path("one") as path,
    ):
        (path / "large").write_bytes(os.urandom(3_000_000))
    assert storage.list() == []


def test_no_two_processes_lose_what_they_put(tmp_path: Path, run_python: Any) -> None:
    code = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("sqlite_storage", {str(EXAMPLE)!r})
module = sys.modules["sqlite_storage"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for rank in range(1, 4):
    if os.fork() == 0:
        break
else:
    rank = 0
storage = module.SqliteStorage.from_url("sqlite://{tmp_path}/checkpoints.db")
with storage.store_shard("one", rank) as path:
    (path / str(rank)).write_text("x" * rank)
if rank == 0:
    for _ in range(3):
        assert os.wait()[1] == 0
    storage.commit("one", {{}}, num_shards=4)
"""
    assert run_python(code).returncode == 0
    assert sqlite_storage(tmp_path).verify("one").resources == {str(n): n for n in range(4)}
