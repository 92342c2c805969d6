"""SIGTERM to the driver of a train function, and a master that wants room; with real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import train
from paceline._base.run_directory import Control
from paceline.core import PreemptedError, RunState, list_runs
from paceline.journal import RunDirectory

PROGRAM = """
import os, sys, time
from itertools import count
from pathlib import Path
from paceline import train

class Stored(train.TrainingCallback):
    def handle_checkpoint(self, checkpoint):
        Path(f"stored-{checkpoint.metadata['steps_completed']}").touch()

def fit(config):
    begun_at = (train.load_checkpoint() or {"step": 0})["step"]
    for step in count(begun_at):
        if step - begun_at == config["length"]:
            return begun_at
        time.sleep(0.02)
        train.report(step=step)
        if config["saves"] and step % 5 == 4:
            train.save_checkpoint(step=step + 1)
        if step == 12:
            Path(f"up-{train.world_rank()}").touch()
            while Path("hold").exists():
                time.sleep(0.01)

trainer = train.Trainer(2, run_dir="run")
trainer.start()
# Without a length it goes on until it is ended.
config = {"saves": sys.argv[1] == "saves", "length": int(sys.argv[2])}
print("from", trainer.run(fit, config, callbacks=[Stored()])[0], flush=True)
trainer.shutdown()
"""


@pytest.fixture
def start(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the program, for so many steps or without an end.

    Without an end it is held after thirteen steps, and waited for. Its driver has taken both
    checkpoints by then that it saves in them.
    """
    started: list[subprocess.Popen[str]] = []

    def start(saves: str, length: int = -1, **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "program.py").write_text(PROGRAM)
        if length < 0:
            (tmp_path / "hold").touch()
        process = subprocess.Popen(
            [sys.executable, "program.py", saves, str(length)],
            cwd=tmp_path,
            env=clean_environment | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        # One that the driver has not taken when a signal comes is the next one.
        marks = ["up-0", "up-1", *(["stored-10"] if saves == "saves" else [])]
        while length < 0 and not all((tmp_path / mark).exists() for mark in marks):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_with_its_next_checkpoint(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, signum: signal.Signals
) -> None:
    process = start("saves")
    os.kill(process.pid, signum)
    # It is seen before the next checkpoint.
    assert process.stderr is not None
    while "the run ends with its next checkpoint" not in process.stderr.readline():
        assert process.poll() is None
    (tmp_path / "hold").unlink()
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, ""), err
    (run,) = list_runs(tmp_path)
    assert run.state is RunState.PREEMPTED
    again = start("saves", 25, PACELINE_RESUME=str(tmp_path / "run"))
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    # Two checkpoints were there when the signal came.
    begun_at = int(out.split()[1])
    assert begun_at >= 15
    (run,) = list_runs(tmp_path)
    assert (run.state, run.last_step) == (RunState.COMPLETED, begun_at + 25)


@pytest.mark.long
def test_a_signal_ends_a_run_without_checkpoints_at_once(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("never")
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.long
def test_a_second_signal_ends_the_run_at_once(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("saves")
    os.kill(process.pid, signal.SIGTERM)
    assert process.stderr is not None
    while "the run ends with its next checkpoint" not in process.stderr.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.long
def test_a_master_that_wants_room_gets_it_with_the_next_checkpoint(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("saves")
    RunDirectory(tmp_path / "run").write_control(Control(should_preempt=True))
    (tmp_path / "hold").unlink()
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, ""), err
    (run,) = list_runs(tmp_path)
    assert run.state is RunState.PREEMPTED


def test_a_function_that_asks_is_told_also_without_an_earlier_checkpoint(tmp_path: Path) -> None:
    def fit(config: dict[str, Any]) -> int:
        step = (train.load_checkpoint() or {"step": 0})["step"]
        while config["waits"] and not train.should_preempt():
            step += 1
            # What the driver does after a signal.
            RunDirectory(tmp_path / "run").write_control(Control(should_preempt=True))
        assert train.should_preempt() is config["waits"]
        train.save_checkpoint(step=step)
        return int(step)

    assert train.should_preempt() is False
    trainer = train.Trainer(num_workers=0, run_dir=tmp_path / "run")
    with pytest.raises(PreemptedError):
        trainer.run(fit, {"waits": True})
    (run,) = list_runs(tmp_path)
    assert run.state is RunState.PREEMPTED
    again = train.Trainer(num_workers=0, run_dir=tmp_path / "run")
    assert again.run(fit, {"waits": False})[0] > 0
    (run,) = list_runs(tmp_path)
    assert run.state is RunState.COMPLETED
