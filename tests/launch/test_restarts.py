"""The launcher starts workers again, in other numbers too; with real signals."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core import RunState, list_runs
from paceline.testing._compare import compare_runs
from paceline.testing._run_facts import read_facts

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[..., str]

TRAIN = """
import os, signal, sys, time
import torch
from torch import nn
from paceline import pytorch


def allow(cores):
    # The launcher starts as many workers as there are cores for it.
    for task in os.listdir(f"/proc/{os.getppid()}/task"):
        os.sched_setaffinity(int(task), cores)


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 2)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        num_workers = self.context.distributed.size
        is_changing = "CORES" in os.environ
        if is_changing and (num_workers, batch_idx, self.context.distributed.rank) == (2, 7, 1):
            allow(CORES[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        if is_changing and num_workers == 1:
            time.sleep(0.1)
            if batch_idx == 12:
                allow(CORES)
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        x, y = batch
        return {"validation_loss": nn.functional.cross_entropy(self.model(x), y)}

    def build_training_data_loader(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(data, batch_size=size, shuffle=True)

    build_validation_data_loader = build_training_data_loader


CORES = [int(core) for core in os.environ.get("CORES", "").split()]
LENGTH = int(os.environ.get("LENGTH", "20"))
with pytorch.init(hparams={"global_batch_size": 8}, seed=3, name=os.environ["NAME"]) as context:
    sys.stdout.write(f"workers {context.distributed.size} of {context.num_shards}\\n")
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(LENGTH),
        checkpoint_period=pytorch.Batch(5),
        reporting_period=pytorch.Batch(1),
    )
    sys.stdout.write(f"weights {[p.tolist() for p in trial.model.parameters()]}\\n")
"""


def run_named(root: Path, name: str) -> Path:
    (run,) = (run for run in list_runs(root / "paceline_runs") if run.name == name)
    assert run.state is RunState.COMPLETED
    return run.path


def test_training_that_lost_a_worker_ends_in_the_same_bits(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    name = script(TRAIN)
    options = ["--nproc-per-node=2", "--max-restarts=2", name]
    assert launch(*options, NAME="straight").returncode == 0
    result = launch(*options, NAME="killed", PACELINE_FAULT="engine.batch:13,signal=KILL,rank=1")
    assert result.returncode == 0, result.stderr
    assert "Rank 1 was ended by SIGKILL, the first of 2 to fail" in result.stderr
    assert "starting the workers again, restart 1 of 2" in result.stderr
    assert "[rank=1] workers 2 of 2" in result.stdout
    straight, killed = (read_facts(run_named(tmp_path, n)) for n in ("straight", "killed"))
    assert compare_runs(straight, killed) == []
    assert [run.num_attempts for run in list_runs(tmp_path / "paceline_runs")] == [1, 2]


def test_a_program_that_fails_each_time_is_started_no_third_time(
    launch: Launch, script: Script
) -> None:
    name = script("import sys; sys.stdout.write('begun\\n'); raise ValueError('always')")
    result = launch("--max-restarts", "5", name)
    assert result.returncode == 1
    assert result.stdout.split() == ["begun"] * 2
    assert "(ValueError: always); starting the workers again, restart 1 of 5" in result.stderr
    assert "as the time before: the program itself fails, and is not started" in result.stderr


def test_restarts_come_to_an_end(launch: Launch, script: Script) -> None:
    name = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    result = launch("--max-restarts", "2", name)
    assert result.returncode == 128 + 9
    assert result.stderr.count("Rank 0 was ended by SIGKILL") == 3
    assert "and no restart is left of 2" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_change_in_number_and_train_on_the_same_samples(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("NOT TESTED: needs two cores")
    name = script(TRAIN.replace("nn.Dropout(0.2)", "nn.Identity()"))
    options = ["--nproc-per-node=1:2", "--max-restarts=1", name]
    straight = launch(*options, NAME="straight", LENGTH="100")
    changed = launch(*options, NAME="changed", LENGTH="100", CORES=" ".join(map(str, cores)))
    assert changed.returncode == 0, changed.stderr
    sizes = re.findall(r"workers (\d) of (\d)", changed.stdout)
    # Of two, one was lost; later two can run again.
    assert list(dict.fromkeys(sizes)) == [("2", "2"), ("1", "2")]
    assert sizes[-1] == ("2", "2")
    assert "More workers can run: starting again with more of them" in changed.stderr

    def weights(text: str) -> list[float]:
        # Workers that were stopped at a checkpoint have said theirs too.
        found = re.findall(r"weights (.*)", text)[-1]
        return [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", found)]

    assert weights(changed.stdout) == pytest.approx(weights(straight.stdout), rel=1e-3, abs=1e-5)
    assert [run.state for run in list_runs(tmp_path / "paceline_runs")] == [RunState.COMPLETED] * 2
