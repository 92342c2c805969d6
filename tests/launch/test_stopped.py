"""Workers of the launcher that are stopped or hang; with real signals."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[..., str]

STOPS_ONCE = """
import os, pathlib, signal, sys, time
stopped, again = pathlib.Path("stopped"), pathlib.Path("again")
if os.environ["RANK"] == "1":
    if not stopped.exists():
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    again.touch()
while not again.exists():
    time.sleep(0.01)
sys.stdout.write("done\\n")
"""

HOLDS_THE_LOCK = """
import os, re, sys
if sys.argv[1] == "uses-paceline":
    from paceline import core
    context = core.init()
# The matching of expressions gives Python's lock to nobody.
re.match("(a+)+$", "a" * int(sys.argv[2]) + "b")
"""


def test_a_stopped_worker_counts_as_lost_and_all_start_again(
    launch: Launch, script: Script
) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=1", "--heartbeat-timeout-s=1", "--grace-s=1"]
    result = launch(*options, script(STOPS_ONCE))
    assert result.returncode == 0, result.stderr
    assert "Rank 1 is stopped (SIGSTOP): it gave no sign of life for 1" in result.stderr
    assert "Starting the workers again, restart 1 of 1" in result.stderr
    assert sorted(result.stdout.splitlines()) == ["[rank=0] done", "[rank=1] done"]


def test_what_a_shell_has_started_counts_as_the_worker(launch: Launch) -> None:
    command = ["sh", "-c", "sleep 600 & kill -STOP $!; wait"]
    result = launch("--heartbeat-timeout-s=1", *command)
    assert result.returncode == 128 + 9
    assert "Rank 0 is stopped (SIGSTOP): it gave no sign of life for 1" in result.stderr


@pytest.mark.slow  # `test_fault_matrix.py` has it in every run.
def test_a_worker_that_holds_pythons_lock_is_found_if_it_uses_paceline(
    launch: Launch, script: Script
) -> None:
    name = script(HOLDS_THE_LOCK)
    result = launch("--heartbeat-timeout-s=2", name, "uses-paceline", "60")
    assert result.returncode == 128 + 9
    assert "Rank 0 hangs: it gave no sign of life for 2" in result.stderr


@pytest.mark.slow
def test_a_script_without_paceline_may_hold_pythons_lock_for_long(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    # Some seconds on any machine.
    result = launch("--heartbeat-timeout-s=1", script(HOLDS_THE_LOCK), "plain", "27")
    assert result.returncode == 0, result.stderr


HANGS = """
import os, pathlib, sys, time
import torch
from torch import nn
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        if (self.context.distributed.rank, batch_idx) == (2, 3):
            pathlib.Path("hangs").touch()
            time.sleep(600)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(90, 1), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def evaluate_batch(self, batch, batch_idx):
        return {"loss": self.model(batch).mean()}


with pytorch.init(hparams={"global_batch_size": 3}) as context:
    pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(20))
"""


@pytest.mark.long
def test_a_rank_that_hangs_is_named_when_the_group_is_asked_to_end(
    start_launcher: Callable[..., "subprocess.Popen[str]"], script: Script, tmp_path: Path
) -> None:
    launcher = start_launcher("--nproc-per-node=3", "--grace-s=2", script(HANGS))
    while not (tmp_path / "hangs").exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.terminate()
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode != 0
    assert "Rank 2 was asked to end, but has done nothing for" in err
    assert "in train_batch" in err


@pytest.mark.slow  # `test_fault_matrix.py` has it in every run.
def test_a_rank_that_never_comes_to_a_collective_is_named_with_its_stack(
    launch: Launch, script: Script
) -> None:
    result = launch("--nproc-per-node=3", "--collective-timeout-s=2", script(HANGS))
    assert result.returncode != 0
    assert "rank 2 has not come there. Missing ranks: 2." in result.stderr
    assert "in train_batch" in result.stderr
