"""What was changed since a checkpoint is refused by name, or applied and named."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

Train = Callable[..., "OneWeight"]
HPARAMS = {"global_batch_size": 2, "lr": 0.5}


class OneWeight(pytorch.PyTorchTrial):
    """The weight falls by the learning rate with each batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext, num_samples: int) -> None:
        self.context, self.num_samples = context, num_samples
        self.model = context.wrap_model(nn.Linear(1, 1, bias=False).double())
        nn.init.zeros_(self.model.weight)
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr"))
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"weight": self.model.weight}

    def build_training_data_loader(self) -> Any:
        data = torch.ones(self.num_samples, 1, dtype=torch.float64)
        size = self.context.get_per_slot_batch_size()
        return DataLoader(TensorDataset(data), batch_size=size)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(1, 1, dtype=torch.float64)))


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return a function that trains to a batch, in a run of its own or in the one before."""
    monkeypatch.chdir(tmp_path)

    def train(
        until: int,
        *,
        seed: int | None = 1,
        num_samples: int = 8,
        resume: Any = None,
        checkpoint: Path | None = None,
        **hparams: Any,
    ) -> OneWeight:
        with pytorch.init(hparams={**HPARAMS, **hparams}, seed=seed, resume=resume) as context:
            trial = OneWeight(context, num_samples)
            trainer = pytorch.Trainer(trial, context)
            if checkpoint is not None:
                trainer.restore(checkpoint)
            trainer.fit(max_length=pytorch.Batch(until))
            uuid = context.core.latest_checkpoint
            assert uuid is not None
            trial.run = context.core.run_dir
            trial.checkpoint = trial.run / "checkpoints" / uuid
        return trial

    return train


@pytest.mark.parametrize("is_same_run", [True, False])
def test_another_learning_rate_is_applied_and_named(
    train: Train, is_same_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(4)
    assert first.model.weight.item() == -2.0
    begun = {"resume": first.run} if is_same_run else {"checkpoint": first.checkpoint}
    second = train(6, lr=0.25, **begun)
    assert second.model.weight.item() == -2.5
    assert "optimizer 0: lr was 0.5 and is 0.25" in caplog.text
    assert ("hyperparameter lr, optimizer 0: lr was" in caplog.text) is not is_same_run
    # It is nothing new for what goes on from there.
    caplog.clear()
    third = train(8, lr=0.25, checkpoint=second.checkpoint)
    assert third.model.weight.item() == -3.0
    assert "other settings" not in caplog.text


def test_another_seed_is_refused_by_name_and_none_takes_the_stored_one(
    train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(2)
    match = "`seed` must be 1, as the checkpoint's order of samples depends on it, but got 2"
    with pytest.raises(pytorch.CheckpointMismatchError, match=match):
        train(4, seed=2, resume=first.run)
    with pytest.raises(pytorch.CheckpointMismatchError, match=match):
        train(4, seed=2, checkpoint=first.checkpoint)
    train(4, seed=None, checkpoint=first.checkpoint)
    assert "other settings" not in caplog.text


@pytest.mark.parametrize(
    ("until", "changes", "told"),
    [
        (4, {"num_samples": 12}, "the number of samples of an epoch was 8 and is 12"),
        (4, {"num_samples": 7}, "the number of samples of an epoch was 8 and is 7"),
        (4, {"global_batch_size": 4}, "hyperparameter global_batch_size was 2 and is 4"),
        (4, {"global_batch_size": 4}, "the number of global batches of an epoch was 4 and is 2"),
        (
            2,
            {"num_samples": 12},
            "within an epoch of 4 global batches, and the present data have 6",
        ),
        (2, {"num_samples": 7}, "within an epoch of 8 samples, and the present data have 7"),
    ],
)
def test_other_data_are_named(
    train: Train, until: int, changes: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(until)
    with caplog.at_level(logging.WARNING):
        train(until + 2, checkpoint=first.checkpoint, **changes)
    assert told in caplog.text
