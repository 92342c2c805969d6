"""What a training leaves in memory once nobody refers to it."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer does it else, and frames of that time are kept
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch


class KnowsTrial(pytorch.PyTorchCallback):
    def __init__(self, trial: pytorch.PyTorchTrial) -> None:
        self.trial = trial


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, fails: bool) -> None:
        self.context = context
        self.fails = fails
        self.model = context.wrap_model(nn.Linear(4, 1))
        adam = torch.optim.Adam(self.model.parameters())
        self.optimizer = context.wrap_optimizer(adam)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"knows": KnowsTrial(self)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if self.fails and batch_idx == 5:
            raise torch.OutOfMemoryError("no room")
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).mean()}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=2)

    build_validation_data_loader = build_training_data_loader


@pytest.fixture(autouse=True)
def no_search_for_cycles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_is_gone_with_the_last_reference_to_it(fails: bool) -> None:
    """Python looks for cycles when it runs short of memory, but not when a device does."""
    weights: list[weakref.ref[Any]] = []

    def train() -> None:
        with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
            trial = Trial(context, fails)
            weights.extend(map(weakref.ref, (trial.model, trial.optimizer, context)))
            pytorch.Trainer(trial, context).fit(
                max_length=pytorch.Batch(9), checkpoint_period=pytorch.Batch(4)
            )

    if fails:
        with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
            train()
        del caught
    else:
        train()
    assert [reference() for reference in weights] == [None, None, None]
