import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline._cluster.master.experiments import storage_calls as _storage_calls
from paceline._cluster.master.experiments.storage_calls import StorageCalls, StoragePendingError


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Yield what the storage that hangs waits for."""
    event = threading.Event()
    yield event
    event.set()
    while any(thread.name == "storage-call" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_a_storage_that_hangs_is_not_waited_for_and_keeps_no_other_waiting(
    answer: threading.Event,
) -> None:
    calls = StorageCalls()
    assert calls.ask("hangs", answer.wait, default=False) is False
    asked: list[int] = []
    assert calls.ask("hangs", lambda: asked.append(1), default=None) is None
    assert asked == []
    assert calls.ask("works", lambda: 3, default=0) == 3


def test_a_call_that_takes_long_is_made_once_and_its_result_is_had_later(
    answer: threading.Event,
) -> None:
    calls = StorageCalls()
    made: list[int] = []

    def call() -> str:
        made.append(1)
        answer.wait()
        return "mark"

    for _ in range(3):
        with pytest.raises(StoragePendingError):
            calls.poll("mark", "slow", call)
    answer.set()
    while True:
        try:
            assert calls.poll("mark", "slow", call) == "mark"
            break
        except StoragePendingError:
            time.sleep(0.01)
    assert made == [1]


def test_a_storage_that_does_not_answer_is_named(
    answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = StorageCalls()
    with pytest.raises(StoragePendingError):
        calls.poll("mark", "/mnt/away", answer.wait)
    assert calls.silent() == []
    monkeypatch.setattr(_storage_calls, "_SILENT_S", 0.0)
    with pytest.raises(TimeoutError) as caught:
        calls.poll("mark", "/mnt/away", answer.wait)
    assert caught.value.errno == errno.ETIMEDOUT
    [silent] = calls.silent()
    assert "'/mnt/away' has not answered for" in silent.text
    answer.set()
    while calls.silent():
        time.sleep(0.01)


def test_a_storage_that_stops_to_answer_in_a_long_call_is_named(
    hanging_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = StorageCalls()
    monkeypatch.setattr(_storage_calls, "_SILENT_S", 0.2)
    with calls.watched(str(hanging_disk)), calls.watched(str(tmp_path)):
        while not calls.silent():
            time.sleep(0.01)
        assert [one.storage for one in calls.silent()] == [str(hanging_disk)]


def test_the_error_of_a_call_is_its_callers(answer: threading.Event) -> None:
    def fail() -> int:
        raise TimeoutError(errno.ETIMEDOUT, "of the disk")

    calls = StorageCalls()
    with pytest.raises(TimeoutError, match="of the disk"):
        calls.ask("broken", fail, default=0)
    with pytest.raises(TimeoutError, match="of the disk"):
        calls.poll("mark", "broken", fail)


def test_only_so_many_calls_hang_at_a_time(
    answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_storage_calls, "_MAX_THREADS", 2)
    calls = StorageCalls()
    for number in range(2):
        with pytest.raises(StoragePendingError):
            calls.poll("mark", f"storage {number}", answer.wait)
    with pytest.raises(TimeoutError, match="does not answer"):
        calls.poll("mark", "one more", answer.wait)
    assert calls.ask("one more", lambda: 1, default=0) == 0
