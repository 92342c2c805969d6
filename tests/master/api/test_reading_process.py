"""The second process that answers reads while many wait."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from paceline._cluster.master.api import readers as _readers
from paceline._cluster.master.api import readers as _reading_process
from paceline._cluster.master.api.experiment_routes import read_experiment
from paceline._cluster.master.api.node_and_slot_routes import list_slots
from paceline._cluster.master.api.readers import READY, Readers
from paceline._cluster.master.api.requests_and_answers import records_parameter

MANY = _readers._MANY
# One for each function of a route that a second process may answer, and what it refuses.
PATHS = {
    "list_experiments": ["experiments", "experiments?brief=true&state=ACTIVE&state=PAUSED",
                         "experiments?search=serv&sort_by=name&order=asc&limit=1"],
    "list_experiment_columns": ["experiment-columns"],
    "list_query_completions": ["query-completions?query=lr", "query-completions?query=state:E"],
    "read_experiment": ["experiments/1", "experiments/77"],
    "read_config": ["experiments/1/config"],
    "read_hyperparameters": ["experiments/1/hyperparameters?metric=training/loss",
                             "experiments/1/hyperparameters?metric=loss"],
    "list_trials": ["experiments/1/trials?sort_by=hparam:lr&order=desc",
                    "experiments/1/trials?sort_by=nothing", "experiments/1/trials?state=ACTIVE"],
    "list_all_trials": ["trials", "trials?trial=1&trial=77&search=serv", "trials?where=wrong",
                        "trials?query=lr%20%3C%202", "trials?query=wrong%3A1"],
    "find_checkpoints": ["checkpoints?prefix=cccc"],
    "list_checkpoints": ["experiments/1/checkpoints?sort_by=metric"],
    "list_metric_names": ["experiments/1/metric-names", "experiments/1/metric-names?limit=1"],
    "read_trial": ["trials/1", "trials/77"],
    "read_trial_time": ["trials/1/time"],
    "list_environments": ["trials/1/environments"],
    "find_run": ["runs?link=paceline/none/runs/x", "runs?link=experiments/7"],
    "list_media": ["trials/1/media?name=none", "trials/1/media?name=none&cursor=wrong"],
    "list_media_names": ["trials/1/media-names", "trials/77/media-names"],
    "list_media_steps": ["trials/1/media-steps", "trials/1/media-steps?name=none&group=x"],
    "list_trial_files": ["trials/1/files", "trials/1/files?prefix=media%2F&limit=1"],
    "list_metrics": ["trials/1/metrics?group=training", "trials/1/metrics?cursor=wrong"],
    "list_trial_checkpoints": ["trials/1/checkpoints"],
    "read_checkpoint": ["checkpoints/c1", "checkpoints/none"],
}  # fmt: skip


class Second:
    """The second process of a served master."""

    def __init__(self, master: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master = master
        self.readers = master.app.state.readers
        self.process = self.readers._process
        self.asked: list[str] = []
        answer = self.process.answer

        async def noting(endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Any:
            self.asked.append(endpoint.__name__)
            return await answer(endpoint, arguments)

        self.process.answer = noting
        self._set = monkeypatch.setattr
        self._has_room_there = self.readers._has_room_there
        # Whatever takes long here does so as the machine is busy.
        self._set(_readers, "_SLOW_S", math.inf)
        self._set(_readers, "_PATIENCE_S", 1000.0)
        self.gets_all(gets=False)

    def start(self) -> psutil.Process:
        """Start it as many waiting reads do, and wait until it can answer."""
        loop = self.master.core.controls._loop
        loop.call_soon_threadsafe(self.process.start)
        wait_until(lambda: self.process._writer is not None)
        return psutil.Process(self.process._process.pid)

    def gets_all(self, *, gets: bool = True) -> None:
        """Let it get all reads that it can answer, or none."""
        self._set(_readers, "_MANY", 0 if gets else sys.maxsize)
        self._set(self.readers, "_has_room_there", self._has_room_there if gets else lambda: False)

    def gets_its_share(self) -> None:
        """Let it get what it does outside of tests."""
        self.gets_all()
        self._set(_readers, "_MANY", MANY)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def second(master: Any, monkeypatch: pytest.MonkeyPatch) -> Second:
    """Return the second process of a master, which is not started and gets nothing."""
    return Second(master, monkeypatch)


def fill(master: Any) -> None:
    master.create()
    master.create(name="other", hyperparameters={})
    master.schedule()
    master.report(1, 0, ("training", 1, {"loss": 0.5}), ("validation", 1, {"loss": 0.25}))
    checkpoint = {
        "type": "checkpoint", "time": 1.0, "uuid": "c1", "steps_completed": 1, "resources": {},
        "metadata": {}, "storage": "/nowhere", "seconds": 0.0, "blocked_seconds": 0.0, "size": 0,
    }  # fmt: skip
    batch = {"generation": 0, "rank": 0, "records": [[2, checkpoint]]}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    # The times of a trial that goes on would differ between two reads.
    assert master.http.post("/experiments/1/kill").status_code == 200
    for attempt in (1, 2):
        end = {"reason": "killed", "code": None, "signal": 9, "time": 1.0}
        assert master.attempt(attempt, "end", **end).status_code == 204


@pytest.mark.long
def test_it_answers_as_the_first_process(master: Any, second: Second) -> None:
    fill(master)
    movable = {
        route.endpoint.__name__
        for router in master.app.routes
        for route in getattr(getattr(router, "original_router", router), "routes", [])
        if records_parameter(getattr(route.endpoint, "__wrapped__", route.endpoint))
    }
    assert movable == PATHS.keys()
    second.start()
    for name, paths in PATHS.items():
        for path in paths:
            second.gets_all(gets=False)
            expected = master.http.get(f"/{path}")
            second.gets_all()
            found = master.http.get(f"/{path}")
            assert second.asked.pop() == name
            assert not second.asked
            assert (found.status_code, found.content) == (expected.status_code, expected.content)
            kinds = [one.headers["content-type"] for one in (found, expected)]
            assert kinds[0] == kinds[1]


@pytest.mark.long
def test_it_sees_each_commit_at_once(master: Any, second: Second) -> None:
    second.start()
    second.gets_all()
    for number in range(1, 31):
        assert master.create(name=f"e{number}") == number
        shown = master.http.get("/experiments").json()["items"]
        assert [one["name"] for one in shown] == [f"e{n}" for n in range(number, 0, -1)]
        assert master.http.patch(f"/experiments/{number}", json={"notes": "x"}).status_code == 200
        assert master.http.get(f"/experiments/{number}").json()["notes"] == "x"
    assert len(second.asked) == 60


@pytest.mark.long
def test_it_is_started_by_reads_that_wait_and_answers_them(master: Any, second: Second) -> None:
    second.gets_its_share()
    master.create()
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert go_on.wait(120)

    def get(path: str) -> int:
        url = f"{master.url}/{path}"
        return httpx2.get(url, headers=master.headers, timeout=120, verify=False).status_code

    found: list[str] = []

    def note(path: str) -> None:
        assert get(path) == 200
        found.append(path)

    paths = ["slots", *6 * ["experiments/1"], "queue"]
    waiting = [threading.Thread(target=note, args=[path]) for path in paths]
    loop = master.core.controls._loop
    held = asyncio.run_coroutine_threadsafe(second.readers.answer(hold, {}), loop)
    assert is_held.wait(60)
    try:
        for thread in waiting:
            thread.start()
        # Those that the first process alone can answer hold up no others.
        wait_until(lambda: len(found) == 6)
        assert set(found) == {"experiments/1"}
        assert get("experiments/1") == 200
    finally:
        go_on.set()
    for thread in waiting:
        thread.join(60)
    held.result(60)
    assert sorted(found[6:]) == ["queue", "slots"]


@pytest.mark.long
def test_the_first_process_answers_alone_what_nobody_waits_for(master: Any, second: Second) -> None:
    second.gets_its_share()
    master.create()
    second.start()
    for _ in range(5):
        assert master.http.get("/experiments/1").status_code == 200
    assert second.asked == []


@pytest.mark.long
@pytest.mark.parametrize("is_hung", [False, True])
def test_while_many_wait_the_first_process_answers_what_it_alone_can(
    is_hung: bool, master: Any, second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless others have waited for long, as for a second process that hangs."""
    if is_hung:
        monkeypatch.setattr(_readers, "_PATIENCE_S", 0.5)
    master.create()
    second.start().suspend()
    second.gets_its_share()
    readers, loop = second.readers, master.core.controls._loop
    found: list[str] = []
    num_in_line = 2

    async def ask() -> None:
        async def note(name: str, endpoint: Callable[..., Any], arguments: Any) -> None:
            await readers.answer(endpoint, arguments)
            found.append(name)

        experiment = {"experiment_id": 1, "records": master.core}
        asked = [
            asyncio.create_task(note("any", read_experiment, experiment))
            for _ in range(1 + _readers._THERE + num_in_line)
        ]
        await asyncio.sleep(0)
        await note("own", list_slots, {"master": master.core})
        # The thread was free when the first of the others came.
        if is_hung:
            while len(found) < len(["any", "own"]) + num_in_line:
                await asyncio.sleep(0.01)
        else:
            assert found == ["any", "own"]
        assert readers._num_there == _readers._THERE
        second.process._end()
        await asyncio.gather(*asked)

    asyncio.run_coroutine_threadsafe(ask(), loop).result(120)


def test_a_turn_that_is_given_just_before_it_ends_is_taken_in_the_first_process(
    master: Any, second: Second
) -> None:
    master.create()
    second.start()
    second.gets_all()
    readers, loop = second.readers, master.core.controls._loop

    async def ask() -> list[int]:
        asked = [
            asyncio.create_task(readers.answer(read_experiment, {"experiment_id": 1} | given))
            for given in [{"records": master.core}] * 3
        ]
        await asyncio.sleep(0)
        # Between the turn and whoever takes it.
        assert readers._num_there == 3
        second.process._end()
        return [found.status_code for found in await asyncio.gather(*asked)]

    assert asyncio.run_coroutine_threadsafe(ask(), loop).result(60) == [200] * 3


def test_who_asks_no_more_holds_up_nobody(master: Any, second: Second) -> None:
    second.gets_its_share()
    readers = second.readers
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> dict[str, Any]:
        is_held.set()
        go_on.wait(120)
        return {}

    async def ask_and_leave() -> None:
        asked = [asyncio.create_task(readers.answer(hold, {})) for _ in range(3)]
        await asyncio.to_thread(is_held.wait, 60)
        # One whose turn it is, and one in the line.
        for task in asked[:2]:
            task.cancel()
        await asyncio.wait(asked[:2])
        go_on.set()
        await asked[2]

    loop = master.core.controls._loop
    asyncio.run_coroutine_threadsafe(ask_and_leave(), loop).result(120)
    assert (readers._num_here, readers._num_there, len(readers._waiting)) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_what_it_does_not_answer_the_first_process_answers(
    fault: str, master: Any, second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.create()
    monkeypatch.setattr(_reading_process, "_LOOK_S", 0.1)
    process = second.start()
    process.suspend()
    second.gets_all()
    found: list[int] = []
    path = "/experiments/1"
    threads = [
        threading.Thread(target=lambda: found.append(master.http.get(path).status_code))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(second.asked) == 3)
    if fault == "killed":
        process.kill()
    else:
        monkeypatch.setattr(_reading_process, "_LATE_S", 0.0)
    for thread in threads:
        thread.join(60)
    assert found == [200] * 3
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    # Another one is not started at once.
    assert master.http.get(path).status_code == 200
    assert second.process._process is None
    assert len(second.asked) == 3
    second.process._not_before = 0.0
    monkeypatch.setattr(_reading_process, "_LATE_S", 60.0)
    second.start()
    assert master.http.get(path).status_code == 200
    assert len(second.asked) == 4


@pytest.mark.long
def test_an_answer_that_cannot_be_read_ends_it_and_nobody_waits_for_it(
    master: Any, second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.create()
    second.start()
    second.gets_all()

    def fail(_content: bytes) -> None:
        raise AttributeError("no such class")

    monkeypatch.setattr(_reading_process.pickle, "loads", fail)
    assert master.http.get("/experiments/1").status_code == 200
    wait_until(lambda: second.process._process is None)
    assert second.process._not_before > time.monotonic()


@pytest.mark.long
def test_it_ends_once_nobody_asks(
    master: Any, second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reading_process, "_LOOK_S", 0.1)
    process = second.start()
    monkeypatch.setattr(_reading_process, "_IDLE_S", 0.0)
    wait_until(lambda: second.process._process is None)
    assert not process.is_running()
    monkeypatch.setattr(_reading_process, "_IDLE_S", 60.0)
    second.start()


def test_it_ends_with_the_master(
    make_master: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = make_master(name="another")
    second = Second(master, monkeypatch)
    process = second.start()
    master.server._stop()
    wait_until(lambda: not process.is_running())


@pytest.fixture
def start_program(master: Any) -> Callable[..., tuple[socket.socket, subprocess.Popen[bytes]]]:
    """Return a function that starts the program as the master does, in some directory."""

    def start(
        sources: str, directory: Path | None = None
    ) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _reading_process._PROGRAM, os.pathsep.join(sys.path)),
                    *(str(theirs.fileno()), str(master.core.database.path), sources),
                ],
                pass_fds=[theirs.fileno()],
                cwd=directory,
            )
        return ours, process

    return start


@pytest.mark.long
def test_another_paceline_than_that_of_the_master_answers_nothing(
    start_program: Callable[..., tuple[socket.socket, subprocess.Popen[bytes]]],
) -> None:
    ours, process = start_program("of before")
    with ours:
        assert ours.recv(1) == b""
    assert process.wait(60) == 1


def test_it_ends_when_its_socket_does(
    start_program: Callable[..., tuple[socket.socket, subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    # Not the module of this name, although the master may have been started here.
    (tmp_path / "socket.py").write_text("raise SystemExit(3)")
    ours, process = start_program(_reading_process.source_state(), tmp_path)
    with ours:
        assert ours.recv(1) == READY
        # Ctrl-C of the terminal is the master's affair.
        os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 0


def test_it_makes_no_database_where_one_was_deleted(
    second: Second, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second.process._database_path = missing = tmp_path / "missing.sqlite"
    loop = second.master.core.controls._loop
    loop.call_soon_threadsafe(second.process.start)
    wait_until(lambda: "does not answer and is ended" in caplog.text)
    assert not missing.exists()


def test_one_core_has_no_second_process(master: Any, tmp_path: Path) -> None:
    readers = Readers(tmp_path / "x", num_cores=1)
    assert readers._process is None
    readers.close()
