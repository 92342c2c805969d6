"""Checkpoints of which each rank stores its own part, where one rank cannot."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline.journal import RunDirectory

SCRIPT = """
import os, resource, threading, time
import torch
from torch import nn
from paceline import pytorch
from paceline.pytorch import _training_checkpoints as _continuous_saves
from paceline.pytorch import _training_checkpoints
from paceline.pytorch._loop_agreement import RankAgreement

FAULT, AT, RANK = os.environ["FAULT"], int(os.environ["AT"]), int(os.environ["RANK"])
if FAULT == "storage":
    _training_checkpoints._PARTS_S = 3.0
PERIOD = os.environ["PERIOD"]
if PERIOD == "continuous":
    RankAgreement.look_interval_s = _continuous_saves._RETRY_S = 0.02

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        # What each rank has of its own.
        self.register_buffer("seen", torch.full((250_000,), float(RANK)), persistent=False)
    def forward(self, x):
        return self.linear(x)

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(Model())
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(sgd)
    def train_batch(self, batch, epoch_idx, batch_idx):
        if FAULT == "slow" and RANK == AT or PERIOD == "continuous":
            time.sleep(0.05)
        end = 5
        if PERIOD == "continuous":
            end = batch_idx if trainer._training.checkpoints._saver.is_newest_lost else None
        if FAULT == "for a while" and RANK == AT and batch_idx in (3, end):
            while trainer._training.checkpoints._saver.is_storing:
                time.sleep(0.01)
            for thread in threading.enumerate():
                if thread.name == "paceline-commit":
                    thread.join()
            limit = 500_000 if batch_idx == 3 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        loss = self.model(batch[0]).pow(2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"loss": self.model(batch[0]).pow(2).mean()}
    def build_training_data_loader(self):
        numbers = torch.arange(240.0).reshape(60, 4) / 240
        return pytorch.DataLoader(torch.utils.data.TensorDataset(numbers), batch_size=2)
    build_validation_data_loader = build_training_data_loader

storage = "/".join([os.getcwd(), "other" if FAULT == "storage" and RANK == AT else "checkpoints"])
with pytorch.init(
    hparams={"global_batch_size": 6}, seed=1, checkpoint_storage=storage, name="parts"
) as context:
    trial = Trial(context)
    if FAULT == "size" and RANK == AT:
        # As on a disk that is full: the part is larger than what may be written.
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
    trainer = pytorch.Trainer(trial, context)
    result = trainer.fit(
        max_length=pytorch.Batch(int(os.environ["LENGTH"])),
        checkpoint_period=PERIOD if PERIOD == "continuous" else pytorch.Batch(int(PERIOD)),
    )
    print(f"RESULT {RANK} {len(result.checkpoints)}", flush=True)
"""


@pytest.fixture
def run(
    tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any
) -> Callable[..., tuple[int, str]]:
    """Return a function that trains with three ranks and returns the exit code and all output."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*, has_launcher: bool = False, **variables: object) -> tuple[int, str]:
        environment = {**clean_environment, "OMP_NUM_THREADS": "1"}
        environment |= {name: str(value) for name, value in variables.items()}
        if has_launcher:
            command = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=3", "train.py"]
            launched = subprocess.run(
                [sys.executable, *command],
                cwd=tmp_path, env=environment, text=True, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            return launched.returncode, launched.stdout
        script = tmp_path / "train.py"
        done = torch_ranks.run(3, script, directory=tmp_path, environment=environment)
        return done.returncode, done.stdout

    return run


def run_directory(tmp_path: Path) -> RunDirectory:
    (summary,) = core.list_runs(tmp_path / "paceline_runs")
    return RunDirectory(summary.path)


def stored_steps(tmp_path: Path) -> list[int]:
    checkpoints = core.read_checkpoints(run_directory(tmp_path))
    return [stored.steps_completed for stored in checkpoints]


@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "period", "rank"),
    [
        pytest.param(2, 100, 0, id="end-0"),
        pytest.param(10, 2, 2, id="background-2"),
        pytest.param(2, 100, 2, id="end-2", marks=pytest.mark.slow),
        pytest.param(10, 2, 0, id="background-0", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_cannot_store_its_part_is_named(
    run: Callable[..., tuple[int, str]], tmp_path: Path, rank: int, length: int, period: int
) -> None:
    # It is the launcher that says which rank it was.
    code, output = run(has_launcher=True, FAULT="size", AT=rank, LENGTH=length, PERIOD=period)
    assert code != 0
    assert "CheckpointWriteError" in output
    assert f"rank {rank}" in output.lower()
    assert "File too large" in output
    assert stored_steps(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_training_goes_on_after_a_checkpoint_that_a_rank_could_not_store(
    run: Callable[..., tuple[int, str]], tmp_path: Path, rank: int
) -> None:
    code, output = run(FAULT="for a while", AT=rank, LENGTH=10, PERIOD=2)
    assert code == 0, output
    assert stored_steps(tmp_path) == [2, 6, 8, 10]
    assert output.count("A checkpoint could not be stored. Training goes on") == 1 + (rank > 0)
    assert "File too large" in output
    # Nothing is left of the one that was lost.
    assert run_directory(tmp_path).begun_checkpoints() == {}
    assert len(list((tmp_path / "checkpoints").glob("*-*"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_continuous_checkpoints_go_on_after_one_that_a_rank_could_not_store(
    run: Callable[..., tuple[int, str]], tmp_path: Path, rank: int
) -> None:
    code, output = run(FAULT="for a while", AT=rank, LENGTH=20, PERIOD="continuous")
    assert code == 0, output
    assert "File too large" in output
    # All ranks begin the same ones, and the next one begins when the last is stored.
    numbers = {int(line) for line in re.findall(r"RESULT \d (\d+)", output)}
    assert len(numbers) == 1
    assert numbers.pop() >= 2
    # The two newest are kept, and nothing is left of those that were lost.
    assert stored_steps(tmp_path)[-1] == 20
    assert len(list((tmp_path / "checkpoints").glob("*-*"))) == len(stored_steps(tmp_path)) == 2
    assert run_directory(tmp_path).begun_checkpoints() == {}


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_with_another_storage_is_told_of(
    run: Callable[..., tuple[int, str]], tmp_path: Path, rank: int
) -> None:
    code, output = run(FAULT="storage", AT=rank, LENGTH=2, PERIOD=100)
    assert code != 0
    assert "all ranks must see the same storage" in output
    assert stored_steps(tmp_path) == []


def test_parts_of_a_slow_rank_are_waited_for(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, output = run(FAULT="slow", AT=2, LENGTH=7, PERIOD=2)
    assert code == 0, output
    assert stored_steps(tmp_path) == [2, 4, 6, 7]
    uuid = core.read_checkpoints(run_directory(tmp_path))[-1].uuid
    names = {path.name for path in (tmp_path / "checkpoints" / uuid).iterdir()}
    assert {f"rank_{rank}.safetensors" for rank in range(3)} <= names
    assert not run_directory(tmp_path).begun_checkpoints()
