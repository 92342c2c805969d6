"""Tests that a GPU gives their worth; without one they run on the CPU as far as they can.

They stand alone, as `benchmarks/gpu.sh` runs them where little but torch and pytest is installed.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer does it else, and frames of that time are kept
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch


class Classifier(pytorch.PyTorchTrial):
    """A small classifier; subclasses change its step.

    Args:
        context: The context.
        width: The features of its hidden layer.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, width: int = 256) -> None:
        self.context = context
        layers = nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2)
        self.model = context.wrap_model(nn.Sequential(*layers))
        # A fused optimizer skips a step in fp16 without the host's knowledge.
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.optimizer = context.wrap_optimizer(adam)

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"loss": self.loss_of(batch)}

    def build_training_data_loader(self) -> Any:
        x = torch.randn(6400, 32, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, (x.sum(1) > 0).long())
        return DataLoader(data, batch_size=64, pin_memory=self.context.device.type == "cuda")

    build_validation_data_loader = build_training_data_loader


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return a GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def trial_class() -> type[Classifier]:
    """Return the trial that the tests vary."""
    return Classifier


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty directory, and leave the process as it was."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGCHLD)
    num_threads = torch.get_num_threads()
    # Steps this small are no work for several threads.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    signal.signal(signal.SIGCHLD, handler)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_search_for_cycles() -> Iterator[None]:
    """Have Python free what nobody refers to, and nothing else."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fit() -> Callable[..., Any]:
    """Return a function that trains a trial of a class for some batches."""

    def run(
        make: Callable[[Any], Any], num_batches: int, *, precision: str = "fp32", **options: Any
    ) -> Any:
        with pytorch.init(
            hparams={"global_batch_size": 64}, seed=1, precision=precision
        ) as context:
            return pytorch.Trainer(make(context), context).fit(
                max_length=pytorch.Batch(num_batches), **options
            )

    return run


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs code in a fresh process and returns what it prints."""

    def run(code: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(code)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        command = [sys.executable, str(script)]
        return subprocess.run(
            command, cwd=tmp_path, env=kept, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    return run
