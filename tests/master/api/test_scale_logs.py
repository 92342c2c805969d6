"""An experiment's log is merged from its trials', and no long log holds the server up."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest


@pytest.fixture
def running(master: Any) -> Any:
    """Return a master with one experiment whose two trials have running attempts 1 and 2."""
    master.create()
    master.schedule()
    for attempt_id in (1, 2):
        master.report(attempt_id, 0)
    return master


def texts(master: Any, **query: Any) -> list[str]:
    reply = master.http.get("/experiments/1/logs", params=query)
    assert reply.status_code == 200, reply.text
    return [line["text"] for line in reply.json()["items"]]


def test_an_experiments_log_holds_its_trials_lines_in_order_of_time(running: Any) -> None:
    start = time.time() + 10
    for attempt_id in (1, 2):
        running.attempt(attempt_id, "logs", entries=[
            [n, start + 2 * n + attempt_id, 0, "stdout", "ERROR" if n == 30 else "INFO",
             f"{attempt_id}/{n}"]
            for n in range(50)
        ])  # fmt: skip
    expected = [f"{attempt_id}/{n}" for n in range(50) for attempt_id in (1, 2)]
    assert texts(running) == expected
    assert texts(running, limit=7) == expected[:7]
    assert texts(running, tail=7) == expected[-7:]
    assert texts(running, tail=1000) == expected
    assert texts(running, level="ERROR") == ["1/30", "2/30"]
    assert texts(running, search="1/4", limit=2) == ["1/4", "1/40"]
    assert texts(running, search="/49", tail=1) == ["2/49"]


def test_lines_of_an_ended_trial_come_before_those_of_one_that_goes_on(running: Any) -> None:
    now = time.time()
    running.attempt(1, "logs", entries=[[0, now, 0, "stdout", "INFO", "ended"]])
    end = {"reason": "exited", "code": 0, "signal": None, "time": now}
    running.report(1, 0, ("validation", 1, {"loss": 0.5}))
    assert running.attempt(1, "end", **end).status_code == 204
    running.attempt(2, "logs", entries=[[0, now + 60, 0, "stdout", "INFO", "goes on"]])
    assert texts(running) == ["ended", "goes on"]
    assert texts(running, tail=1) == ["goes on"]
    assert texts(running, tail=2) == ["ended", "goes on"]


def test_the_first_look_at_a_long_log_keeps_no_other_request_waiting(
    running: Any, make_slow_log: Callable[[Path], Callable[[], None]]
) -> None:
    path = running.home.path / "logs" / "trial-1" / "attempt-1.jsonl"
    release = make_slow_log(path)
    replies: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: replies.append(running.attempt(1, "logs", entries=[])))
    asking.start()
    try:
        while not running.core.logs._files:
            asking.join(0.005)
        other = httpx2.get(f"{running.url}/master", headers=running.headers, timeout=60)
    finally:
        release()
        asking.join()
    assert other.status_code == 200
    assert replies[0].json() == {"last_sequence": -1}


def test_a_page_of_an_experiments_log_opens_only_the_trials_it_reaches(running: Any) -> None:
    """The first line's clock is behind, so it counts as old as its trial, the first to begin."""
    for attempt_id in (1, 2):
        running.attempt(attempt_id, "logs", entries=[[0, 0.0, 0, "stdout", "INFO", "x"]])
    running.core.logs._files.clear()
    assert texts(running, limit=1) == ["x"]
    assert set(running.core.logs._files) == {(1, 1)}
