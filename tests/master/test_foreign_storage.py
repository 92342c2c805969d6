"""Storages to which jobs of other users can write, and what a master does there."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline._cluster.master.api import checkpoint_routes as _checkpoint_routes
from paceline._cluster.master.experiments.storage_calls import StorageCalls, StorageMarks
from paceline._cluster.master.upkeep.check_files import CheckPace, Finding, check_checkpoints
from paceline.storage import DirectoryStorage, _checkpoint_files
from paceline.storage._checkpoint_files import origin_of
from paceline.storage._checkpoint_storage import new_uuid

OTHER_UID = 65534
SECRET = b"the admin token"


class Shared:
    """An experiment whose storage a job can write to, and what the job's runner sends."""

    def __init__(self, master: Any, root: Path) -> None:
        self.master = master
        self.storage = DirectoryStorage(root / "shared")
        rules = {"save_trial_best": 0, "save_trial_latest": 0}
        master.create(
            checkpoint_storage={"type": "directory", "path": self.storage.url} | rules,
            searcher={"name": "single", "metric": "loss"},
        )
        master.schedule()
        master.report(1, 0)
        self.num_records: dict[int, int] = {}
        self.token = root / "private" / "token"
        self.token.parent.mkdir(mode=0o700)
        self.token.touch(mode=0o600)
        self.token.write_bytes(SECRET)

    def store(self, uuid: str, origin: str | None = None) -> Path:
        """Store the files `a` and `b/c`, by default as the attempt, and return their directory."""
        with self.storage.store_path(uuid) as path:
            (path / "a").write_bytes(b"first")
            (path / "b").mkdir()
            (path / "b" / "c").write_bytes(b"second")
        origin = self.master.origin(1) if origin is None else origin
        self.storage.commit(uuid, {"steps_completed": 3}, origin=origin)
        return self.storage.root / uuid

    def record(
        self, uuid: str, storage: str = "", *, attempt: int = 1, status: int = 200, **changed: Any
    ) -> None:
        """Send the record of a checkpoint, and expect an answer."""
        record = {
            "type": "checkpoint", "time": 1.0, "uuid": uuid, "steps_completed": 3, "metadata": {},
            "resources": {"a": 5, "b/c": 6}, "storage": storage or self.storage.url,
        }  # fmt: skip
        number = self.num_records.get(attempt, 0)
        self.num_records[attempt] = number + 1
        batch = {"generation": 0, "rank": 0, "records": [[number, record | changed]]}
        reply = self.master.attempt(attempt, "records", batches=[batch])
        assert reply.status_code == status, reply.text

    def ask(self, path: str, **params: Any) -> httpx2.Response:
        """Ask as the attempt does."""
        headers = {"Authorization": f"Bearer {self.master.core.attempt_tokens.token_of(1)}"}
        reply: httpx2.Response = self.master.http.get(
            f"/attempts/1/checkpoints/{path}", params=params, headers=headers
        )
        return reply

    def piece(self, uuid: str, name: str) -> httpx2.Response:
        return self.ask(f"{uuid}/pieces", name=name, offset=0)

    def end(self) -> None:
        """End the experiment, and delete what it need not keep."""
        self.master.http.post("/experiments/1/kill")
        end = {"reason": "killed", "code": None, "signal": 9, "time": 1.0}
        self.master.attempt(1, "end", **end)
        assert self.master.http.get("/experiments/1").json()["state"] == "CANCELED"
        self.master.core.retention.make_pass()

    def state(self, uuid: str) -> str:
        return str(self.master.http.get(f"/checkpoints/{uuid}").json()["state"])


@pytest.fixture
def shared(master: Any, tmp_path: Path) -> Shared:
    return Shared(master, tmp_path)


def assert_refused(reply: httpx2.Response, code: str = "checkpoint_unusable") -> None:
    assert SECRET not in reply.content
    assert (reply.status_code, reply.json()["code"]) == (409, code), reply.text


def test_a_job_that_sees_a_checkpoint_of_another_trial_cannot_take_its_name(
    shared: Shared,
) -> None:
    shared.master.create(searcher={"name": "single", "metric": "loss"})
    shared.master.schedule()
    shared.master.report(2, 0)
    name = new_uuid(shared.master.home.cluster_id, 1)
    shared.store(name)
    shared.record(name, attempt=2, status=409)
    offer = {"files": {"manifest": "", "shards": {}}}
    assert_refused(shared.master.attempt(2, f"checkpoints/{name}", **offer), "other_trial")
    shared.record(name)
    view = shared.master.http.get(f"/checkpoints/{name}").json()
    assert (view["trial_id"], view["state"]) == (1, "COMPLETED")
    assert shared.piece(name, "a").content == b"first"


@pytest.mark.parametrize("name", ["a", "b/c"])
@pytest.mark.parametrize("kind", ["file", "folder", "fifo", "checkpoint"])
def test_an_attempt_is_given_no_file_that_a_link_in_its_checkpoint_leads_to(
    shared: Shared, name: str, kind: str
) -> None:
    path = shared.store("one") / name
    shared.record("one")
    assert shared.piece("one", name).status_code == 200
    if kind == "file":
        path.unlink()
        path.symlink_to(shared.token)
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        (shared.token.parent / path.name).write_bytes(SECRET)
        folder = path.parent if kind == "folder" and name == "b/c" else shared.storage.root / "one"
        manifest = shared.storage.root / "one" / "manifest.json"
        (shared.token.parent / "manifest.json").write_bytes(manifest.read_bytes())
        folder.rename(f"{folder}-away")
        folder.symlink_to(shared.token.parent)
    assert_refused(shared.piece("one", name))
    assert_refused(shared.master.http.get(f"/checkpoints/one/files/{name}"))


@pytest.mark.parametrize("kind", ["fifo", "file", "link"])
def test_checkpoints_of_nodes_wait_where_others_have_taken_the_place_that_they_arrive_in(
    shared: Shared, tmp_path: Path, kind: str
) -> None:
    directory = shared.store("sent")
    files = {
        "manifest": (directory / "manifest.json").read_text(),
        "shards": {"0": (directory / "rank-0.done").read_text()},
    }
    directory.rename(tmp_path / "on-the-node")
    place = shared.storage.root / ".incoming"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "file":
        place.touch()
    else:
        place.symlink_to(shared.token.parent)
    record = {
        "time": 1.0, "uuid": "sent", "steps_completed": 3, "metadata": {}, "resources": {},
        "storage": shared.storage.url, "type": "checkpoint",
    }  # fmt: skip
    reply = shared.master.attempt(1, "checkpoints/sent", files=files, record=record)
    assert (reply.status_code, reply.json()["code"]) == (503, "storage_unavailable"), reply.text
    assert "only this user can write to" in reply.json()["detail"]


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.done"])
def test_an_attempt_is_given_no_link_in_place_of_a_list_of_files(shared: Shared, name: str) -> None:
    path = shared.store("one") / name
    shared.record("one")
    assert shared.ask("one").status_code == 200
    path.unlink()
    path.symlink_to(shared.token)
    assert_refused(shared.ask("one"))


@pytest.mark.long
@pytest.mark.parametrize("what", ["large", "many"])
def test_done_files_do_not_fill_the_memory_of_the_master(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    directory = shared.store("one")
    shared.record("one")
    big = tmp_path / "shared" / "big"
    big.write_bytes(b"x" * (5 * 2**20 if what == "large" else 1))
    if what == "many":
        monkeypatch.setattr(_checkpoint_files, "MAX_TEXT_BYTES", 1000)
    for rank in range(1, 40):
        os.link(big, directory / f"rank-{rank}.done")
    reply = shared.ask("one")
    assert_refused(reply)
    number = 4 if what == "large" else 12
    assert f"but rank-{number}.done is beyond" in reply.text


def test_a_manifest_that_is_too_large_is_neither_written_nor_read(shared: Shared) -> None:
    directory = shared.store("one")
    shared.record("one")
    with pytest.raises(ValueError, match="must have at most 16777216 bytes, but have"):
        shared.storage.commit("one", {"steps_completed": 3, "large": "x" * 2**24})
    (directory / "manifest.json").unlink(missing_ok=True)
    (directory / "manifest.json").write_bytes(b'{"version": 1, "metadata": [' + b"[]," * 2**23)
    assert_refused(shared.ask("one"))


def test_an_attempt_is_given_no_file_of_another_owner(
    shared: Shared, tmp_path: Path, make_foreign: Callable[[Path], None]
) -> None:
    """As a hard link to a file of the master's user, which the kernel may allow."""
    directory = shared.store("one")
    shared.record("one")
    make_foreign(directory)
    assert shared.piece("one", "a").content == b"first"
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    (directory / "a").unlink()
    os.link(secret, directory / "a")
    assert_refused(shared.piece("one", "a"))
    assert_refused(shared.master.http.get("/checkpoints/one/files/a"))
    for name in ("rank-0.done", "manifest.json"):
        (directory / name).unlink()
        os.link(secret, directory / name)
        assert_refused(shared.ask("one"))


@pytest.fixture
def make_foreign() -> Callable[[Path], None]:
    """Return a function that gives a directory and all in it to another user."""
    if os.getuid() != 0:
        pytest.skip("gives files to another user")

    def give(root: Path) -> None:
        for path in (root, *root.rglob("*")):
            os.chown(path, OTHER_UID, OTHER_UID)

    return give


def test_a_download_is_served_from_the_file_that_was_verified(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared.store("one") / "a"
    shared.record("one")
    check = _checkpoint_routes.file_problem

    def check_and_replace(*arguments: Any) -> Any:
        found = check(*arguments)
        path.unlink()
        path.symlink_to(shared.token)
        return found

    monkeypatch.setattr(_checkpoint_routes, "file_problem", check_and_replace)
    reply = shared.master.http.get("/checkpoints/one/files/a")
    assert (reply.status_code, reply.content) == (200, b"first")
    assert reply.headers["content-length"] == "5"


def test_messages_about_a_checkpoint_of_many_files_name_only_some(
    shared: Shared,
) -> None:
    with shared.storage.store_path("many") as path:
        for number in range(300):
            (path / f"{number:03}{'x' * 200}").touch()
    shared.storage.commit("many", {"steps_completed": 3}, origin=shared.master.origin(1))
    shared.record("many")
    reply = shared.master.http.get("/checkpoints/many/files/none")
    assert reply.status_code == 404
    assert reply.json()["detail"].endswith(" and 290 more.")
    assert len(reply.json()["detail"]) < 3000
    for file in (shared.storage.root / "many").glob("*x"):
        file.write_bytes(b"more")
    found: list[Finding] = []
    with shared.master.core.database.read() as connection:
        check_checkpoints(
            shared.master.home.path, connection, found.append, CheckPace(None), reads_bytes=False
        )
    [finding] = found
    assert finding.text.endswith(" and 290 more.")
    assert len(finding.text) < 3500


# ---- deleting --------------------------------------------------------------------------------


def test_a_record_that_names_another_directory_deletes_and_reads_nothing_there(
    shared: Shared, tmp_path: Path
) -> None:
    """Neither one with any `manifest.json` nor a whole checkpoint of somebody else."""
    own = shared.store("own")
    shared.record("own")
    private = DirectoryStorage(tmp_path / "private")
    website = private.root / "website"
    website.mkdir()
    (website / "manifest.json").write_text('{"name": "a web app"}')
    with private.store_path("other") as path:
        (path / "a").write_bytes(SECRET)
    private.commit("other", {})
    for uuid in ("website", "other"):
        shared.record(uuid, private.url)
        assert_refused(shared.piece(uuid, "a"), "other_storage")
        assert_refused(shared.master.http.get(f"/checkpoints/{uuid}/files/a"), "other_storage")
    lines = shared.master.http.get("/trials/1/logs").text
    assert lines.count("the master neither reads nor deletes them") == 1
    shared.end()
    assert (shared.state("own"), own.exists()) == ("DELETED", False)
    for uuid in ("website", "other"):
        assert shared.state(uuid) == "COMPLETED"
        assert_refused(shared.master.http.delete(f"/checkpoints/{uuid}"), "other_storage")
        some = shared.master.http.delete(f"/checkpoints/{uuid}", params={"glob": "*"})
        assert_refused(some, "other_storage")
    assert shared.master.http.delete("/experiments/1").status_code < 300
    assert (website / "manifest.json").exists()
    assert private.verify("other").files


@pytest.mark.parametrize(
    ("uuid", "storage"),
    [("..", ""), ("../home", ""), (".open", ""), ("", ""), ("a" * 200, ""), ("one", "/a\0b"),
     ("one", "~nobody-there/x")],
)  # fmt: skip
def test_a_record_of_what_no_storage_can_hold_is_refused(
    shared: Shared, uuid: str, storage: str
) -> None:
    shared.record(uuid, storage, status=409)
    assert shared.master.http.get("/experiments/1/checkpoints").json()["items"] == []


def test_a_list_of_files_that_is_nested_too_deeply_holds_nothing_up(shared: Shared) -> None:
    for uuid in ("deep", "other"):
        path = shared.store(uuid, origin_of(shared.master.core.home.cluster_id, 1, 1))
        shared.record(uuid)
        if uuid == "deep":
            (path / "manifest.json").unlink()
            (path / "manifest.json").write_bytes(b"[" * 200_000)
    unknown = shared.storage.root / "unknown"
    unknown.mkdir()
    (unknown / "manifest.json").write_bytes(b"[" * 200_000)
    assert_refused(shared.piece("deep", "a"))
    shared.end()
    assert not (shared.storage.root / "other").exists()
    assert unknown.exists()


def test_a_record_of_a_directory_that_is_no_checkpoint_deletes_nothing(shared: Shared) -> None:
    website = shared.storage.root / "website"
    website.mkdir(parents=True)
    (website / "index.html").touch()
    shared.record("website")
    for content in ("{}", '{"version": 1}', "[]"):
        (website / "manifest.json").write_text(content)
        assert_refused(shared.master.http.delete("/checkpoints/website"))
    shared.end()
    assert (website / "index.html").exists()


@pytest.mark.parametrize("params", [{}, {"glob": "a"}, {"glob": "*"}])
def test_nothing_is_deleted_through_a_link_in_place_of_a_checkpoint(
    shared: Shared, tmp_path: Path, params: dict[str, str]
) -> None:
    directory = shared.store("one")
    shared.record("one")
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    assert_refused(shared.master.http.delete("/checkpoints/one", params=params))
    shared.end()
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


@pytest.mark.parametrize("has_master", [True, False])
def test_a_checkpoint_of_another_run_is_neither_read_nor_deleted_for_its_record(
    shared: Shared, has_master: bool
) -> None:
    """A job sees the directories of others in a shared storage, and reports one as its own."""
    cluster_id = shared.master.core.home.cluster_id
    directory = shared.store("theirs", origin_of(cluster_id, 7, 1) if has_master else "")
    shared.store("mine")
    for uuid in ("theirs", "mine"):
        shared.record(uuid)
    assert_refused(shared.piece("theirs", "a"), "other_checkpoint")
    assert_refused(shared.ask("theirs"), "other_checkpoint")
    assert_refused(shared.master.http.get("/checkpoints/theirs/files/a"), "other_checkpoint")
    assert shared.piece("mine", "a").content == b"first"
    shared.end()
    assert (shared.state("mine"), shared.state("theirs")) == ("DELETED", "COMPLETED")
    for params in ({}, {"glob": "a"}, {"glob": "*"}):
        refused = shared.master.http.delete("/checkpoints/theirs", params=params)
        assert_refused(refused, "other_checkpoint")
    assert (directory / "a").exists()


# ---- marks -----------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Return a file that must stay as it is."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    yield victim
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "fifo", "hard link", "text", "foreign"])
def test_a_mark_that_was_replaced_is_made_anew_and_nothing_else_is_written(
    tmp_path: Path, victim: Path, kind: str
) -> None:
    marks = StorageMarks("id", StorageCalls())
    storage = tmp_path / "shared"
    path, text = marks.mark(str(storage)).path, marks.mark(str(storage)).text
    for number in range(1000):
        (storage / f"..paceline-id.{os.getpid()}.{number}").symlink_to(victim)
    before = set(os.listdir(storage))
    mark = Path(path)
    if kind == "foreign":
        if os.getuid() != 0:
            pytest.skip("gives files to another user")
        os.chown(mark, OTHER_UID, OTHER_UID)
    else:
        mark.unlink()
    if kind == "link":
        mark.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(mark)
    elif kind == "hard link":
        os.link(victim, mark)
    elif kind == "text":
        mark.write_text("x" * 100_000)
    assert marks.mark(str(storage)).text == text
    facts = mark.lstat()
    assert (stat.S_ISREG(facts.st_mode), facts.st_uid) == (True, os.getuid())
    assert mark.read_text() == text
    assert set(os.listdir(storage)) == before


def test_a_directory_in_place_of_a_mark_is_told_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".paceline-id").mkdir()
    assert StorageMarks("id", StorageCalls()).mark(str(tmp_path)) is None
    assert "cannot be kept in" in caplog.text
    assert os.listdir(tmp_path) == [".paceline-id"]


@pytest.mark.parametrize(("mode", "is_told"), [(0o755, False), (0o1777, False), (0o777, True)])
def test_the_log_tells_of_a_storage_in_which_users_can_replace_each_others_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_told: bool
) -> None:
    tmp_path.chmod(mode)
    marks = StorageMarks("cluster", StorageCalls())
    assert marks.mark(str(tmp_path)) == marks.mark(str(tmp_path))
    warnings = [text for text in caplog.messages if "chmod +t" in text]
    assert len(warnings) == is_told
