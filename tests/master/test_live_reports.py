"""Scripts without a master that report to one while they run: real processes, a real server."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.metric_rows import read_rows
from paceline.core import read_metrics
from paceline.core._heartbeats_and_live_reports import master_to_report_to
from paceline.journal import RunDirectory

# Reports step by step as the file `go` says, and ends after the last step.
SCRIPT = """
import pathlib, sys, time
import paceline.core

with paceline.core.init({arguments}) as context:
    for step in range(1, int(sys.argv[1]) + 1):
        while step > int(pathlib.Path("go").read_text() or 0):
            time.sleep(0.01)
        context.train.report_validation_metrics(step, {{"loss": 1.0 / step}})
    with context.checkpoint.store_path({{"steps_completed": step}}) as (path, _):
        (path / "state.txt").write_text("1")
    if "fail" in sys.argv:
        raise ValueError("odd data")
"""

# Three ranks report step by step, until one ends in a way of its own.
SCRIPT_OF_RANKS = """
import os, pathlib, signal, sys, time
from paceline import core

struck, way = int(sys.argv[1]), sys.argv[2]
with core.init(name="far", master={url!r}) as context:
    rank = context.distributed.rank
    for step in range(1, 4):
        while step > int(pathlib.Path("go").read_text() or 0):
            time.sleep(0.01)
        context.train.report_training_metrics(step, {{"loss": float(rank)}})
        context.distributed.allgather(None)
    pathlib.Path(f"past-{{rank}}").touch()
    if rank == struck:
        if way == "kill":
            # Its end takes the store along, in which others may still look for an answer.
            while len(list(pathlib.Path().glob("past-*"))) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("odd data") if way == "error" else core.InvalidHP("too wide")
    if way == "kill":
        while not pathlib.Path("late").exists():
            time.sleep(0.01)
    context.train.report_training_metrics(4, {{"loss": float(rank)}})
    context.distributed.allgather(None)
"""


class Scripts:
    """Starts scripts in one directory that report to a master."""

    def __init__(self, path: Path, url: str, token: str) -> None:
        self.path = path
        self.variables = {"PACELINE_HOME": str(path / "none"), "PACELINE_REPORT_PATIENCE_S": "60"}
        self.url = url
        self.variables["PACELINE_TOKEN"] = token
        self._processes: list[Any] = []
        self.go_to(0)

    def go_to(self, step: int) -> None:
        new = self.path / "go.new"
        new.write_text(str(step))
        new.rename(self.path / "go")

    def start(
        self, *arguments: str, options: str | None = None, **variables: str
    ) -> "subprocess.Popen[str]":
        text = f'name="far", master="{self.url}"' if options is None else options
        (self.path / "train.py").write_text(SCRIPT.format(arguments=text))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        process = subprocess.Popen(
            [sys.executable, "train.py", *arguments],
            cwd=self.path,
            env=kept | self.variables | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def start_ranks(self, server: Any, port: int, *arguments: str) -> list[Any]:
        """Start three ranks, forked from a process that has torch loaded."""
        (self.path / "ranks.py").write_text(SCRIPT_OF_RANKS.format(url=self.url))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        sizes = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        environment = kept | self.variables | place | sizes
        started = [
            server.start(
                "ranks.py",
                *arguments,
                directory=self.path,
                environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(3)
        ]
        self._processes += started
        return started

    @property
    def run(self) -> RunDirectory:
        """The only run."""
        [path] = (self.path / "paceline_runs").iterdir()
        return RunDirectory(path)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            # A pipe that was read to its end is closed.
            with suppress(ValueError):
                process.communicate(timeout=60)


class Gate:
    """A port that leads to another one while it is open."""

    def __init__(self, target: int, port: int) -> None:
        self._target = target
        self.port = port
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections, and break those that are there."""
        with self._lock:
            for one in [self._listener, *self._sockets]:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                with self._lock:
                    if listener.fileno() == -1:
                        near.close()
                        return
                    far = socket.create_connection(("127.0.0.1", self._target))
                    self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def scripts(master: Any, tmp_path: Path) -> Iterator[Scripts]:
    """Return what starts scripts, with a token that allows reporting and nothing else."""
    body = {"name": "far", "scope": "report"}
    token = master.http.post("/tokens", json=body).json()["secret"]
    path = tmp_path / "scripts"
    path.mkdir()
    found = Scripts(path, f"http://127.0.0.1:{master.port}", token)
    yield found
    found.close()


def await_value(read: Callable[[], Any], wanted: Any) -> None:
    deadline = time.monotonic() + 120
    while (found := read()) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def experiments(master: Any) -> list[Any]:
    found: list[Any] = master.http.get("/experiments").json()["items"]
    return found


def states(master: Any) -> list[str]:
    return [one["state"] for one in experiments(master)]


def steps(master: Any) -> list[int]:
    with master.core.database.read() as connection:
        return [row.step for row in read_rows(connection, 1, "validation")]


def test_a_script_is_shown_live_with_its_checkpoint_and_its_end(
    master: Any, scripts: Scripts
) -> None:
    process = scripts.start("3")
    await_value(lambda: states(master), ["ACTIVE"])
    scripts.go_to(2)
    await_value(lambda: steps(master), [1, 2])
    scripts.go_to(3)
    _, told = process.communicate(timeout=120)
    # All has arrived when the script has ended.
    assert process.returncode == 0
    assert (states(master), steps(master)) == (["COMPLETED"], [1, 2, 3])
    [experiment] = experiments(master)
    assert (experiment["is_unmanaged"], experiment["name"]) == (True, "far")
    assert experiment["run_dir"] == str(scripts.run.path)
    assert f"paceline: The run far is shown at {scripts.url}/experiments/1\n" in told
    [checkpoint] = master.http.get("/trials/1/checkpoints").json()["items"]
    assert checkpoint["steps_completed"] == 3
    assert scripts.variables["PACELINE_TOKEN"] not in told


def test_the_end_of_a_script_that_is_killed_and_of_one_that_fails_is_told(
    master: Any, scripts: Scripts
) -> None:
    scripts.go_to(1)
    process = scripts.start("2")
    await_value(lambda: steps(master), [1])
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    await_value(lambda: states(master), ["ERROR"])
    scripts.go_to(2)
    process = scripts.start("2", "fail", PACELINE_RESUME=str(scripts.run.path))
    process.communicate(timeout=120)
    [experiment] = experiments(master)
    assert (experiment["state"], experiment["error"]) == ("ERROR", "ValueError: odd data")
    assert steps(master) == [1, 2]


@pytest.mark.parametrize("is_late", [False, True], ids=["while-it-runs", "after-its-end"])
def test_what_is_reported_while_no_master_answers_arrives_later(
    make_master: Any, tmp_path: Path, is_late: bool, free_port: int
) -> None:
    master = make_master()
    token = master.http.post("/tokens", json={"name": "far", "scope": "report"}).json()["secret"]
    path = tmp_path / "scripts"
    path.mkdir()
    gate = Gate(master.port, free_port)
    scripts = Scripts(path, f"http://127.0.0.1:{gate.port}", token)
    try:
        process = scripts.start("4")
        scripts.go_to(1)
        await_value(lambda: steps(master), [1])
        gate.close()
        if is_late:
            scripts.go_to(4)
            _, told = process.communicate(timeout=120)
            assert process.returncode == 0
            assert "none does" in told
            assert "not all of it was sent. It is sent in the background for up to 60 s." in told
            assert f"Hint: `paceline sync {scripts.run.path}`" in told
        else:
            scripts.go_to(3)
        gate.open()
        scripts.go_to(4)
        await_value(lambda: states(master), ["COMPLETED"])
        assert steps(master) == [1, 2, 3, 4]
    finally:
        scripts.close()
        gate.close()


def test_the_variable_has_a_script_report_that_names_no_master(
    master: Any, scripts: Scripts, tmp_path: Path
) -> None:
    scripts.go_to(1)
    file = tmp_path / "token"
    file.write_text(scripts.variables.pop("PACELINE_TOKEN"))
    process = scripts.start(
        "1", options='name="far"', PACELINE_REPORT_TO=scripts.url, PACELINE_TOKEN_FILE=str(file)
    )
    process.communicate(timeout=120)
    assert (states(master), steps(master)) == (["COMPLETED"], [1])


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("", "A token for .* is needed"),
        ("paceline_wrong", "refuses it: .*must be known to the master"),
    ],
)
def test_a_script_without_the_right_token_runs_and_says_so(
    master: Any, scripts: Scripts, token: str, told: str
) -> None:
    scripts.go_to(1)
    process = scripts.start("1", PACELINE_TOKEN=token, PACELINE_REPORT_PATIENCE_S="0")
    _, text = process.communicate(timeout=120)
    assert process.returncode == 0
    assert re.search(told, text), text
    assert f"not all of it was sent. Hint: `paceline sync {scripts.run.path}`" in text
    assert "background" not in text
    assert experiments(master) == []


def stored(master: Any) -> dict[int, int]:
    """Return the number of the last record of each rank that the master has."""
    marks = tables.journal_marks
    with master.core.database.read() as connection:
        rows = connection.execute(select(marks.c.rank, marks.c.sequence))
        return {row.rank: row.sequence for row in rows}


def written(run: RunDirectory) -> dict[int, int]:
    """Return the number of the last record of each rank in its journal."""
    return {key.rank: [*run.reader(key)][-1].sequence for key in run.journal_keys()}


def check_end_of_ranks(master: Any, run: RunDirectory, struck: int, way: str) -> None:
    """See how a run of three ranks is shown, of which one has ended in a way of its own."""
    error = {
        ("kill", 0): "The process ended without a word",
        ("kill", 2): "the process of rank 2 has ended without a word",
        ("error", 0): "ValueError: odd data",
        ("error", 2): "rank 2 failed: ValueError: odd data",
        ("invalid", 0): "refused its hyperparameters: InvalidHP: too wide",
        ("invalid", 2): "refused its hyperparameters: InvalidHP: too wide",
    }[way, struck]
    await_value(lambda: states(master), ["ERROR"])
    assert error in experiments(master)[0]["error"]
    for rank in range(3):
        group = "training" if rank == 0 else f"training_rank_{rank}"
        with master.core.database.read() as connection:
            found = [row.step for row in read_rows(connection, 1, group)]
        assert found == [row.steps_completed for row in read_metrics(run, group, rank=rank)]
        assert found[:3] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("struck", [0, 2])
@pytest.mark.parametrize("way", ["kill", "error", "invalid"])
def test_the_end_of_a_rank_arrives_from_all_ranks_after_the_master_was_away(
    make_master: Any, tmp_path: Path, struck: int, way: str, free_port: int, torch_ranks: Any
) -> None:
    master = make_master()
    token = master.http.post("/tokens", json={"name": "far", "scope": "report"}).json()["secret"]
    path = tmp_path / "scripts"
    path.mkdir()
    gate = Gate(master.port, free_port)
    scripts = Scripts(path, f"http://127.0.0.1:{gate.port}", token)
    try:
        ranks = scripts.start_ranks(torch_ranks, free_port + 1, str(struck), way)
        scripts.go_to(1)
        await_value(lambda: {rank for rank, number in stored(master).items() if number}, {0, 1, 2})
        gate.close()
        (path / "late").touch()
        scripts.go_to(3)
        for rank in ranks:
            rank.communicate(timeout=120)
        gate.open()
        await_value(lambda: stored(master), written(scripts.run))
        check_end_of_ranks(master, scripts.run, struck, way)
    finally:
        scripts.close()
        gate.close()


def test_what_other_ranks_report_after_the_first_was_killed_arrives(
    master: Any, scripts: Scripts, free_port: int, torch_ranks: Any
) -> None:
    ranks = scripts.start_ranks(torch_ranks, free_port, "0", "kill")
    scripts.go_to(3)
    ranks[0].communicate(timeout=120)
    # The others have more to report.
    assert scripts.run.is_alive()
    await_value(lambda: stored(master).get(0), written(scripts.run)[0])
    (scripts.path / "late").touch()
    for rank in ranks[1:]:
        rank.communicate(timeout=120)
    await_value(lambda: stored(master), written(scripts.run))
    check_end_of_ranks(master, scripts.run, 0, "kill")


@pytest.mark.parametrize("url", ["", "ftp://head", "http://head/x y", "head:8080/path"])
def test_an_address_that_can_be_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="`master` must be the URL of a master"):
        master_to_report_to(url)
