"""Checkpoints that travel between a node and its master: pieces, resumption, and who may do so."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import msgspec
import pytest
import xxhash

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import JournalKey, RunInfo
from paceline._cluster.master.experiments.attempt_runners import end_runner
from paceline._cluster.master.nodes.checkpoint_transfers import Transfers
from paceline._cluster.messages import runner_messages
from paceline._cluster.messages.runner_messages import AttemptEnd, AttemptSpec, MasterAddress
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner import checkpoint_shipping as _fetch_checkpoint
from paceline._cluster.runner import checkpoint_shipping as _ship_checkpoints
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.checkpoint_and_code_fetching import fetch_checkpoint
from paceline._cluster.runner.checkpoint_shipping import CheckpointShipper, without_checkpoint
from paceline._cluster.runner.master_link import MasterLink, RefusedByMasterError, UnreachableError
from paceline.journal import (
    CheckpointDeleted,
    CheckpointFilesDeleted,
    CheckpointStored,
    RunDirectory,
)
from paceline.storage import CheckpointCorruptError, DirectoryStorage, IncomingCheckpoint

FILES = {
    0: {"model": b"0123456789" * 5, "deep/er/state": b"abc", "empty": b""},
    1: {"rank 1/ä&b?": b"z" * 31},
}
PIECE = 10
NUM_PIECES = 5 + 1 + 1 + 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send small pieces, and close all links afterwards."""
    monkeypatch.setattr(runner_messages, "MAX_PIECE_BYTES", PIECE)
    made: list[MasterLink] = []
    monkeypatch.setattr(Link, "made", made)
    yield
    for link in made:
        link.close()


def needs(missing: dict[str, int]) -> dict[str, Any]:
    return {"is_stored": False, "missing": missing, "is_alone": True}


class Node:
    """A directory of an attempt that nobody else sees, and what its runner sends."""

    def __init__(self, master: Any, root: Path, attempt_id: int = 1) -> None:
        self.master = master
        self.attempt_id = attempt_id
        spec = AttemptSpec(
            attempt_id=attempt_id, trial_id=1, number=1, entrypoint="", python="", variables={},
            working_dir=None, context_digest=None, slot_ids=[], num_threads=1, gpu_ids=[],
            keep_directory=False,
        )  # fmt: skip
        self.directory = AttemptDirectory.create(root / f"node-{attempt_id}", spec)
        place = str(self.directory.run.checkpoints_path)
        info = RunInfo(run_id="r", name="n", created=0.0, checkpoint_storage=place)
        RunDirectory.create(self.directory.run.path, info)
        self.storage = DirectoryStorage(self.directory.run.checkpoints_path)
        path = self.directory.run.journal_path(JournalKey(1, 0, 0))
        self.journal = JournalWriter(path)

    def store(self, uuid: str, files: dict[int, dict[str, bytes]] = FILES, step: int = 1) -> None:
        """Store a checkpoint of several ranks here."""
        for rank, content in files.items():
            with self.storage.store_shard(uuid, rank) as path:
                for name, data in content.items():
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    (path / name).write_bytes(data)
        metadata = {"steps_completed": step}
        manifest = self.storage.commit(
            uuid, metadata, num_shards=len(files), origin=self.master.origin(self.attempt_id)
        )
        record = CheckpointStored(
            time=float(step), uuid=uuid, steps_completed=step, metadata=metadata,
            resources=manifest.resources, storage=self.storage.url,
        )  # fmt: skip
        self.journal.append(record)

    def delete(self, uuid: str) -> None:
        """Delete a checkpoint here."""
        self.storage.delete(uuid)
        self.journal.append(CheckpointDeleted(time=9.0, uuid=uuid))

    @property
    def headers(self) -> dict[str, str]:
        token = self.master.core.attempt_tokens.token_of(self.attempt_id)
        return {"Authorization": f"Bearer {token}"}

    def link(self) -> "Link":
        url = self.master.url.removesuffix("/api/v1")
        token = self.master.core.attempt_tokens.token_of(self.attempt_id)
        return Link(lambda: MasterAddress(url=url, token=token))

    def shipper(self, link: "Link | None" = None) -> CheckpointShipper:
        return CheckpointShipper(
            self.directory, f"/attempts/{self.attempt_id}", link or self.link()
        )

    def offer(self, uuid: str, **changed: Any) -> httpx2.Response:
        """Offer a checkpoint that is stored here, as its runner does."""
        files = _ship_checkpoints._files_of(self.storage, uuid)
        manifest = self.storage.manifest(uuid)
        record = CheckpointStored(
            time=1.0, uuid=uuid, steps_completed=1, metadata=manifest.metadata,
            resources=manifest.resources, storage="/etc",
        )  # fmt: skip
        body = msgspec.to_builtins({"files": files, "record": record} | changed, str_keys=True)
        return self._send("POST", f"checkpoints/{uuid}", json=body)

    def piece(self, uuid: str, name: str, offset: int, data: bytes, **how: Any) -> httpx2.Response:
        digest = how.pop("digest", xxhash.xxh3_128_hexdigest(data))
        return self._send(
            "PUT", f"checkpoints/{uuid}/pieces", params={"name": name, "offset": offset},
            content=data, headers={"X-Paceline-Digest": digest}, **how,
        )  # fmt: skip

    def _send(self, method: str, path: str, **how: Any) -> httpx2.Response:
        headers = how.pop("headers", {}) | self.headers
        place = f"/attempts/{how.pop('attempt_id', self.attempt_id)}/{path}"
        return self.master.http.request(method, place, headers=headers, **how)


class Link(MasterLink):
    """A link that counts what it sends, and fails or damages at will."""

    made: ClassVar[list[MasterLink]] = []
    num_puts = num_gets = 0
    fails_at: tuple[int, ...] = ()
    damages_at: tuple[int, ...] = ()

    def __init__(self, read_address: Callable[[], MasterAddress]) -> None:
        super().__init__(read_address)
        self.made.append(self)

    def put(self, path: str, body: bytes, headers: Any) -> bytes:
        self.num_puts += 1
        if self.num_puts in self.fails_at:
            raise UnreachableError("cut")
        if self.num_puts in self.damages_at:
            body = bytes([body[0] ^ 1]) + body[1:]
        return super().put(path, body, headers)

    def get(self, path: str, timeout_s: float = 30.0) -> bytes:
        self.num_gets += 1
        if self.num_gets in self.fails_at:
            raise UnreachableError("cut")
        found = super().get(path, timeout_s)
        return b"x" + found[1:] if self.num_gets in self.damages_at else found


@pytest.fixture
def served(make_master: Callable[..., Any]) -> Any:
    """Return a master with two attempts of two trials."""
    master = make_master(2)
    master.create()
    master.schedule()
    return master


@pytest.fixture
def node(served: Any, tmp_path: Path) -> Node:
    return Node(served, tmp_path)


@pytest.fixture
def other(served: Any, tmp_path: Path) -> Node:
    """Return a node with the attempt of the other trial."""
    return Node(served, tmp_path, 2)


def storage_of(master: Any) -> DirectoryStorage:
    return DirectoryStorage(master.home.path / "checkpoints")


def tree(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modes and contents of all files below a directory."""
    return {
        str(each.relative_to(path)): (each.stat().st_mode, each.read_bytes())
        for each in sorted(path.rglob("*"))
        if each.is_file()
    }


def row(master: Any, uuid: str) -> Any:
    return master.http.get(f"/checkpoints/{uuid}").json()


def code(reply: httpx2.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


# ---- sending -----------------------------------------------------------------------------


def test_a_checkpoint_arrives_as_it_was_stored(node: Node, served: Any) -> None:
    node.store("one")
    node.shipper().ship_rest()
    place = storage_of(served)
    assert tree(place.root / "one") == tree(node.storage.root / "one")
    assert place.verify("one").metadata == {"steps_completed": 1}
    assert sorted(path.name for path in place.root.iterdir()) == ["one"]
    stored = row(served, "one")
    assert (stored["state"], stored["trial_id"], stored["storage"]) == ("COMPLETED", 1, place.url)
    assert not list(node.directory.outgoing_path.iterdir())
    # Another runner says it all again.
    link = node.link()
    node.shipper(link).ship_rest()
    assert link.num_puts == 0


@pytest.mark.parametrize("cut", [1, 3, 5, NUM_PIECES])
def test_what_was_cut_goes_on_where_it_was(cut: int, node: Node, served: Any) -> None:
    node.store("one")
    link = node.link()
    link.fails_at = (cut,)
    with pytest.raises(UnreachableError):
        node.shipper(link).ship_rest()
    again = node.link()
    node.shipper(again).ship_rest()
    assert storage_of(served).verify("one")
    assert again.num_puts == NUM_PIECES - cut + 1


def test_another_master_has_what_arrived_at_the_one_before(
    node: Node, served: Any, make_master: Callable[..., Any]
) -> None:
    node.store("one")
    link = node.link()
    link.fails_at = (4,)
    shipper = node.shipper(link)
    with pytest.raises(UnreachableError):
        shipper.ship_rest()
    served.close()
    node.master = make_master(2)
    again = node.link()
    shipper._link = shipper._sender._link = again
    shipper.ship_rest()
    assert again.num_puts == NUM_PIECES - 2  # one was refused, until the offer
    assert storage_of(node.master).verify("one")


def test_a_damaged_piece_is_refused_and_sent_again(node: Node, served: Any) -> None:
    node.store("one")
    link = node.link()
    link.damages_at = (1, 4)
    node.shipper(link).ship_rest()
    assert link.num_puts == NUM_PIECES + 2
    assert storage_of(served).verify("one")
    node.store("two")
    node.offer("two")
    assert code(node.piece("two", "model", 0, b"0" * 10, digest="0" * 32)) == (422, "damaged_piece")
    assert node.offer("two").json()["missing"]["model"] == 0


def test_a_file_that_is_damaged_as_a_whole_is_missing_again(node: Node, served: Any) -> None:
    node.store("one", {0: {"a": b"right", "b": b"fine"}})
    assert node.offer("one").json() == needs({"a": 0, "b": 0})
    node.piece("one", "a", 0, b"wrong")
    node.piece("one", "b", 0, b"fine")
    assert node.offer("one").json() == needs({"a": 0})
    assert not storage_of(served).exists("one")
    node.piece("one", "a", 0, b"right")
    assert node.offer("one").json()["is_stored"]
    assert storage_of(served).verify("one")


def test_a_piece_with_another_offset_changes_nothing(node: Node) -> None:
    node.store("one", {0: {"a": b"0123456789"}})
    node.offer("one")
    assert node.piece("one", "a", 4, b"456").json() == {"num_bytes": 0}
    assert node.piece("one", "a", 0, b"0123").json() == {"num_bytes": 4}
    assert node.piece("one", "a", 0, b"0123").json() == {"num_bytes": 4}
    assert code(node.piece("one", "a", 4, b"4567890")) == (422, "invalid_checkpoint")


def test_a_damaged_checkpoint_of_the_node_is_given_up_and_named(node: Node) -> None:
    node.store("one", {0: {"a": b"right"}})
    (node.storage.root / "one" / "a").chmod(0o600)
    (node.storage.root / "one" / "a").write_bytes(b"wrong")
    node.store("two", {0: {"a": b"right"}})
    shipper = node.shipper()
    shipper.ship_rest()
    assert "Checkpoint one was damaged before it could be sent: 'a' was altered" in shipper.unsent
    assert storage_of(node.master).list() == ["two"]


def test_what_was_deleted_before_it_was_sent_is_left_out(node: Node, served: Any) -> None:
    for number in range(5):
        node.store(f"c{number}")
        if number:
            node.delete(f"c{number - 1}")
    link = node.link()
    node.shipper(link).ship_rest()
    assert storage_of(served).list() == ["c4"]
    assert link.num_puts == NUM_PIECES


def test_what_is_deleted_while_it_is_sent_arrives_and_is_deleted_after_the_next(
    node: Node, served: Any
) -> None:
    node.store("one")
    shipper = node.shipper()
    assert shipper.ship_once()
    assert shipper.ship_once()
    node.store("two")
    node.delete("one")
    seen = set()
    while shipper.ship_once():
        seen.add(tuple(storage_of(served).list()))
    # There is always one to go on from.
    assert sorted(seen) == [(), ("one",), ("one", "two"), ("two",)]
    assert (row(served, "one")["state"], row(served, "two")["state"]) == ("DELETED", "COMPLETED")


def test_files_that_are_deleted_are_deleted_at_the_master_too(node: Node, served: Any) -> None:
    node.store("one")
    shipper = node.shipper()
    shipper.ship_rest()
    left = node.storage.delete_files("one", lambda name: name == "model").resources
    node.journal.append(CheckpointFilesDeleted(time=2.0, uuid="one", resources=left))
    shipper.ship_rest()
    assert row(served, "one")["state"] == "PARTIALLY_DELETED"
    assert tree(storage_of(served).root / "one").keys() == tree(node.storage.root / "one").keys()


def test_records_about_checkpoints_are_sent_apart(node: Node) -> None:
    node.store("one")
    node.delete("one")
    run = node.directory.run
    [key] = run.journal_keys()
    sent = [without_checkpoint(entry.payload) for entry in run.reader(key)]
    assert [b"checkpoint_sent_apart" in payload for payload in sent] == [True, True]
    assert without_checkpoint(b'{"type":"status"}') == b'{"type":"status"}'


# ---- trouble at the master ---------------------------------------------------------------


@pytest.mark.root
def test_a_full_disk_of_the_master_keeps_what_is_there_and_takes_the_rest_later(
    make_master: Callable[..., Any],
    make_small_disk: Any,
    fill_disk: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only a file of many blocks meets the end of a disk.
    monkeypatch.setattr(runner_messages, "MAX_PIECE_BYTES", 1 << 16)
    disk = make_small_disk(size="1m")
    master = make_master(2)
    master.create(checkpoint_storage={"type": "directory", "path": str(disk / "c")})
    master.schedule()
    node = Node(master, tmp_path)
    node.store("one", {0: {"a": bytes(range(256)) * 1024}})
    node.offer("one")
    half = (bytes(range(256)) * 1024)[: 128 * 1024]
    assert node.piece("one", "a", 0, half).json() == {"num_bytes": len(half)}
    fill_disk(disk)
    assert code(node.piece("one", "a", len(half), half)) == (503, "storage_unavailable")
    assert node.offer("one").json()["missing"] == {"a": len(half)}
    problem = "Experiment 1 waits, as checkpoint one of trial 1 cannot be stored: No space left"
    problems = master.http.get("/status").json()["problems"]
    [told] = [one for one in problems if one.startswith(problem)]
    (disk / "filler").unlink()
    node.shipper().ship_rest()
    assert DirectoryStorage(disk / "c").verify("one")
    assert told not in master.http.get("/status").json()["problems"]
    logs = [line["text"] for line in master.http.get("/trials/1/logs").json()["items"]]
    [waits] = [text for text in logs if "cannot be stored by the master: No space left" in text]
    [waited] = [text for text in logs if "Checkpoint one waited" in text]
    assert "does not end before it is" in waits
    assert "No space left" in waited


def test_an_attempt_that_ended_sends_nothing_and_leaves_nothing(node: Node, served: Any) -> None:
    node.store("one")
    node.offer("one")
    node.piece("one", "model", 0, b"0123456789")
    end = {"reason": "runner_lost", "code": None, "signal": None, "time": 0.0}
    served.attempt(1, "end", **end)
    assert code(node.offer("one")) == (409, "attempt_over")
    assert node.piece("one", "model", 10, b"0123456789").status_code == 409
    assert not list(storage_of(served).root.iterdir())


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Have checkpoints wait before they are moved in; yield "it waits" and "go on"."""
    waits, go_on = threading.Event(), threading.Event()
    commit = IncomingCheckpoint.commit

    def slow(incoming: IncomingCheckpoint) -> None:
        waits.set()
        assert go_on.wait(60)
        commit(incoming)

    monkeypatch.setattr(IncomingCheckpoint, "commit", slow)
    yield waits, go_on
    go_on.set()


def test_a_storage_that_is_slow_to_take_a_checkpoint_holds_no_transaction(
    node: Node, served: Any, moving: tuple[threading.Event, threading.Event]
) -> None:
    waits, go_on = moving
    node.store("one")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(node.shipper().ship_rest)
        assert waits.wait(60)
        assert served.core.database.write(lambda _: 3).result(60) == 3
        go_on.set()
        sending.result(60)
    assert row(served, "one")["state"] == "COMPLETED"


def test_an_attempt_that_is_lost_while_its_checkpoint_is_moved_in_leaves_nothing(
    node: Node, served: Any, moving: tuple[threading.Event, threading.Event]
) -> None:
    waits, go_on = moving
    node.store("one")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(node.shipper().ship_rest)
        assert waits.wait(60)
        end = AttemptEnd(
            reason=ExitReason.RUNNER_LOST, code=None, signal=None, time=0.0, detail=None
        )
        served.core.database.write(
            lambda transaction: end_runner(served.core.changes, transaction, 1, 0, end)
        ).result()
        go_on.set()
        assert sending.exception(60) is None or isinstance(
            sending.exception(), RefusedByMasterError
        )
    assert served.http.get("/checkpoints/one").status_code == 404
    assert not (storage_of(served).root / "one").exists()


def test_a_piece_that_is_written_after_its_checkpoint_was_stored_goes_with_the_attempt(
    node: Node, served: Any
) -> None:
    node.store("one")
    node.offer("one")
    [incoming] = served.core.transfers._uploads._open.values()
    node.shipper().ship_rest()
    # As a thread of the master does that has begun before.
    incoming.write("model", 0, b"late")
    assert (storage_of(served).root / ".incoming").exists()
    served.attempt(1, "end", reason="runner_lost", code=None, signal=None, time=0.0)
    assert [path.name for path in storage_of(served).root.iterdir()] == ["one"]


@pytest.mark.parametrize("is_master_new", [False, True])
def test_what_a_lost_attempt_did_not_send_to_the_end_is_removed(
    node: Node, served: Any, is_master_new: bool
) -> None:
    """Its runner says nothing any more, and nobody else may send anything there."""
    node.store("one")
    node.offer("one")
    node.piece("one", "model", 0, b"0123456789")
    transfers = served.core.transfers
    transfers.waiting.note(1, "one", "No space left")
    if is_master_new:
        transfers = Transfers(served.core.database, served.home.cluster_id, served.core.changes)
    transfers.forget_ended()
    assert (storage_of(served).root / ".incoming").exists()
    end = AttemptEnd(reason=ExitReason.RUNNER_LOST, code=None, signal=None, time=0.0)
    served.core.database.write(
        lambda transaction: end_runner(served.core.changes, transaction, 1, 0, end)
    ).result()
    transfers.forget_ended()
    assert not list(storage_of(served).root.iterdir())
    assert transfers.waiting.all() == []


def test_what_a_lost_attempt_left_to_an_earlier_master_is_removed(node: Node, served: Any) -> None:
    node.store("one")
    node.offer("one")
    node.piece("one", "model", 0, b"0123456789")
    end = AttemptEnd(reason=ExitReason.RUNNER_LOST, code=None, signal=None, time=0.0)
    served.core.database.write(
        lambda transaction: end_runner(served.core.changes, transaction, 1, 0, end)
    ).result()
    root = storage_of(served).root
    Transfers(served.core.database, served.home.cluster_id, served.core.changes).forget_ended()
    assert not list(root.iterdir())


def test_only_a_few_checkpoints_are_sent_at_a_time(node: Node) -> None:
    for number in range(5):
        node.store(f"c{number}")
    replies = [node.offer(f"c{number}") for number in range(5)]
    assert [reply.status_code for reply in replies] == [200] * 4 + [409]
    assert code(replies[4]) == (409, "too_many_uploads")


@pytest.mark.parametrize(
    ("kind", "told"),
    [("offers", "at most 4 lists of files"), ("pieces", "at most 8 pieces")],
)
def test_the_answer_to_more_requests_than_are_taken_at_a_time_names_the_limit(
    node: Node, served: Any, monkeypatch: pytest.MonkeyPatch, kind: str, told: str
) -> None:
    from paceline._cluster.master.api import checkpoint_routes as _transfer_routes

    node.store("one")
    assert node.offer("one").status_code == 200
    places, loop = getattr(served.core.transfers, kind), served.core.controls._loop
    send = {
        "offers": lambda: node.offer("one"), "pieces": lambda: node.piece("one", "model", 0, b"x")
    }[kind]  # fmt: skip
    # As many other requests as there may be.
    number = 4 if kind == "offers" else 8
    for _ in range(number):
        asyncio.run_coroutine_threadsafe(places.acquire(), loop).result(60)
    with monkeypatch.context() as patch:
        patch.setattr(_transfer_routes, "_LONGEST_WAIT_S", 0.01)
        reply = send()
    assert code(reply) == (503, "busy")
    assert told in reply.json()["detail"]
    for _ in range(number):
        loop.call_soon_threadsafe(places.release)
    assert send().status_code == 200


def test_lists_of_files_have_a_largest_size(node: Node) -> None:
    node.store("one")
    files = {"manifest": "x" * (64 * 2**20), "shards": {}}
    reply = node.offer("one", files=files)
    assert reply.status_code == 413
    assert f"at most {64 * 2**20} bytes" in reply.json()["detail"]


# ---- tokens ------------------------------------------------------------------------------


def test_a_token_reads_and_writes_checkpoints_of_its_own_trial_alone(
    node: Node, other: Node, served: Any
) -> None:
    node.store("one")
    node.shipper().ship_rest()
    before = tree(storage_of(served).root)
    other.store("one", {0: {"model": b"evil"}})
    assert code(other.offer("one")) == (409, "other_trial")
    assert code(other.offer("one", record=None)) == (409, "other_trial")
    assert code(other.piece("one", "model", 0, b"evil")) == (409, "unknown_upload")
    assert code(other._send("DELETE", "checkpoints/one")) == (409, "other_trial")
    assert code(other._send("GET", "checkpoints/one")) == (409, "other_trial")
    params = {"name": "model", "offset": 0}
    reply = other._send("GET", "checkpoints/one/pieces", params=params)
    assert code(reply) == (409, "other_trial")
    for method in ("GET", "DELETE", "POST"):
        reply = other._send(method, "checkpoints/one", attempt_id=1)
        assert code(reply) == (403, "scope_too_low")
    assert code(other.piece("one", "model", 0, b"evil", attempt_id=1)) == (403, "scope_too_low")
    assert code(other._send("GET", "/checkpoints/one")) in [
        (404, "not_found"),
        (403, "scope_too_low"),
    ]
    for record in (
        {"type": "checkpoint_deleted", "time": 0.0, "uuid": "one"},
        {"type": "checkpoint_files_deleted", "time": 0.0, "uuid": "one", "resources": {}},
    ):
        batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
        assert other._send("POST", "records", json={"batches": [batch]}).status_code == 200
    assert row(served, "one")["state"] == "COMPLETED"
    assert tree(storage_of(served).root) == before


def test_a_place_that_a_record_alone_names_is_not_read(
    node: Node, served: Any, tmp_path: Path
) -> None:
    with DirectoryStorage(tmp_path / "foreign").store_path("secret") as path:
        (path / "file").write_text("secret")
    DirectoryStorage(tmp_path / "foreign").commit("secret", {})
    record = {
        "type": "checkpoint", "time": 0.0, "uuid": "secret", "steps_completed": 1, "metadata": {},
        "resources": {"file": 6}, "storage": str(tmp_path / "foreign"),
    }  # fmt: skip
    batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
    node._send("POST", "records", json={"batches": [batch]})
    assert code(node._send("GET", "checkpoints/secret")) == (409, "other_storage")
    assert code(node._send("DELETE", "checkpoints/secret")) == (409, "other_storage")


@pytest.mark.parametrize("name", ["../two/a", "/etc/a", "a//b", "./a", "manifest.json", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str, node: Node, served: Any) -> None:
    node.store("one", {0: {"a": b"right"}})
    assert node.offer("one").status_code == 200
    assert node.piece("one", name, 0, b"evil").status_code == 422
    text = (node.storage.root / "one" / "manifest.json").read_text()
    assert '"a"' in text
    from paceline._base.journal_records import seal

    manifest = msgspec.json.decode(text, type=dict)
    manifest.pop("crc32", None)
    manifest["files"] = {name: manifest["files"]["a"]}
    forged = seal(msgspec.json.encode({k: v for k, v in manifest.items() if k in MANIFEST_FIELDS}))
    files = {"manifest": forged.decode(), "shards": {}}
    assert node.offer("one", files=files).status_code in (409, 422)
    assert sorted(path.name for path in storage_of(served).root.iterdir()) in ([], [".incoming"])


MANIFEST_FIELDS = {"version", "uuid", "created", "metadata", "files", "deleted"}


def test_pieces_have_a_largest_size(node: Node) -> None:
    node.store("one")
    node.offer("one")
    assert node.piece("one", "model", 0, bytes(4 * 2**20 + 1)).status_code == 413


# ---- fetching ----------------------------------------------------------------------------


@contextmanager
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_fetch_checkpoint.time, "sleep", lambda _: None)
    yield


@pytest.fixture
def stored(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a node whose checkpoint is at the master."""
    from paceline._cluster.master.nodes import checkpoint_transfers as _checkpoint_transfers

    monkeypatch.setattr(_checkpoint_transfers, "MAX_PIECE_BYTES", PIECE)
    node.store("one")
    node.shipper().ship_rest()
    return node


@pytest.mark.parametrize("cut", [(), (1,), (2, 5), (NUM_PIECES + 1,)])
def test_a_checkpoint_is_fetched_as_it_is_there(
    cut: tuple[int, ...], stored: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = stored.link()
    link.fails_at = cut
    with no_pauses(monkeypatch):
        fetch_checkpoint(link, 1, "one", tmp_path / "here")
    assert tree(tmp_path / "here") == tree(storage_of(stored.master).root)
    assert link.num_gets == 1 + NUM_PIECES + len(cut)
    fetch_checkpoint(link, 1, "one", tmp_path / "here")
    assert link.num_gets == 1 + NUM_PIECES + len(cut)


def test_fetching_goes_on_where_another_runner_was_killed(stored: Node, tmp_path: Path) -> None:
    link = stored.link()
    fetch_checkpoint(link, 1, "one", tmp_path / "here", lambda: link.num_gets < 5)
    assert not DirectoryStorage(tmp_path / "here").exists("one")
    again = stored.link()
    fetch_checkpoint(again, 1, "one", tmp_path / "here")
    assert again.num_gets == 1 + NUM_PIECES - 4
    assert DirectoryStorage(tmp_path / "here").verify("one")


def test_a_file_that_was_damaged_on_its_way_is_fetched_again(stored: Node, tmp_path: Path) -> None:
    link = stored.link()
    link.damages_at = (4,)
    fetch_checkpoint(link, 1, "one", tmp_path / "here")
    assert link.num_gets > 1 + NUM_PIECES
    assert DirectoryStorage(tmp_path / "here").verify("one")


def test_a_checkpoint_that_is_damaged_at_the_master_is_an_error(
    stored: Node, tmp_path: Path
) -> None:
    path = storage_of(stored.master).root / "one" / "model"
    path.chmod(0o600)
    path.write_bytes(b"9" * 50)
    with pytest.raises(CheckpointCorruptError, match="must arrive whole, but 'model' was altered"):
        fetch_checkpoint(stored.link(), 1, "one", tmp_path / "here")
    path.write_bytes(b"0123")
    with pytest.raises(CheckpointCorruptError, match="'model' must have 50 bytes"):
        fetch_checkpoint(stored.link(), 1, "one", tmp_path / "there")


def test_a_checkpoint_that_was_deleted_is_refused(stored: Node, tmp_path: Path) -> None:
    stored.master.http.delete("/checkpoints/one")
    with pytest.raises(RefusedByMasterError, match="was deleted"):
        fetch_checkpoint(stored.link(), 1, "one", tmp_path / "here")


def test_a_trial_that_starts_from_the_checkpoint_of_another_fetches_it(
    stored: Node, tmp_path: Path
) -> None:
    end = {"reason": "exited", "code": 0, "signal": None, "time": 0.0}
    for attempt_id in (1, 2):
        stored.master.attempt(attempt_id, "end", **end)
    stored.master.create(
        hyperparameters={},
        searcher={"name": "single", "metric": "loss", "max_length": {"batches": 1},
                  "source_checkpoint_uuid": "one"},
    )  # fmt: skip
    stored.master.schedule()
    clone = Node(stored.master, tmp_path, 3)
    fetch_checkpoint(clone.link(), 3, "one", tmp_path / "here")
    assert DirectoryStorage(tmp_path / "here").verify("one")
    assert code(clone._send("DELETE", "checkpoints/one")) == (409, "other_trial")
