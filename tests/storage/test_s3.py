"""Checkpoints in a bucket: with a real server, and with troubles on the way to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.storage import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorage,
    CheckpointWriteError,
    storage_from,
)

LARGE = os.urandom(20_000_000)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests fail soon."""
    monkeypatch.setattr("paceline.storage._s3._REQUEST", timedelta(seconds=1))
    monkeypatch.setattr("paceline.storage._s3._RETRY", timedelta(seconds=2))


def store(storage: CheckpointStorage, uuid: str, content: bytes = b"weights") -> None:
    with storage.store_path(uuid, rank=0) as path:
        (path / "model").write_bytes(content)
    storage.commit(uuid, {"steps_completed": 3})


def test_a_large_file_goes_in_parts_and_comes_back(s3: str, tmp_path: Path) -> None:
    storage = storage_from(s3)
    store(storage, "one", LARGE)
    storage.download("one", tmp_path)
    assert (tmp_path / "model").read_bytes() == LARGE
    assert storage.url == s3
    assert storage.local_root is None


def test_storages_of_one_bucket_do_not_see_each_other(s3: str) -> None:
    first, second = storage_from(f"{s3}/a"), storage_from(f"{s3}/ab")
    store(first, "one")
    assert second.list() == []
    assert second.sweep(older_than_s=0) == []
    assert first.list() == ["one"]
    # A storage above others holds none of theirs.
    assert "one" not in storage_from(s3).list()


@pytest.mark.parametrize(
    ("status", "code"), [("500 Oops", "InternalError"), ("503 Busy", "SlowDown")]
)
def test_a_server_that_fails_some_times_is_asked_again(
    s3: str, faulty: Any, status: str, code: str
) -> None:
    storage = storage_from(s3)
    faulty.answer(status, code, when="PUT", times=3)
    store(storage, "one", LARGE)
    assert faulty.num_faults == 3
    storage.verify("one")


ERRORS: list[tuple[Callable[[Any], None], str]] = [
    (lambda server: server.answer("500 Oops", "InternalError", when="/model"), "InternalError"),
    (lambda server: server.answer("403 No", "ExpiredToken", when="/model"), "ExpiredToken"),
    (lambda server: server.answer("404 No", "NoSuchBucket", when="/model"), "no such bucket"),
    (lambda server: server.hang(), "retry_timeout"),
    (lambda server: server.cut(), "HTTP error"),
]


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("size", [7, len(LARGE)])
@pytest.mark.parametrize(("fault", "reason"), ERRORS)
def test_what_cannot_be_sent_is_an_error_that_names_it_and_earlier_checkpoints_stay(
    s3: str, faulty: Any, fault: Callable[[Any], None], reason: str, size: int
) -> None:
    storage = storage_from(s3)
    store(storage, "one")
    fault(faulty)
    began = time.monotonic()
    with pytest.raises(CheckpointWriteError) as told:
        store(storage, "two", LARGE[:size])
    assert time.monotonic() - began < 60
    assert faulty.num_faults
    assert "Rank 0 could not store 'model' of checkpoint two" in str(told.value)
    assert f"In {s3}, 'two/model' ({size} bytes) must be stored, but" in str(told.value)
    assert reason in str(told.value)
    faulty.fault = lambda _line, _client: True
    assert storage.list() == ["one"]
    storage.verify("one")
    # The name is free again.
    store(storage, "two")


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(("fault", "reason"), ERRORS[:3])
def test_what_cannot_be_read_is_no_missing_checkpoint(
    s3: str, faulty: Any, fault: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    storage = storage_from(s3)
    store(storage, "one")
    fault(faulty)
    at_model = faulty.fault
    faulty.fault = lambda line, client: at_model("/model", client)
    for use in (
        lambda: storage.manifest("one"),
        lambda: storage.download("one", tmp_path),
        lambda: storage.list(),
        lambda: storage.sweep(older_than_s=0),
        lambda: storage.exists("one"),
    ):
        with pytest.raises(CheckpointError, match=reason) as told:
            use()
        assert not isinstance(told.value, CheckpointNotFoundError)


def test_without_credentials_or_with_wrong_ones_it_is_told(
    s3: str, monkeypatch: pytest.MonkeyPatch, short_limits: None
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"In s3://.* must be"):
        storage_from(s3).list()


WRITER = """
import sys, time
from paceline.storage import storage_from

storage = storage_from(sys.argv[1])
for number in range(1000):
    with storage.store_path(f"n{number}") as path:
        for name in "abcd":
            (path / name).write_bytes(name.encode() * 6_000_000)
    storage.commit(f"n{number}", {})
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_no_checkpoint_that_is_not_whole(s3: str) -> None:
    storage = storage_from(s3)
    for delay_s in (0.02, 0.1, 0.25):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, s3], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = storage.list()
        assert "n0" in found
        for uuid in found:
            storage.verify(uuid)
        left = storage.sweep(older_than_s=0)
        assert not set(left) & set(found)
        assert storage.list() == found
        for uuid in found:
            storage.delete(uuid)


def test_a_package_that_is_missing_is_named(run_python: Any) -> None:
    code = """
import sys
sys.modules["obstore"] = None
from paceline.storage import storage_from
storage_from("s3://bucket")
"""
    done = run_python(code)
    assert "Hint: pip install 'paceline[s3]'." in done.stderr
