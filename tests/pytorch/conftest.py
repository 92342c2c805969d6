"""A training script whose every part draws random numbers, run as a user runs it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, json, os, random, signal
import torch
from torch import nn
from paceline import pytorch

KILL_AT, SIGNAL, RANK, LOADERS, WINDOW = (
    int(os.environ.get(name, default))
    for name, default in (
        ("KILL_AT", -1), ("SIGNAL", 9), ("KILL_RANK", 0), ("LOADERS", 0), ("WINDOW", 1)
    )
)

class Data(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        noise = 0.1 * torch.randn(8) + 0.01 * random.random()
        return self.x[index] + noise, self.y[index]

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
        self.model = context.wrap_model(nn.Sequential(*layers))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = context.wrap_optimizer(sgd)
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9),
            pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == KILL_AT and self.context.distributed.rank == RANK:
            os.kill(os.getpid(), SIGNAL)
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        x, y = batch
        return {"validation_loss": nn.functional.cross_entropy(self.model(x), y)}
    def build_training_data_loader(self):
        return pytorch.DataLoader(Data(103), batch_size=4, shuffle=True, num_workers=LOADERS)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(Data(37), batch_size=8)

HPARAMS, RUN = {"global_batch_size": 12}, os.environ.get("RUN")
with pytorch.init(hparams=HPARAMS, seed=7, resume=RUN) as context:
    trial = Trial(context)
    result = pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Epoch(3), checkpoint_period=pytorch.Batch(5),
        validation_period=pytorch.Epoch(1), reporting_period=pytorch.Batch(4),
        aggregation_frequency=WINDOW,
    )
    if context.distributed.rank == 0:
        digest = hashlib.sha256()
        for value in trial.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        for group in ("training", "validation"):
            for row in result.history(group):
                digest.update(json.dumps([row.steps_completed, row.metrics]).encode())
        print("RESULT", result.stop_reason, "|", digest.hexdigest(), flush=True)
"""


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[str, str] | None]:
    """Return a function that runs the script; it gives why it stopped and a digest of everything.

    The digest covers the weights and all visible metric rows, bit for bit.
    """
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(num_workers: int, **variables: object) -> tuple[str, str] | None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        environment |= {name: str(value) for name, value in variables.items()}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "train.py"]
        if num_workers > 1:
            launcher = [sys.executable, "-m", "paceline.launch.torch_distributed"]
            command = [*launcher, "--nproc-per-node", str(num_workers), "--", "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
        )
        for line in done.stdout.splitlines():
            if "RESULT" in line:
                reason, _, digest = line.partition("RESULT ")[2].partition(" | ")
                return reason, digest
        assert "KILL_AT" in environment, done.stderr
        return None

    return run
