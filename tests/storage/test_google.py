"""Checkpoints in a bucket of a stand-in for Google Cloud Storage, and troubles on the way to it."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from fault_lab.object_requests import FaultyServer

from paceline.storage import CheckpointError, CheckpointStorage, CheckpointWriteError, storage_from
from paceline.storage._s3_azure_gcs_storage import _warn_experimental

LARGE = os.urandom(20_000_000)


@pytest.fixture
def faulty_google(
    google: str, google_server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyServer]:
    """Return a server on the way to the stand-in; the URL of the `google` fixture uses it."""
    server = FaultyServer(google_server)
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    key = os.environ["GOOGLE_SERVICE_ACCOUNT_KEY"].replace(google_server, server.url)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", key)
    yield server
    server.close()


def store(storage: CheckpointStorage, uuid: str, content: bytes = b"weights") -> None:
    with storage.store_path(uuid) as path:
        (path / "model").write_bytes(content)
    storage.commit(uuid, {"steps_completed": 3})


def test_a_large_file_goes_in_parts_and_the_first_use_warns_once(
    google: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_experimental.cache_clear()
    storage = storage_from(google)
    with caplog.at_level(logging.WARNING):
        store(storage, "one", LARGE)
        storage_from(google).download("one", tmp_path)
    assert (tmp_path / "model").read_bytes() == LARGE
    assert (storage.url, storage.local_root, storage.is_remote) == (google, None, True)
    assert [each.message.partition(":")[0] for each in caplog.records] == ["gs"]


def test_what_cannot_be_sent_is_an_error_and_earlier_checkpoints_stay(
    google: str, faulty_google: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "1")
    storage = storage_from(google)
    store(storage, "one")
    faulty_google.answer("403 No", "AccessDenied", when="model")
    with pytest.raises(CheckpointWriteError, match="AccessDenied.* Hint: the account must be"):
        store(storage, "two", LARGE)
    assert faulty_google.num_faults
    faulty_google.pass_on()
    assert storage.list() == ["one"]
    storage.verify("one")
    store(storage, "two")


def test_two_writers_of_one_checkpoint_are_kept_apart(
    google: str, faulty_google: FaultyServer
) -> None:
    storage = storage_from(google)
    faulty_google.lose_answers()
    store(storage, "one")
    assert faulty_google.num_faults == 4
    with pytest.raises(FileExistsError, match="another process has committed one in 'gs://"):
        storage.commit("one", {})


def test_a_missing_bucket_and_missing_credentials_are_named(
    google: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="no such bucket .* Hint: make the bucket"):
        store(storage_from("gs://nothere/a"), "one")
    monkeypatch.setenv("GOOGLE_BASE_URL", "127.0.0.1:9")
    with pytest.raises(CheckpointError, match="GOOGLE_BASE_URL must begin with http"):
        storage_from(google).list()
    monkeypatch.setenv("GOOGLE_BASE_URL", "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "no key")
    with pytest.raises(CheckpointError, match="must be opened, but"):
        storage_from(google).list()
