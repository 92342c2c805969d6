import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import faults
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    CheckpointWriteError,
    DirectoryStorage,
)

FILES = {"model.pt": b"weights", "deep/er/state.json": b"{}", "empty": b""}


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(tmp_path / "checkpoints")


def write_files(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def overwrite(path: Path, content: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(content)


def store(storage: DirectoryStorage, files: dict[str, bytes] = FILES) -> str:
    uuid = str(uuid4())
    with storage.store_path(uuid) as path:
        write_files(path, files)
    storage.commit(uuid, {"steps_completed": 3})
    return uuid


def read_files(path: Path, names: dict[str, bytes]) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in names}


def test_stored_checkpoint_is_restored_as_it_was(storage: DirectoryStorage) -> None:
    uuid = store(storage)
    with storage.restore_path(uuid) as path:
        assert read_files(path, FILES) == FILES


def test_nobody_is_permitted_to_change_what_was_stored(
    storage: DirectoryStorage, tmp_path: Path
) -> None:
    copied, sharded = str(uuid4()), str(uuid4())
    storage.copy_in(copied, write_files(tmp_path / "source", FILES))
    storage.commit(copied, {})
    with storage.store_shard(sharded, 0) as path:
        write_files(path, FILES)
    storage.commit(sharded, {})
    for uuid in (store(storage), copied, sharded):
        with storage.restore_path(uuid) as path:
            assert not any((path / name).stat().st_mode & 0o222 for name in FILES)
        storage.download(uuid, tmp_path / "copy")
        write_files(tmp_path / "copy", FILES)
    assert (tmp_path / "source/empty").stat().st_mode & 0o200


@pytest.mark.parametrize("content", [b"", b"WEIGHTS", b"longer than before"])
def test_a_restored_file_that_is_written_to_all_the_same_is_told_at_once(
    storage: DirectoryStorage, content: bytes
) -> None:
    uuid = store(storage)
    # File systems tell times apart only so well.
    os.utime(storage.root / uuid / "model.pt", (1, 1))
    match = rf"but .* model\.pt .* checkpoint {uuid} can no longer .* `download` gives a copy"
    restored = storage.restore_path(uuid)
    path = restored.__enter__()
    overwrite(path / "model.pt", content)
    (path / "another").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=match):
        restored.__exit__(None, None, None)


def test_a_restored_file_that_is_removed_is_told_at_once(storage: DirectoryStorage) -> None:
    restored = storage.restore_path(store(storage))
    path = restored.__enter__()
    (path / "deep" / "er" / "state.json").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"deep/er/state\.json is missing"):
        restored.__exit__(None, None, None)


def test_a_restored_file_may_be_written_anew_as_it_was(storage: DirectoryStorage) -> None:
    uuid = store(storage)
    os.utime(storage.root / uuid / "model.pt", (1, 1))
    with storage.restore_path(uuid) as path:
        overwrite(path / "model.pt", FILES["model.pt"])
    storage.verify(uuid)


def test_a_checkpoint_may_be_deleted_while_it_is_read(storage: DirectoryStorage) -> None:
    uuid = store(storage)
    with storage.restore_path(uuid):
        storage.delete(uuid)
    assert storage.list() == []


def test_manifest_names_every_file_with_size_and_digest(storage: DirectoryStorage) -> None:
    before = time.time()
    manifest = storage.manifest(store(storage))
    assert manifest.resources == {"deep/er/state.json": 2, "empty": 0, "model.pt": 7}
    assert manifest.metadata == {"steps_completed": 3}
    assert before <= manifest.created <= time.time()
    # The digest of nothing is a published constant of xxh3_128.
    assert manifest.files["empty"].digest == "99aa06d3014798d86001c324468d497f"


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=50)))
def test_copied_directory_comes_back_by_download(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("storage")
    write_files(root / "source", {f"{name}/{name}": files[name] for name in files})
    (root / "source").mkdir(exist_ok=True)
    storage = DirectoryStorage(root / "checkpoints")
    uuid = str(uuid4())
    storage.copy_in(uuid, root / "source")
    storage.commit(uuid, {})
    storage.download(uuid, root / "target")
    found = {
        path.relative_to(root / "target").as_posix(): path.read_bytes()
        for path in (root / "target").rglob("*")
        if path.is_file()
    }
    assert found == {f"{name}/{name}": files[name] for name in files}


def test_checkpoint_without_manifest_does_not_exist(storage: DirectoryStorage) -> None:
    uuid = str(uuid4())
    with storage.store_path(uuid) as path:
        write_files(path, FILES)
    assert storage.list() == []
    assert not storage.exists(uuid)
    with pytest.raises(CheckpointNotFoundError, match=uuid):
        storage.manifest(uuid)
    with pytest.raises(CheckpointNotFoundError, match=uuid):
        storage.delete(uuid)


def test_failing_body_leaves_nothing_behind(storage: DirectoryStorage) -> None:
    def store_and_fail() -> None:
        with storage.store_path(str(uuid4())) as path:
            write_files(path, FILES)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store_and_fail()
    assert list(storage.root.iterdir()) == []


def test_failing_body_that_meets_an_existing_file_leaves_nothing_behind(
    storage: DirectoryStorage,
) -> None:
    with pytest.raises(FileExistsError), storage.store_path(str(uuid4())) as path:
        os.mkdir(write_files(path, {"a/b": b""}) / "a")
    assert list(storage.root.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: (path / "model.pt").unlink(), "'model.pt' is missing"),
        (lambda path: overwrite(path / "model.pt", b"weightz"), "'model.pt' was altered.*same"),
        (lambda path: overwrite(path / "model.pt", b"w"), r"altered \(1 bytes instead of 7"),
        (
            lambda path: [(path / name).unlink() for name in FILES],
            "'deep/er/state.json' is missing, 'empty' is missing, 'model.pt' is missing",
        ),
    ],
)
def test_damaged_checkpoint_is_refused_with_each_file_named(
    storage: DirectoryStorage, tmp_path: Path, damage: Callable[[Path], object], match: str
) -> None:
    uuid = store(storage)
    damage(storage.root / uuid)
    with pytest.raises(CheckpointCorruptError, match=match):
        storage.verify(uuid)
    with pytest.raises(CheckpointCorruptError, match=match), storage.restore_path(uuid):
        pass
    with pytest.raises(CheckpointCorruptError, match=uuid):
        storage.download(uuid, tmp_path / "target")


def edit_manifest(storage: DirectoryStorage, uuid: str, /, **changes: object) -> None:
    path = storage.root / uuid / "manifest.json"
    # Without the checksum, which does not fit any more.
    told = {k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}
    path.write_text(json.dumps({**told, **changes}))


def test_checkpoint_of_another_version_is_refused(storage: DirectoryStorage) -> None:
    uuid = store(storage)
    edit_manifest(storage, uuid, version=2)
    with pytest.raises(CheckpointVersionError, match=r"format version 1, but manifest.json has 2"):
        storage.verify(uuid)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"uuid": "other"}, "it names checkpoint 'other'"),
        ({"files": {"../secret": {"size": 1, "digest": ""}}}, "'../secret' outside"),
        ({"files": {"/etc/passwd": {"size": 1, "digest": ""}}}, "'/etc/passwd' outside"),
        ({"files": 3}, "manifest.json is damaged"),
    ],
)
def test_manifest_that_makes_no_sense_is_refused(
    storage: DirectoryStorage, changes: dict[str, object], match: str
) -> None:
    uuid = store(storage)
    edit_manifest(storage, uuid, **changes)
    with pytest.raises(CheckpointCorruptError, match=match):
        storage.verify(uuid)


def test_cut_off_manifest_is_refused(storage: DirectoryStorage) -> None:
    uuid = store(storage)
    (storage.root / uuid / "manifest.json").write_bytes(b'{"version": 1,')
    with pytest.raises(CheckpointCorruptError, match="manifest.json is damaged"):
        storage.manifest(uuid)


@pytest.mark.parametrize("uuid", ["", "../x", "a/b", ".hidden", "a" * 200])
def test_unsafe_uuid_is_refused(storage: DirectoryStorage, uuid: str) -> None:
    with pytest.raises(ValueError, match="UUID must consist of"):
        storage.manifest(uuid)


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.done", "rank-12.done"])
def test_file_with_a_name_of_the_protocol_is_refused(storage: DirectoryStorage, name: str) -> None:
    with pytest.raises(ValueError, match=name), storage.store_path(str(uuid4())) as path:
        (path / name).write_text("{}")
    assert list(storage.root.iterdir()) == []


def test_similar_name_deeper_inside_is_accepted(storage: DirectoryStorage) -> None:
    files = {"sub/manifest.json": b"1", "rank-x.done": b"2"}
    uuid = store(storage, files)
    assert storage.manifest(uuid).files.keys() == files.keys()


def test_link_in_a_checkpoint_is_refused(storage: DirectoryStorage, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    with pytest.raises(ValueError, match="'link' is a link"), storage.store_path("u1") as path:
        (path / "link").symlink_to(tmp_path / "outside")


def test_linked_file_is_copied_and_linked_directory_refused(
    storage: DirectoryStorage, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("content")
    source = tmp_path / "source"
    source.mkdir()
    (source / "link").symlink_to(tmp_path / "outside")
    storage.copy_in("u1", source)
    storage.commit("u1", {})
    assert not (storage.root / "u1" / "link").is_symlink()
    assert (storage.root / "u1" / "link").read_text() == "content"
    (source / "folder").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="'folder' is a link"):
        storage.copy_in("u2", source)


def test_upload_of_no_directory_is_refused(storage: DirectoryStorage, tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="missing"):
        storage.copy_in("u1", tmp_path / "missing")


def test_checkpoint_is_immutable(storage: DirectoryStorage, tmp_path: Path) -> None:
    uuid = store(storage)
    (tmp_path / "source").mkdir()
    with pytest.raises(FileExistsError), storage.store_path(uuid):
        pass
    with pytest.raises(FileExistsError, match="immutable"):
        storage.copy_in(uuid, tmp_path / "source")
    assert storage.verify(uuid)


def test_shards_of_several_ranks_become_one_checkpoint(
    storage: DirectoryStorage, tmp_path: Path
) -> None:
    for rank in range(3):
        write_files(tmp_path / f"s{rank}", {f"part{rank}": b"x" * rank, "common": b"same"})
    for rank in range(2):
        storage.copy_in("u1", tmp_path / f"s{rank}", rank=rank)
    with pytest.raises(CheckpointCorruptError, match="that of rank 2 is missing"):
        storage.commit("u1", {}, num_shards=3)
    assert storage.list() == []
    storage.copy_in("u1", tmp_path / "s2", rank=2)
    manifest = storage.commit("u1", {}, num_shards=3)
    assert manifest.resources == {"common": 4, "part0": 0, "part1": 1, "part2": 2}
    assert storage.verify("u1") == manifest


def test_shards_that_disagree_are_refused(storage: DirectoryStorage, tmp_path: Path) -> None:
    for rank in range(2):
        write_files(tmp_path / f"s{rank}", {"common": b"%d" % rank})
        storage.copy_in("u1", tmp_path / f"s{rank}", rank=rank)
    with pytest.raises(CheckpointCorruptError, match="rank 1 holds another 'common'"):
        storage.commit("u1", {}, num_shards=2)


def test_deleted_checkpoint_is_gone(storage: DirectoryStorage) -> None:
    uuid, other = store(storage), store(storage)
    storage.delete(uuid)
    assert storage.list() == [other]
    assert not (storage.root / uuid).exists()


def make_old(path: Path) -> None:
    for item in [path, *path.rglob("*")]:
        os.utime(item, (1, 1))


def test_sweep_removes_only_old_leftovers_of_ours(storage: DirectoryStorage) -> None:
    committed, old, new = store(storage), str(uuid4()), str(uuid4())
    for uuid in (old, new):
        with storage.store_path(uuid) as path:
            write_files(path, FILES)
    # Other programs keep checkpoints in directories of UUIDs without our manifest.
    foreign = str(uuid4())
    (storage.root / foreign).mkdir()
    (storage.root / foreign / "metadata.json").write_text("{}")
    for name in (committed, old, foreign):
        make_old(storage.root / name)
    assert storage.sweep(older_than_s=3600) == [old]
    assert {path.name for path in storage.root.glob("[!.]*")} == {committed, new, foreign}
    assert storage.sweep(older_than_s=0) == [new]
    assert {path.name for path in storage.root.iterdir()} == {committed, foreign}


def test_sweep_and_list_of_a_missing_root_find_nothing(storage: DirectoryStorage) -> None:
    assert storage.sweep(older_than_s=0) == []
    assert storage.list() == []


@pytest.mark.root
def test_full_disk_leaves_the_previous_checkpoint_intact(
    small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    storage = DirectoryStorage(small_disk)
    uuid = store(storage)
    used = os.statvfs(small_disk).f_bfree
    with pytest.raises(CheckpointWriteError, match="earlier checkpoints are untouched") as caught:
        store(storage, {"small": b"1", "large": b"x" * 2_000_000})
    assert caught.value.errno == errno.ENOSPC
    assert storage.list() == [uuid]
    storage.verify(uuid)
    assert os.statvfs(small_disk).f_bfree == used


@pytest.mark.root
def test_full_disk_while_copying_is_the_same_error(small_disk: Path, tmp_path: Path) -> None:
    storage = DirectoryStorage(small_disk)
    write_files(tmp_path / "source", {"large": b"x" * 2_000_000})
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        storage.copy_in("u1", tmp_path / "source")
    assert list(small_disk.iterdir()) == []


@pytest.mark.root
def test_full_disk_at_the_manifest_removes_the_checkpoint(
    small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    storage = DirectoryStorage(small_disk)
    with storage.store_path("u1") as path:
        write_files(path, FILES)
    fill_disk(small_disk)
    with pytest.raises(CheckpointWriteError, match="u1"):
        storage.commit("u1", {"large": "x" * 100_000})
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.root
def test_full_disk_that_torch_reports_in_its_own_way_is_recognised(small_disk: Path) -> None:
    import torch

    storage = DirectoryStorage(small_disk)
    with (
        pytest.raises(CheckpointWriteError, match="No space left"),
        storage.store_path("u") as path,
    ):
        torch.save(torch.zeros(1_000_000), path / "model.pt")
    assert list(small_disk.iterdir()) == []


def test_other_errors_of_the_body_keep_their_type(storage: DirectoryStorage) -> None:
    with pytest.raises(FileNotFoundError), storage.store_path("u1"):
        Path("/nonexistent/file").read_bytes()
    with pytest.raises(RuntimeError, match="mine"), storage.store_path("u2"):
        raise RuntimeError("mine")


STORE_CODE = """
import sys
from pathlib import Path
from paceline.storage import DirectoryStorage
storage = DirectoryStorage("checkpoints")
with storage.store_path("11111111-1111-4111-8111-111111111111") as path:
    for name in "abc":
        (path / name).write_bytes(b"x" * 1000)
storage.commit("11111111-1111-4111-8111-111111111111", {})
storage.delete("11111111-1111-4111-8111-111111111111")
"""


@pytest.mark.parametrize(
    "fault",
    [
        "storage.begun",
        "storage.between_files",
        "storage.between_files:2",
        "storage.before_rename",
        "storage.before_rename:2",
        "storage.before_done",
        "storage.after_done",
        "storage.before_manifest",
        "storage.after_manifest",
        "storage.after_manifest_deleted",
    ],
)
def test_kill_at_a_fault_point_leaves_the_old_or_the_new_state(
    storage: DirectoryStorage, run_python: Callable[..., object], fault: str
) -> None:
    previous = store(storage)
    result = run_python(STORE_CODE, PACELINE_FAULT=fault)
    assert getattr(result, "returncode", None) == -signal.SIGKILL
    broken = "11111111-1111-4111-8111-111111111111"
    is_committed = fault == "storage.after_manifest"
    assert storage.list() == sorted([previous, broken] if is_committed else [previous])
    for uuid in storage.list():
        storage.verify(uuid)
    assert (storage.root / broken).is_dir()
    assert storage.sweep(older_than_s=0) == ([] if is_committed else [broken])


def test_a_kill_while_files_are_deleted_leaves_a_whole_checkpoint(
    storage: DirectoryStorage, run_python: Callable[..., object]
) -> None:
    uuid = store(storage, {"model": b"m", "optimizer": b"o"})
    code = f"""
from paceline.storage import DirectoryStorage
storage = DirectoryStorage({str(storage.root)!r})
storage.delete_files({uuid!r}, lambda name: name == "optimizer")
"""
    result = run_python(code, PACELINE_FAULT="storage.after_manifest_replaced")
    assert getattr(result, "returncode", None) == -signal.SIGKILL
    assert list(storage.verify(uuid).files) == ["model"]
    # The file that nobody names goes with the checkpoint.
    assert (storage.root / uuid / "optimizer").exists()
    storage.delete(uuid)
    assert not (storage.root / uuid).exists()


def test_a_directory_that_another_rank_has_just_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank looks at "n" before another one has made it, and stores it after that."""
    storage = DirectoryStorage(tmp_path)

    def reach(point: str) -> None:
        if point == "storage.before_move":
            (tmp_path / "one" / "n").mkdir()

    monkeypatch.setattr(faults, "reach", reach)

    def store() -> None:
        with storage.store_shard("one", 1) as path:
            (path / "n").write_text("1")

    with pytest.raises(FileExistsError, match="'n' is a directory of another rank"):
        store()
