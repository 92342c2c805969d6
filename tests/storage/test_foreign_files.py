"""Storages in directories to which somebody else can write."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import faults
from paceline._base.files import opened_directory, replacing_atomically, replacing_below
from paceline._base.journal_records import seal
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DirectoryStorage,
    IncomingCheckpoint,
)
from paceline.storage._checkpoint_files import MANIFEST_NAME, done_name, write_durably
from paceline.storage._incoming_checkpoint import forget_incoming

FILES = ("model", "deep/er/state")
OTHER_UID = 65534


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    """Return a storage with the checkpoint `one` of three ranks, of which rank 2 has no files."""
    storage = DirectoryStorage(tmp_path / "shared")
    for rank, name in enumerate((*FILES, None)):
        with storage.store_shard("one", rank) as path:
            if name is not None:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(b"weights")
    storage.commit("one", {"steps_completed": 1}, num_shards=3)
    return storage


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Return a directory of somebody else, with a file."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "token").write_text("the admin token")
    return private


def replace_by_link(path: Path, target: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}-away"))
    else:
        path.unlink()
    path.symlink_to(target)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["model", "deep/er/state", MANIFEST_NAME, done_name(2)])
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_regular_file_is_not_read(
    storage: DirectoryStorage, private: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = storage.root / "one" / name
    # Even what is whole is not read through a link.
    (private / "same").write_bytes(path.read_bytes())
    if kind == "link":
        replace_by_link(path, private / "same")
    elif kind == "fifo":
        replace_by_fifo(path)
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(CheckpointCorruptError, match="regular files and directories of one user"):
        storage.read_file("one", name, 0, 100)
    if name == MANIFEST_NAME:
        with pytest.raises(CheckpointCorruptError, match="must consist of regular files"):
            storage.manifest("one")
    elif name in FILES:
        with pytest.raises(CheckpointCorruptError, match="is none of the checkpoint's files"):
            storage.verify("one")
        with pytest.raises(CheckpointCorruptError, match="must consist of regular files"):
            storage.download("one", tmp_path / "copy")
    else:
        with pytest.raises(CheckpointCorruptError, match="must consist of regular files"):
            storage.missing_shards("one", 3)


@pytest.mark.parametrize("level", ["one", "one/deep", "one/deep/er"])
def test_no_link_is_followed_at_any_level(storage: DirectoryStorage, level: str) -> None:
    path = storage.root / level
    replace_by_link(path, path.with_name(f"{path.name}-away"))
    with pytest.raises(CheckpointCorruptError, match="No link and no special file must be there"):
        storage.read_file("one", "deep/er/state", 0, 100)
    with pytest.raises(CheckpointCorruptError, match="No link and no special file must be there"):
        storage.verify("one")


def test_links_in_the_path_of_the_root_are_followed(
    storage: DirectoryStorage, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "mounted").symlink_to("link/shared")
    other = DirectoryStorage(tmp_path / "mounted")
    assert other.verify("one").uuid == "one"
    assert other.read_file("one", "model", 0, 3) == b"wei"
    with other.store_path("two") as path:
        (path / "a").touch()
    other.commit("two", {})
    other.delete("one")
    assert storage.list() == ["two"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("name", ["model", "deep/er/state", MANIFEST_NAME, done_name(0)])
def test_who_reads_for_others_reads_files_of_the_owner_of_the_checkpoint_alone(
    storage: DirectoryStorage, name: str
) -> None:
    strict = DirectoryStorage(storage.root, has_one_owner=True)
    assert strict.verify("one").uuid == "one"
    os.chown(storage.root / "one" / name, OTHER_UID, OTHER_UID)
    with pytest.raises(CheckpointCorruptError, match=r"belong to one of the users \[0\]"):
        strict.read_file("one", name, 0, 100)
    assert storage.read_file("one", name, 0, 100)
    for path in (storage.root / "one", *(storage.root / "one").rglob("*")):
        os.chown(path, OTHER_UID, OTHER_UID)
    assert strict.verify("one").uuid == "one"
    # What it writes itself belongs to the owner of the checkpoint.
    strict.delete_files("one", lambda name: name == "model")
    assert list(strict.verify("one").files) == ["deep/er/state"]


@pytest.mark.parametrize("level", ["one", "one/deep", "one/deep/er"])
def test_nothing_is_deleted_through_a_link(
    storage: DirectoryStorage, private: Path, level: str
) -> None:
    (private / "one").mkdir()
    for name in ("state", "deep/er/state", "er/state", MANIFEST_NAME):
        (private / name).parent.mkdir(parents=True, exist_ok=True)
        (private / name).write_bytes((storage.root / "one" / MANIFEST_NAME).read_bytes())
    before = sorted(private.rglob("*"))
    replace_by_link(storage.root / level, private)
    if level == "one":
        with pytest.raises(CheckpointCorruptError, match="No link"):
            storage.delete("one")
        with pytest.raises(CheckpointCorruptError, match="No link"):
            storage.delete_checked("one", lambda manifest: None)
    else:
        with pytest.raises(CheckpointCorruptError, match="No link"):
            storage.delete_files("one", lambda name: name == "deep/er/state")
        storage.delete("one")
        assert not (storage.root / "one").exists()
    assert sorted(private.rglob("*")) == before


def test_a_manifest_names_no_file_outside_to_delete(
    storage: DirectoryStorage, private: Path
) -> None:
    path = storage.root / "one" / MANIFEST_NAME
    document = json.loads(path.read_bytes()) | {"deleted": ["../../private/token"]}
    document.pop("checksum", None)
    path.chmod(0o600)
    path.write_bytes(seal(json.dumps(document, indent=1).encode()))
    with pytest.raises(CheckpointCorruptError, match="names the file '../../private/token'"):
        storage.delete_files("one", lambda name: name == "model")
    assert (private / "token").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 3}', None])
def test_a_directory_without_a_readable_manifest_is_not_deleted_by_who_checks(
    storage: DirectoryStorage, content: bytes | None
) -> None:
    website = storage.root / "website"
    website.mkdir()
    (website / "index.html").touch()
    if content is None:
        content = (storage.root / "one" / MANIFEST_NAME).read_bytes()
    (website / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="website must (be whole|have format version)"):
        storage.delete_checked("website", lambda manifest: None)
    assert (website / "index.html").exists()

    def refuse(manifest: Any) -> None:
        raise PermissionError(manifest.uuid)

    with pytest.raises(PermissionError, match="one"):
        storage.delete_checked("one", refuse)
    storage.verify("one")


def test_marks_of_begun_checkpoints_are_no_way_to_files_elsewhere(
    storage: DirectoryStorage, private: Path
) -> None:
    (storage.root / ".open").symlink_to(private)
    assert storage.sweep(older_than_s=0) == []
    with pytest.raises(OSError, match="No link"), storage.store_path("two"):
        pass
    storage.discard("token")
    assert [path.name for path in private.iterdir()] == ["token"]


@pytest.mark.parametrize("mark", ["", "other", "link"])
def test_who_sweeps_for_others_needs_a_mark_that_names_the_leftover(
    storage: DirectoryStorage, private: Path, mark: str
) -> None:
    with storage.store_path("begun") as path:
        (path / "model").touch()
    directory = storage.root / "website"
    directory.mkdir()
    (directory / "index.html").touch()
    if mark == "link":
        (private / "website").write_text("website")
        (storage.root / ".open" / "website").symlink_to(private / "website")
    else:
        (storage.root / ".open" / "website").write_text(mark)
    strict = DirectoryStorage(storage.root, has_one_owner=True)
    assert strict.sweep(older_than_s=0) == ["begun"]
    assert (directory / "index.html").exists()
    assert not (storage.root / "begun").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
def test_who_sweeps_for_others_needs_a_mark_of_the_owner(storage: DirectoryStorage) -> None:
    with storage.store_path("begun") as path:
        (path / "model").touch()
    os.chown(storage.root / ".open" / "begun", OTHER_UID, OTHER_UID)
    strict = DirectoryStorage(storage.root, has_one_owner=True)
    assert strict.sweep(older_than_s=0) == []
    os.chown(storage.root / "begun", OTHER_UID, OTHER_UID)
    assert strict.sweep(older_than_s=0) == ["begun"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("removes", ["sweep", "delete", "discard"])
def test_directories_of_another_user_in_a_checkpoint_are_not_removed(
    storage: DirectoryStorage, removes: str
) -> None:
    with storage.store_path("begun") as path:
        (path / "deep" / "er").mkdir(parents=True)
        (path / "deep" / "er" / "state").touch()
    if removes == "delete":
        storage.commit("begun", {})
    for each in (path, storage.root / ".open" / "begun"):
        if each.exists():
            os.chown(each, OTHER_UID, OTHER_UID)
    strict = DirectoryStorage(storage.root, has_one_owner=True)
    if removes == "sweep":
        assert strict.sweep(older_than_s=0) == []
    elif removes == "discard":
        storage.discard("begun")
    else:
        os.chown(path / MANIFEST_NAME, OTHER_UID, OTHER_UID)
        with pytest.raises(PermissionError, match=f"belong to user {OTHER_UID}, not to 0"):
            strict.delete("begun")
    assert (path / "deep" / "er" / "state").exists()


def test_a_link_in_place_of_a_new_checkpoint_is_not_written_through(
    storage: DirectoryStorage, private: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "token").write_text("mine")
    (storage.root / "two").symlink_to(private)
    with pytest.raises(CheckpointWriteError, match="must be no link"):
        storage.copy_in("two", tmp_path / "source")
    with (
        pytest.raises(CheckpointWriteError, match="must be no link"),
        storage.store_shard("two", 2),
    ):
        pass
    assert (private / "token").read_text() == "the admin token"
    assert [path.name for path in private.iterdir()] == ["token"]


@pytest.fixture(params=["path", "shard", "copy"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that stores a checkpoint, and calls another one before it is whole."""

    def store(storage: DirectoryStorage, meanwhile: Callable[[], None]) -> None:
        if request.param == "copy":
            source = tmp_path / "source"
            source.mkdir()
            for name in ("a", "model"):
                (source / name).write_text("mine")

            def reach(point: str) -> None:
                if point == "storage.between_files":
                    meanwhile()

            monkeypatch.setattr(faults, "reach", reach)
            storage.copy_in("two", source)
            return
        opened = (
            storage.store_path("two") if request.param == "path" else storage.store_shard("two", 0)
        )
        with opened as path:
            (path / "a").write_text("mine")
            meanwhile()

    return store


@pytest.mark.parametrize("kind", ["link", "directory", "nothing"])
def test_what_takes_the_place_of_a_checkpoint_that_is_being_written_stays(
    storage: DirectoryStorage,
    private: Path,
    tmp_path: Path,
    store: Callable[..., None],
    kind: str,
) -> None:
    path, away = storage.root / "two", storage.root / "away"
    (private / ".rank-0").mkdir()
    (private / "model").write_text("theirs")

    def replace() -> None:
        path.rename(away)
        if kind == "link":
            path.symlink_to(private)
        elif kind == "directory":
            private.rename(path)

    with pytest.raises(CheckpointWriteError, match=r"must stay in its place .*chmod \+t"):
        store(storage, replace)
    storage.discard("two")
    if kind == "link":
        path.unlink()
        path = private
    if kind != "nothing":
        assert sorted(os.listdir(path)) == [".rank-0", "model", "token"]
        assert (path / "model").read_text() == "theirs"
    # What was written itself is removed wherever it is now.
    assert not {"a", "model"} & set(os.listdir(away))


def test_very_deep_directories_are_refused_and_use_up_nothing(storage: DirectoryStorage) -> None:
    deep = storage.root / "one"
    for _ in range(300):
        deep = deep / "d"
        deep.mkdir()
    with pytest.raises(OSError, match="must not be so deep"):
        storage.delete("one")


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Return a directory that other users can enter."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


@pytest.fixture
def as_another_user() -> Callable[..., str]:
    """Return a function that runs code as another user, and returns its error."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: another user needs root")

    def run(call: Callable[[], None]) -> str:
        end, other = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(OTHER_UID)
                os.setuid(OTHER_UID)
                call()
            except BaseException as error:
                os.write(other, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(other)
        os.waitpid(child, 0)
        with os.fdopen(end) as told:
            return told.read()

    return run


@pytest.mark.parametrize("place", ["shared", "shared/new/place"])
@pytest.mark.parametrize("is_shard", [False, True])
def test_who_may_not_write_to_a_storage_is_told_whose_it_is(
    open_place: Path, as_another_user: Callable[..., str], place: str, is_shard: bool
) -> None:
    root = open_place / "shared"
    root.mkdir(mode=0o755)

    def store() -> None:
        storage = DirectoryStorage(open_place / place)
        with storage.store_shard("one", 0) if is_shard else storage.store_path("one"):
            pass

    told = as_another_user(store)
    assert told.startswith("CheckpointWriteError: "), told
    assert (
        f"{str(root)!r} belongs to user 0 and has mode 755, but this process is of user"
        f" {OTHER_UID}. Hint: let this user write there"
    ) in told
    root.chmod(0o1777)
    assert as_another_user(store) == ""


# ---- temporary files -------------------------------------------------------------------------


def write_below(path: Path) -> None:
    with opened_directory(path.parent) as directory, replacing_below(directory, path.name) as file:
        file.write(b"new")


def write_atomically(path: Path) -> None:
    with replacing_atomically(path) as part:
        part.write_bytes(b"new")


@pytest.mark.parametrize(
    "write", [write_below, write_atomically, lambda path: write_durably(path, b"new")]
)
def test_temporary_files_have_names_that_nobody_can_guess(
    tmp_path: Path, private: Path, write: Callable[[Path], None]
) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    names = [f".file.{os.getpid()}.{number}" for number in range(2000)]
    for name in (".file.partial", *names):
        (directory / name).symlink_to(private / "token")
    before = set(os.listdir(directory))
    write(directory / "file")
    assert (directory / "file").read_bytes() == b"new"
    assert (private / "token").read_text() == "the admin token"
    assert set(os.listdir(directory)) == before | {"file"}


# ---- checkpoints that arrive -----------------------------------------------------------------


@pytest.fixture
def incoming(storage: DirectoryStorage, tmp_path: Path) -> IncomingCheckpoint:
    """Return the checkpoint `one` on its way to another storage."""
    root = storage.root / "one"
    manifest = (root / MANIFEST_NAME).read_bytes()
    shards = {rank: (root / done_name(rank)).read_bytes() for rank in range(3)}
    target = DirectoryStorage(tmp_path / "target")
    target.root.mkdir()
    return IncomingCheckpoint(target, "master-1", "one", manifest, shards)


@pytest.mark.parametrize("kind", ["link", "writable", "fifo", "file"])
def test_what_arrives_is_not_kept_where_others_can_write(
    incoming: IncomingCheckpoint, private: Path, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "target" / ".incoming"
    (private / "master-1" / "one").mkdir(parents=True)
    (private / "master-1" / "one" / "model").write_text("mine")
    if kind == "link":
        place.symlink_to(private)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "file":
        place.touch()
    else:
        private.rename(place)
        place.chmod(0o777)
        private = place
    with pytest.raises(CheckpointWriteError, match="only this user can write to"):
        incoming.missing()
    with pytest.raises(CheckpointWriteError, match="only this user can write to"):
        incoming.write("model", 4, b"x")
    with pytest.raises(CheckpointWriteError, match="only this user can write to"):
        incoming.seal()
    incoming.forget()
    forget_incoming(tmp_path / "target", lambda sender: False)
    assert (private / "master-1" / "one" / "model").read_text() == "mine"
    assert (private / "token").exists()


def test_what_arrives_is_committed_and_forgotten(
    incoming: IncomingCheckpoint, tmp_path: Path
) -> None:
    assert incoming.missing() == dict.fromkeys(sorted(FILES), 0)
    for name in FILES:
        incoming.write(name, 0, b"weights")
    assert incoming.missing() == incoming.seal() == {}
    incoming.commit()
    target = DirectoryStorage(tmp_path / "target", has_one_owner=True)
    assert target.verify("one").uuid == "one"
    assert os.listdir(target.root) == ["one"]
    with pytest.raises(CheckpointNotFoundError):
        target.manifest("two")
