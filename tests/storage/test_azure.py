"""Checkpoints in a container of Azurite, and troubles on the way to it."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from paceline.storage import CheckpointError, CheckpointStorage, CheckpointWriteError, storage_from

pytestmark = pytest.mark.slow

LARGE = os.urandom(20_000_000)


def store(storage: CheckpointStorage, uuid: str, content: bytes = b"weights") -> None:
    with storage.store_path(uuid) as path:
        (path / "model").write_bytes(content)
    storage.commit(uuid, {"steps_completed": 3})


def test_a_large_file_goes_in_parts_and_comes_back(azure: str, tmp_path: Any) -> None:
    storage = storage_from(azure)
    store(storage, "one", LARGE)
    storage.download("one", tmp_path)
    assert (tmp_path / "model").read_bytes() == LARGE
    assert (storage.url, storage.local_root, storage.is_remote) == (azure, None, True)


ERRORS: list[tuple[Callable[[Any], None], str]] = [
    (lambda server: server.answer("503 Busy", "ServerBusy", when="/model"), "ServerBusy"),
    (
        lambda server: server.answer("403 No", "AuthenticationFailed", when="/model"),
        "AuthenticationFailed.* Hint: AZURE_STORAGE_ACCOUNT_NAME and",
    ),
    (
        lambda server: server.answer("404 No", "ContainerNotFound", when="/model"),
        "there is no such container .* Hint: make the container",
    ),
    (
        lambda server: server.hang(),
        r"part.* of \d: no answer came in time: .* Hint: PACELINE_",
    ),
    (lambda server: server.cut(), "HTTP error"),
]


@pytest.mark.parametrize("size", [7, len(LARGE)])
@pytest.mark.parametrize(("fault", "reason"), ERRORS)
def test_what_cannot_be_sent_is_an_error_that_names_it_and_earlier_checkpoints_stay(
    azure: str,
    faulty_azure: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Any], None],
    reason: str,
    size: int,
) -> None:
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "1")
    storage = storage_from(azure)
    store(storage, "one")
    fault(faulty_azure)
    with pytest.raises(CheckpointWriteError) as told:
        store(storage, "two", LARGE[:size])
    assert faulty_azure.num_faults
    text = str(told.value)
    assert f"In {azure}, 'two/model' ({size} bytes) must be stored, but" in text
    # A busy machine may be late with another part.
    assert re.search(f"{reason}|no answer came in time", text), text
    faulty_azure.pass_on()
    assert storage.list() == ["one"]
    storage.verify("one")
    store(storage, "two")


def test_two_writers_of_one_checkpoint_are_kept_apart(azure: str, faulty_azure: Any) -> None:
    storage = storage_from(azure)
    faulty_azure.lose_answers()
    store(storage, "one")
    assert faulty_azure.num_faults == 4
    with pytest.raises(FileExistsError, match="another process has committed one in 'az://"):
        storage.commit("one", {})


def test_a_missing_container_and_a_wrong_key_are_told(
    azure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="no such container .* Hint: make the container"):
        store(storage_from("az://nothere/a"), "one")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(CheckpointError, match="Hint: AZURE_STORAGE_ACCOUNT_NAME"):
        storage_from(azure).list()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(CheckpointError, match="Hint: AZURE_STORAGE_ACCOUNT_NAME"):
        storage_from(azure).list()
