"""A program whose run is told to make room, and goes on later."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import core

PROGRAM = """
import importlib, sys
from pathlib import Path
from paceline import train

module = importlib.import_module(Path(sys.argv[1]).stem)

class Told(train.TrainingCallback):
    def handle_result(self, report):
        Path("up").touch()

if __name__ == "__main__":
    trainer = train.Trainer(2, run_dir="run")
    config = {"delay_s": float(sys.argv[2])}
    print("done", trainer.run(module.fit, config, callbacks=[Told()])[0])
"""


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Put back the variables that libraries set for their own processes."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def preempted_and_resumed(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Callable[[str], str]:
    """Return a function that runs `fit` of a file on two workers; it gets SIGTERM before it saves.

    What the run prints that goes on is returned; it sleeps no more.
    """

    def start(file: str, delay_s: float, **environment: str) -> "subprocess.Popen[str]":
        environment = clean_environment | {"OMP_NUM_THREADS": "1"} | environment
        path = f"{Path(file).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return subprocess.Popen(
            [sys.executable, "program.py", file, str(delay_s)],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(file: str) -> str:
        (tmp_path / "program.py").write_text(PROGRAM)
        with start(file, 0.5) as process:
            while not (tmp_path / "up").exists() and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            out: Any = process.communicate(timeout=200)[0]
        assert process.returncode == 0, out
        assert "done" not in out
        (summary,) = core.list_runs(tmp_path)
        assert summary.state is core.RunState.PREEMPTED, out
        assert len(core.read_checkpoints(core_run(tmp_path / "run"))) == 1
        with start(file, 0.0, PACELINE_RESUME=str(tmp_path / "run")) as process:
            out = process.communicate(timeout=200)[0]
        assert process.returncode == 0, out
        (summary,) = core.list_runs(tmp_path)
        assert summary.state is core.RunState.COMPLETED
        return str(out)

    return run


def core_run(path: Path) -> Any:
    from paceline.journal import RunDirectory

    return RunDirectory(path)
