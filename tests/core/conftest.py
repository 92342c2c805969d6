"""Fixtures for tests of `paceline.core`."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.journal import (
    AnyRecord,
    RunDirectory,
    RunInfo,
    TrialInfo,
)


@pytest.fixture(autouse=True)
def work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every test in an empty directory, without the variables of a job."""
    for name in list(os.environ):
        if name.startswith(("PACELINE_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return tmp_path


@pytest.fixture
def records_of() -> Callable[..., list[AnyRecord]]:
    """Return a function that reads all records of a run directory, or those of one type."""

    def read(path: Path, kind: type[Any] | None = None, rank: int = 0) -> list[AnyRecord]:
        run = RunDirectory(path)
        return [
            record
            for key in run.journal_keys()
            if key.rank == rank
            for entry in run.reader(key)
            if isinstance(record := entry.decode(), kind or object)
        ]

    return read


@pytest.fixture
def cluster_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """Return a function that makes a run directory as a runner does, and enters it."""

    def make(*, config: dict[str, Any] | None = None, **changes: Any) -> RunDirectory:
        trial = TrialInfo(
            trial_id=7,
            experiment_id=3,
            trial_seed=11,
            hparams={"lr": 0.1},
            config=config or {"data": {"path": "/d"}},
        )
        values = {
            "run_id": "run7",
            "name": "trial-7",
            "created": 1.0,
            "attempt": 2,
            "trial": trial,
            "checkpoint_storage": str(tmp_path / "storage"),
            "cluster_id": "c1",
            "agent_id": "node1",
            "slot_ids": [0, 1],
            "container_addrs": ["10.0.0.1"],
        }
        run = RunDirectory.create(tmp_path / "cluster_run", RunInfo(**{**values, **changes}))
        monkeypatch.setenv("PACELINE_RUN_DIR", str(run.path))
        return run

    return make


class Rank:
    """A process that a server of ranks has forked; used like those of `subprocess`."""

    def __init__(self, server: "RankServer", **request: Any) -> None:
        self._server = server
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 # see `kill`
        self.returncode: int | None = None
        output, own_end = os.pipe()
        self.stdout = os.fdopen(output)
        self.pid: int = server.ask(request, [own_end, self._errors.fileno()])
        os.close(own_end)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        if self.returncode is None:
            self.returncode = self._server.wait(self.pid, 60)
        self.stdout.close()
        self._errors.close()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end and return its standard output and error."""
        self.returncode = self._server.wait(self.pid, timeout)
        output = self.stdout.read()
        self._errors.seek(0)
        return output, self._errors.read()


class RankServer:
    """A process that forks ranks, so that each has torch loaded from its beginning."""

    def __init__(self) -> None:
        self._channel, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("rank_server.py"), str(remote.fileno())],
                pass_fds=[remote.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def ask(self, request: dict[str, Any], files: list[int]) -> int:
        """Have a rank forked, and return its process id."""
        socket.send_fds(self._channel, [json.dumps(request).encode()], files)
        while "code" in (told := self._receive(60)):
            self._codes[told["pid"]] = told["code"]
        return told["pid"]

    def wait(self, pid: int, timeout_s: float) -> int:
        """Return the exit code of a rank, at the latest after a time."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._codes:
            told = self._receive(max(deadline - time.monotonic(), 0.001))
            self._codes[told["pid"]] = told["code"]
        return self._codes[pid]

    def close(self) -> None:
        """End the server, whose ranks have ended."""
        self._channel.close()
        self._process.wait(60)

    def _receive(self, timeout_s: float) -> dict[str, int]:
        self._channel.settimeout(timeout_s)
        told: dict[str, int] = json.loads(self._channel.recv(1000))
        return told


@pytest.fixture(scope="module")
def rank_server() -> Iterator[RankServer]:
    """Return a server of ranks."""
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def start_ranks(
    tmp_path: Path, clean_environment: dict[str, str], free_port: int, rank_server: RankServer
) -> Callable[..., list[Rank]]:
    """Return a function that starts ranks of a script as a launcher does."""

    def start(
        code: str, *, size: int = 3, missing: tuple[int, ...] = (), **environment: str
    ) -> list[Rank]:
        script = tmp_path / "ranks.py"
        script.write_text(code)
        return [
            Rank(
                rank_server,
                script=str(script),
                directory=str(tmp_path),
                environment={
                    **clean_environment,
                    "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    **environment,
                },
            )
            for rank in range(size)
            if rank not in missing
        ]

    return start


@pytest.fixture
def finish_ranks() -> Callable[..., list[tuple[int, str, str]]]:
    """Return a function that waits for ranks: exit code, standard output and error of each."""

    def finish(processes: list[Rank], timeout_s: float = 90) -> list[tuple[int, str, str]]:
        results = []
        try:
            for process in processes:
                output, errors = process.communicate(timeout=timeout_s)
                results.append((process.returncode, output, errors))
        finally:
            for process in processes:
                process.kill()
        return results

    return finish
