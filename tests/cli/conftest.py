"""A master of its own, and the command line as a user starts it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

TRAIN = """
import sys
import time

import paceline

with paceline.core.init() as context:
    info = paceline.get_cluster_info()
    lr = info.trial.hparams.get("lr", 1.0)
    first = 1
    if context.latest_checkpoint:
        metadata = context.checkpoint.get_metadata(context.latest_checkpoint)
        first = metadata["steps_completed"] + 1
    for step in range(first, info.trial.config["data"].get("steps", 3) + 1):
        context.train.report_training_metrics(step, {"train_loss": lr})
        context.train.report_validation_metrics(step, {"loss": lr / step, "epochs": step})
        print(f"step {step}", flush=True)
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "state.txt").write_text(f"{step}")
            (path / "more.txt").write_text("more")
        while first == 1 and step == info.trial.config["data"].get("held_at"):
            if context.preempt.should_preempt():
                break
            time.sleep(0.05)
        if context.preempt.should_preempt():
            break
        time.sleep(info.trial.config["data"].get("pause_s", 0))
"""

CONFIG: dict[str, Any] = {
    "name": "small",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
    "max_restarts": 0,
}

Result = subprocess.CompletedProcess[str]
Paceline = Callable[..., Result]


def clean_environment(home: Path) -> dict[str, str]:
    """Return an environment without Paceline's variables but the home."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return {**kept, "PACELINE_HOME": str(home), "COLUMNS": "80"}


def runner_in(home: Path, server: Any) -> Paceline:
    """Return a function that runs the command line to its end."""

    def run(*arguments: object, cwd: Path | None = None, code: int | None = 0) -> Result:
        command = ("-m", "paceline.cli", *map(str, arguments))
        result: Result = server.run_to_end(
            *command, directory=cwd or Path.cwd(), environment=clean_environment(home)
        )
        assert code is None or result.returncode == code, (result.stdout, result.stderr)
        return result

    return run


@pytest.fixture
def paceline(tmp_path: Path, command_server: Any) -> Paceline:
    """Run the command line with a home in which no master runs."""
    return runner_in(tmp_path / "home", command_server)


@pytest.fixture(scope="module")
def mastered(
    tmp_path_factory: pytest.TempPathFactory, command_server: Any, master_server: Any
) -> Iterator[Paceline]:
    """Run the command line with a home in which a master of two slots runs."""
    home = tmp_path_factory.mktemp("home")
    run = runner_in(home, command_server)
    master_server.start_master(home, "--port", 0, "--slots", 2)
    try:
        yield run
    finally:
        run("down", "--timeout", 1)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a directory with a training script and its config."""
    path = tmp_path / "code"
    path.mkdir()
    (path / "train.py").write_text(TRAIN)
    (path / "config.yaml").write_text(json.dumps(CONFIG))
    return path
