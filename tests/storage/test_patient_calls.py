"""A store that is away for a while: requests are repeated for as long as is promised."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.storage import CheckpointError, CheckpointWriteError, storage_from
from paceline.storage._checkpoint_errors import failing_store_of
from paceline.storage._s3_azure_gcs_storage import PatientCalls

PART_S = 6.0


@pytest.fixture
def away(
    s3_server: str, faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], None]]:
    """Return what refuses all connections for some seconds."""
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", str(PART_S))
    timers = []

    def be_away(seconds: float) -> None:
        faulty.fault = lambda _line, _client: False
        timers.append(threading.Timer(seconds, faulty.pass_on))
        timers[-1].start()

    yield be_away
    for timer in timers:
        timer.cancel()


@pytest.mark.long
def test_a_checkpoint_is_stored_and_read_after_an_outage_shorter_than_promised(
    s3: str, away: Callable[[float], None]
) -> None:
    storage = storage_from(s3)
    told: list[str | None] = []
    storage.watch(told.append)
    away(PART_S * 1.2)
    with storage.store_shard("one", 0) as path:
        (path / "model").write_bytes(b"weights")
    away(PART_S * 1.2)
    storage.commit("one", {"steps_completed": 1})
    away(PART_S * 1.2)
    assert storage.verify("one").metadata == {"steps_completed": 1}
    # What was told: it is away and back, each time.
    assert [each is None for each in told] == [False, True] * 3


@pytest.mark.parametrize("is_read", [True, False])
def test_a_store_that_stays_away_is_named_by_the_error(
    s3: str, faulty: Any, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "0.5")
    storage = storage_from(s3)
    faulty.fault = lambda _line, _client: False

    def work() -> None:
        if is_read:
            storage.verify("one")
        with storage.store_shard("one", 2) as path:
            (path / "model").write_bytes(b"weights")

    with pytest.raises(CheckpointError if is_read else CheckpointWriteError) as raised:
        work()
    assert failing_store_of(raised.value) == s3
    faulty.answer("403 No", "AccessDenied")
    with pytest.raises(CheckpointError, match="AccessDenied") as raised:
        work()
    # More time does not help.
    assert failing_store_of(raised.value) is None


def test_pauses_grow_are_not_the_same_and_leave_the_users_random_numbers_alone(
    monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("paceline.storage._s3_azure_gcs_storage.time.sleep", sleep)
    monkeypatch.setattr("paceline.storage._s3_azure_gcs_storage.time.monotonic", lambda: now[0])
    random.seed(1)
    expected = random.Random(1).random()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="error sending request"):
            storage_from(s3).list()
    assert random.random() == expected
    half = next(i for i in range(len(pauses)) if sum(pauses[: i + 1]) >= 119.99) + 1
    first, second = pauses[:half], pauses[half:]
    # Tries are spread over all of the two minutes, and no two processes have the same ones.
    assert 119.9 < sum(first) <= 120.1
    assert max(first) <= 15
    assert len(first) < 40
    assert first != second


def test_a_listener_that_fails_stops_no_call() -> None:
    calls = PatientCalls("s3://b")

    def fail(reason: str | None) -> None:
        raise RuntimeError(reason)

    calls.on_trouble = fail
    calls.note_trouble(ValueError("away"))
    calls.note_answer()
    assert calls.call(lambda: 3, 1.0, 2.0) == 3
