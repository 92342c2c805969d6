"""Real masters for whole-process tests: started, killed and started again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.runner import AttemptDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fault_lab.masters import MasterProcess


@pytest.fixture(scope="session")
def master_class() -> type[MasterProcess]:
    """Return the class, for fixtures that outlive a test."""
    return MasterProcess


@pytest.fixture
def make_master(tmp_path: Path) -> Iterator[Callable[..., MasterProcess]]:
    """Return a function that makes a master; all are stopped at the end."""
    made: list[MasterProcess] = []

    def make(num_slots: int = 1, name: str = "home", *options: str) -> MasterProcess:
        made.append(MasterProcess(tmp_path / name, num_slots, *options))
        return made[-1]

    yield make
    for master in made:
        master.close()


@pytest.fixture
def master(make_master: Callable[..., MasterProcess]) -> MasterProcess:
    """Return a running master with two slots."""
    return make_master(2).start()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Return a function that waits for a condition."""

    def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{condition} did not hold within {timeout_s} s"
            time.sleep(0.05)

    return wait


@pytest.fixture
def write_context(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a context directory of one script, `train.py`."""

    def write(script: str, name: str = "context") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "train.py").write_text(script)
        return directory

    return write


class NodeProcess:
    """`paceline runner` on a directory of its own, as a user starts it."""

    def __init__(self, master: Any, token: Path, directory: Path, *options: str) -> None:
        self.master = master
        self.token = token
        self.directory = directory
        self.options = options
        self.log_path = directory.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.directory.name

    def start(self) -> "NodeProcess":
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        environment |= {"PACELINE_TOKEN": "secret-of-the-user", "GATE": str(self.gate)}
        command = [sys.executable, "-m", "paceline.cli", "runner", "--name", self.name]
        command += ["--master", self.master.client().url, "--token-file", str(self.token)]
        command += ["--dir", str(self.directory), *self.options]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return self

    @property
    def gate(self) -> Path:
        return self.token.with_name("gate")

    def runner(self, attempt_id: int) -> psutil.Process:
        """Return the runner of an attempt that runs here."""
        pid = AttemptDirectory(self.directory / "attempts" / str(attempt_id)).runner_pid()
        assert pid, self.log_path.read_text()
        return psutil.Process(pid)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
                if any(word.startswith(str(self.directory)) for word in words):
                    process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def make_node(master: Any, tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Return a function that makes a node of the master; all are ended."""
    made: list[NodeProcess] = []
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(master.client().create_token("nodes", scope="runner").secret)

    def make(name: str, *options: str) -> NodeProcess:
        made.append(NodeProcess(master, token, tmp_path / name, *options))
        return made[-1]

    yield make
    for node in made:
        node.close()
