"""InvalidHP of one rank of several ends the run for all, and is no failure."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core import RunState, list_runs

PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from paceline import InvalidHP, core, pytorch

def refuse(rank, step):
    if rank == int(os.environ["REFUSING"]) and step == 3:
        raise InvalidHP("the product must be below 7")

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        refuse(self.context.distributed.rank, batch_idx)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(300, 1), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def evaluate_batch(self, batch, batch_idx):
        return {"loss": self.model(batch).mean()}

def trainer():
    with pytorch.init(hparams={"global_batch_size": 3}) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(100000))

def collective():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed) as context:
        for step in range(100000):
            refuse(distributed.rank, step)
            dist.all_reduce(torch.ones(1))
            if distributed.rank == 0:
                context.train.report_training_metrics(step, {"x": 1.0})

def asleep():
    # The others never look at what has become of the one that refuses.
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed):
        refuse(distributed.rank, 3)
        time.sleep(1000)

if __name__ == "__main__":
    way, door = sys.argv[1:]
    if door == "launcher":
        globals()[way]()
    else:
        pytorch.launch(globals()[way], num_workers=3, max_restarts=2)
    print("done")
"""


# Each door and each way, at rank 0 and at rank 2.
QUICK = {
    ("launcher", "trainer", 2),
    ("launcher", "asleep", 2),
    ("function", "collective", 2),
    ("function", "asleep", 0),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("door", "way", "rank"),
    [
        pytest.param(*(cell := (door, way, rank)), marks=[] if cell in QUICK else pytest.mark.slow)
        for door in ("launcher", "function")
        for way in ("trainer", "collective", "asleep")
        for rank in (0, 2)
    ],
)
def test_invalid_hp_of_any_rank_decides_for_all(
    tmp_path: Path, clean_environment: dict[str, str], door: str, way: str, rank: int
) -> None:
    start = [sys.executable]
    if door == "launcher":
        start += ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=3"]
        start += ["--max-restarts=2"]
    (tmp_path / "refuse.py").write_text(PROGRAM)
    result = subprocess.run(
        [*start, "refuse.py", way, door],
        cwd=tmp_path,
        env=clean_environment | {"REFUSING": str(rank)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert ("done" in result.stdout) == (door == "function")
    assert f"Rank {rank} refused the hyperparameters (InvalidHP" in result.stderr
    assert "the product must be below 7" in result.stderr
    assert "Starting the workers again" not in result.stderr
    # Every rank's own words, of a connection that broke for one, come to nobody as the cause.
    assert "to fail" not in result.stderr
    (run,) = list_runs(tmp_path / "paceline_runs")
    assert run.state is RunState.INVALID_HP
    assert run.num_attempts == 1
