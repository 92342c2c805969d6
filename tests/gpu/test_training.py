"""On a GPU: steps do not wait for the device, and memory is given back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Trial(pytorch.PyTorchTrial):
    """A small classifier; between its first and last batch it may not wait for the device."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        layers = nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 2)
        self.model = context.wrap_model(nn.Sequential(*layers))
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.optimizer = context.wrap_optimizer(adam)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        torch.cuda.set_sync_debug_mode("error" if 1 < batch_idx < 98 else "default")
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

    def data(self) -> Any:
        x = torch.randn(6400, 32, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64, pin_memory=True)

    def build_training_data_loader(self) -> Any:
        return self.data()

    def build_validation_data_loader(self) -> Any:
        return self.data()


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_do_not_wait_for_the_device(precision: str) -> None:
    with pytorch.init(hparams={"global_batch_size": 64}, seed=1, precision=precision) as context:
        result = pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Batch(100), checkpoint_period=pytorch.Batch(100)
        )
    assert result.steps_completed == 100
    assert result.metrics["loss"] < 0.6


def test_memory_is_given_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytorch.init(hparams={"global_batch_size": 64}, seed=1) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(3))
    del context
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
