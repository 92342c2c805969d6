"""Faults in a function and in a program: what `call_in_workers` and the launcher make of them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

TRAIN = """
import os, pathlib, signal, sys, time
import torch
from torch import nn
from paceline import core, pytorch
from paceline.journal import RunDirectory


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        # Every trained batch leaves a trace that does not depend on the journal.
        rank = self.context.distributed.rank
        with open(os.environ["TRACE"], "a") as file:
            file.write(f"{rank}:{batch_idx}\\n")
        killed = pathlib.Path(os.environ["TRACE"] + ".killed")
        if (rank, batch_idx) == (1, 12) and not killed.exists():
            killed.touch()
            # A next attempt knows of both checkpoints once they are recorded.
            (run,) = pathlib.Path("paceline_runs").iterdir()
            while len(core.read_checkpoints(RunDirectory(run))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self):
        data = torch.ones(80, 1)
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(2, 1), batch_size=1)

    def evaluate_batch(self, batch, batch_idx):
        return {"loss": self.model(batch).mean()}


def main():
    os.chdir(os.environ["ELSEWHERE"])
    with pytorch.init(hparams={"global_batch_size": 4}, seed=1) as context:
        pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Batch(20), checkpoint_period=pytorch.Batch(5)
        )


if __name__ == "__main__":
"""


@pytest.mark.long
@pytest.mark.parametrize("door", ["function", "program"])
def test_a_restart_goes_on_from_the_last_checkpoint_after_a_change_of_directory(
    run_with_torch: RunPython, tmp_path: Path, clean_environment: dict[str, str], door: str
) -> None:
    elsewhere, trace = tmp_path / "elsewhere", tmp_path / "trace"
    elsewhere.mkdir()
    variables = {"ELSEWHERE": str(elsewhere), "TRACE": str(trace)}
    if door == "function":
        code = TRAIN + "    pytorch.launch(main, num_workers=2, max_restarts=2)\n"
        result = run_with_torch(code, **variables)
    else:
        (tmp_path / "train.py").write_text(TRAIN + "    main()\n")
        options = ["--nproc-per-node=2", "--max-restarts=2", "train.py"]
        result = subprocess.run(
            [sys.executable, "-m", "paceline.launch.torch_distributed", *options],
            cwd=tmp_path,
            env=clean_environment | variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    assert "Rank 1 was ended by SIGKILL" in result.stderr
    batches = [int(line.split(":")[1]) for line in trace.read_text().split() if line[0] == "1"]
    # It was killed in batch 12; the checkpoint before was that after ten batches.
    assert batches == [*range(13), *range(10, 20)]
    assert not (tmp_path / "paceline_runs").exists()


DIFFERENT_COLLECTIVES = """
import time, torch
import torch.distributed as dist
from paceline import pytorch


def main(what):
    with pytorch.init(hparams={}) as context:
        rank = context.distributed.rank
        if what == "different":
            dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(1))
            dist.all_gather_object([None] * 3, 1) if rank != 2 else dist.barrier()
        elif rank != 2:
            dist.barrier()
            dist.barrier()


if __name__ == "__main__":
"""


@pytest.mark.parametrize(
    ("door", "what", "text"),
    [
        # `test_fault_matrix.py` has it in every run.
        pytest.param("function", "different", "these must be the same", marks=pytest.mark.slow),
        ("program", "early", "rank 2 has returned without"),
        pytest.param("function", "early", "rank 2 has returned without", marks=pytest.mark.slow),
        pytest.param("program", "different", "these must be the same", marks=pytest.mark.slow),
    ],
)
def test_ranks_in_different_collectives_are_named(
    run_with_torch: RunPython,
    tmp_path: Path,
    clean_environment: dict[str, str],
    door: str,
    what: str,
    text: str,
) -> None:
    if door == "function":
        call = f"    pytorch.launch(main, num_workers=3, args=({what!r},))\n"
        result = run_with_torch(DIFFERENT_COLLECTIVES + call)
    else:
        (tmp_path / "train.py").write_text(DIFFERENT_COLLECTIVES + f"    main({what!r})\n")
        result = subprocess.run(
            [sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node=3",
             "train.py"],
            cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
    assert result.returncode != 0
    assert text in result.stderr, result.stderr
    # The stacks of the ranks that wait.
    assert "in main" in result.stderr


STORE_ON_ONE_RANK = """
import sys
import torch.distributed as dist
import torch
from paceline import core

dist.init_process_group("gloo")
with core.init() as context:
    for step in range(3):
        if step == 1 and context.distributed.rank == int(sys.argv[1]):
            context.distributed.gather(1)
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.long
@pytest.mark.parametrize("alone", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_in_the_store_is_named_beside_others_in_a_collective(
    tmp_path: Path, clean_environment: dict[str, str], alone: int
) -> None:
    (tmp_path / "train.py").write_text(STORE_ON_ONE_RANK)
    result = subprocess.run(
        [sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node=3",
         "train.py", str(alone)],
        cwd=tmp_path, env=clean_environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert f"ank {alone} waits in `distributed.gather` (train.py:11 in " in result.stderr
    assert "wait in `all_reduce` (train.py:12 in " in result.stderr
    assert "but these must be the same" in result.stderr
