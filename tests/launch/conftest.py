"""Launchers run as processes of their own, in an empty directory."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_JOB_VARIABLES = ("PACELINE_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a launcher in the test's directory; what is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_JOB_VARIABLES)}
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.launch.torch_distributed", *arguments],
            cwd=tmp_path,
            env=clean | {"OMP_NUM_THREADS": "1"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def launcher_server(fork_server_class: Any) -> Iterator[Any]:
    """Return a server of launchers, so that each has loaded what it needs."""
    server = fork_server_class(
        *(
            "paceline.launch._launcher_arguments",
            "paceline._training.workers.launch_nodes",
            "paceline._training.workers.run",
            "paceline._training.workers.process_pools",
        )
    )
    yield server
    server.close()


@pytest.fixture
def launch(tmp_path: Path, launcher_server: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a launcher to its end."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_JOB_VARIABLES)}
        done: subprocess.CompletedProcess[str] = launcher_server.run_to_end(
            "-m", "paceline.launch.torch_distributed", *arguments,
            directory=tmp_path, environment=clean | {"OMP_NUM_THREADS": "1"} | environment,
        )  # fmt: skip
        return done

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script and return its name."""

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
        return name

    return write
