"""The requests of a save to a bucket: which there are, their order, and a kill at each of them."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.storage import (
    CheckpointCorruptError,
    CheckpointWriteError,
    ObjectStorage,
    storage_from,
)
from paceline.storage import _object_storage_base as _recent_records

LARGE = os.urandom(9_000_000)
# Two large files from memory and two small ones, of which each has a name of its own.
SAVE = """
import os, sys
from paceline.storage import _object_storage_base, storage_from

# On a busy machine a second is not enough for what is known to be there.
_object_storage_base._RECENT_S = 3600.0
storage = storage_from(sys.argv[1])
large = memoryview(os.urandom(9_000_000))
with storage.store_shard("two", 0) as path:
    send = storage.file_sender(path)
    for name in ("model", "optimizer"):
        (path / f"{name}.json").write_text("{}")
        send(name, len(large), [large])
storage.commit("two", {})
"""
NUM_REQUESTS = 16


def bucket(url: str) -> ObjectStorage:
    storage = storage_from(url)
    assert isinstance(storage, ObjectStorage)
    return storage


def store(storage: ObjectStorage, uuid: str, *ranks: int, name: str = "model") -> None:
    for rank in ranks:
        with storage.store_shard(uuid, rank) as path:
            (path / f"{name}_{rank}").write_bytes(b"weights")


@pytest.fixture
def long_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a process put or read count as there for as long as a busy machine takes."""
    monkeypatch.setattr(_recent_records, "_RECENT_S", 3600.0)


@pytest.fixture
def requests(faulty: Any, long_recent: None) -> list[str]:
    """Return the requests that come, each as a method and what it is about."""
    found: list[str] = []

    def note(line: str, client: Any) -> bool:
        found.append(kind_of(line))
        return True

    faulty.fault = note
    return found


def kind_of(line: str) -> str:
    """Return what a request is about: a file, a step of its upload, or the list."""
    method, path, _ = line.split()
    if "list-type" in path:
        return "LIST"
    if method == "POST" and path.endswith("?delete"):
        return "DELETE"
    step = re.search(r"\?(uploads|partNumber|uploadId)", path)
    place = ".open" if "/.open/" in path else path.partition("?")[0].rpartition("/")[2]
    return f"{method} {place}" + (f"?{step[1]}" if step else "")


def test_a_save_makes_these_requests_in_this_order(
    s3: str, requests: list[str], run_python: Any
) -> None:
    done = run_python(SAVE, s3)
    assert done.returncode == 0, done.stderr
    large = [
        request
        for name in ("model", "optimizer")
        for request in (
            f"POST {name}?uploads",
            *[f"PUT {name}?partNumber"] * 2,
            f"POST {name}?uploadId",
            f"PUT {name}.json",
        )
    ]
    beginning, files, end = requests[:2], requests[2:-4], requests[-4:]
    # The two of the beginning come at once, and so do the files.
    assert Counter(beginning) == Counter(["LIST", "PUT .open"])
    assert Counter(files) == Counter(large)
    assert end == ["PUT rank-0.done", "LIST", "PUT manifest.json", "DELETE"]
    assert len(requests) == NUM_REQUESTS


def test_the_record_of_each_other_rank_is_read_once_for_a_commit(
    s3: str, requests: list[str]
) -> None:
    chief, other = bucket(s3), bucket(s3)
    store(chief, "one", 0)
    store(other, "one", 1)
    requests.clear()
    assert chief.missing_shards("one", 2) == []
    chief.commit("one", {}, num_shards=2)
    assert requests == ["GET rank-1.done", "LIST", "PUT manifest.json", "DELETE"]
    assert sorted(chief.verify("one").files) == ["model_0", "model_1"]


def test_what_was_removed_meanwhile_is_not_committed(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process has put is believed to be there for a second."""
    chief, sweeper = bucket(s3), bucket(s3)
    now = [1000.0]
    monkeypatch.setattr("time.clock_gettime", lambda clock: now[0])
    store(chief, "one", 0)
    sweeper.discard("one")
    now[0] += 1
    with pytest.raises(CheckpointCorruptError, match="that of rank 0 is missing"):
        chief.commit("one", {})
    store(chief, "one", 0)
    # It knows what it has removed itself.
    chief.discard("one")
    with pytest.raises(CheckpointCorruptError, match="that of rank 0 is missing"):
        chief.commit("one", {})
    assert chief.objects("") == []


def test_a_sweep_leaves_a_checkpoint_for_as_long_as_a_file_may_take(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, sweeper = bucket(s3), bucket(s3)
    with storage.store_path("slow") as path:
        (path / "model").write_text("weights")
        time.sleep(1.1)
        assert sweeper.sweep(older_than_s=0.1) == []
    # A mark without seconds. The server tells whole seconds.
    storage._put_data(".open/slow", b"")
    time.sleep(1.1)
    assert sweeper.sweep(older_than_s=0.1) == ["slow"]


def test_a_checkpoint_whose_files_were_removed_is_not_committed(s3: str) -> None:
    storage, other = bucket(s3), bucket(s3)
    store(storage, "one", 0)
    other.remove(["one/model_0"])
    with pytest.raises(CheckpointWriteError, match=r"1 of 1 were removed or repl.* 'model_0'"):
        storage.commit("one", {})
    assert storage.objects("") == []


@pytest.mark.usefixtures("long_recent")
def test_a_server_that_does_not_answer_a_commit_is_an_error_of_this_checkpoint_alone(
    s3: str, faulty: Any
) -> None:
    chief, other = bucket(s3), bucket(s3)
    store(chief, "one", 0)
    store(other, "one", 1)
    faulty.answer("403 No", "AccessDenied", when="GET")
    with pytest.raises(CheckpointWriteError, match="rank 1 has stored its part .*AccessDenied"):
        chief.commit("one", {}, num_shards=2)
    # What it has stored itself, it knows.
    with pytest.raises(CheckpointWriteError, match="whether all files .*AccessDenied"):
        chief.commit("one", {}, num_shards=1)


def test_without_conditional_puts_the_records_are_read(
    s3: str, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have replaced them."""
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    storage = bucket(s3)
    store(storage, "one", 0)
    storage.commit("one", {})
    assert requests[-4:] == ["GET rank-0.done", "LIST", "PUT manifest.json", "DELETE"]


def test_the_mark_of_a_checkpoint_that_is_there_already_is_swept(s3: str) -> None:
    storage = bucket(s3)
    store(storage, "one", 0)
    storage.commit("one", {})
    with pytest.raises(FileExistsError, match="one has a shard of rank 0 already"):
        store(storage, "one", 0, name="other")
    assert storage.sweep(older_than_s=0) == []
    assert sorted(each.key for each in storage.objects("")) == [
        "one/manifest.json", "one/model_0", "one/rank-0.done",
    ]  # fmt: skip
    storage.verify("one")


QUICK = {0, 3, NUM_REQUESTS - 2}


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "arrives"])
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in range(NUM_REQUESTS)],
)
def test_a_kill_at_a_request_leaves_whole_checkpoints_and_nothing_that_is_not_swept(
    s3: str,
    s3_server: str,
    faulty: Any,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    is_lost: bool,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAVE, s3])
    lock, seen = threading.Lock(), []

    def kill(line: str, client: Any) -> bool:
        with lock:
            seen.append(line)
            if len(seen) == number + 1:
                process.kill()
                process.wait()
            # Nothing is sent after it.
            return len(seen) <= number + (not is_lost)

    faulty.fault = kill
    assert process.wait() == -signal.SIGKILL
    faulty.settle()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    storage = bucket(s3)
    for uuid in storage.list():
        assert storage.verify(uuid).resources.keys() >= {"model", "optimizer.json"}
    whole = storage.list()
    assert whole == (["two"] if number + (not is_lost) >= NUM_REQUESTS - 1 else [])
    begun = any(each.key == ".open/two" for each in storage.objects(""))
    assert storage.sweep(older_than_s=0) == (["two"] if begun and not whole else [])
    assert {each.key.partition("/")[0] for each in storage.objects("")} == set(whole)


def endless(megabyte: memoryview, seen: list[int]) -> Iterator[memoryview]:
    for number in range(1000):
        seen.append(number)
        time.sleep(0.01)
        yield megabyte


def test_a_large_file_that_cannot_be_stored_stops_the_other_one(s3: str, faulty: Any) -> None:
    storage = bucket(s3)
    faulty.answer("403 No", "AccessDenied", when="/model")
    seen: list[int] = []

    def store_both() -> None:
        with storage.store_shard("one", 2) as path:
            send = storage.file_sender(path)
            assert send is not None
            send("other", 1_000_000_000, endless(memoryview(bytes(1_000_000)), seen))
            send("model", len(LARGE), [memoryview(LARGE)])

    with pytest.raises(
        CheckpointWriteError, match="Rank 2 could not store 'model' .* before part 1 of 2: "
    ):
        store_both()
    assert len(seen) < 1000
    assert storage.objects("one/") == []


def test_no_file_is_on_its_way_after_a_block_that_fails(s3: str, faulty: Any) -> None:
    storage = bucket(s3)
    faulty.delay(0.2)

    def break_off(error: Exception) -> None:
        with storage.store_shard("one", 0) as path:
            send = storage.file_sender(path)
            assert send is not None
            send("model", len(LARGE), [memoryview(LARGE)])
            raise error

    for error in (RuntimeError("broken"), OSError(errno.ENOSPC, "broken")):
        with pytest.raises((type(error), CheckpointWriteError), match="broken|is removed"):
            break_off(error)
        faulty.settle()
        assert storage.objects("one/") == []


def test_large_files_are_sent_without_more_threads(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = bucket(s3)
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with storage.store_shard("one", 0) as path:
        send = storage.file_sender(path)
        assert send is not None
        for name in ("model", "optimizer"):
            send(name, len(LARGE), [memoryview(LARGE)])
    monkeypatch.setattr(threading.Thread, "start", start)
    storage.commit("one", {})
    assert storage.verify("one").resources == {"model": len(LARGE), "optimizer": len(LARGE)}


def test_no_more_than_two_large_files_are_sent_at_once(s3: str) -> None:
    storage = bucket(s3)
    running: list[int] = []
    most = 0

    def pieces() -> Iterator[memoryview]:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        for begin in range(0, len(LARGE), 1_000_000):
            time.sleep(0.01)
            yield memoryview(LARGE)[begin : begin + 1_000_000]
        running.pop()

    with storage.store_shard("one", 0) as path:
        send = storage.file_sender(path)
        assert send is not None
        for number in range(4):
            send(f"file_{number}", len(LARGE), pieces())
    storage.commit("one", {})
    assert storage.verify("one").resources == {f"file_{n}": len(LARGE) for n in range(4)}
    assert most == 2
