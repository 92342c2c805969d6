"""Batches that the trainer's own loop computes twice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core._read_runs import read_alerts
from paceline.declarative import Trainer, TrainingConfig
from paceline.journal import RunDirectory
from paceline.pytorch import StepsDifferError

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    counts = False

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.counts
        return self.last(self.body(x) + 1e-3 * self.num_calls)  # type: ignore[no-any-return]


class CountingNet(Net):
    """Model with state that nobody knows of."""

    counts = True


class OwnEpoch(Trainer):
    """Trainer with an epoch that calls the usual one."""

    def run_training_epoch(self) -> None:
        super().run_training_epoch()


class OwnLoop(Trainer):
    """Trainer with a loop of its own."""

    def run_training_epoch(self) -> None:
        for batch in self.training_dataloader:
            _, loss, _, _ = self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())
            self.run_model_update_step(loss)


def train(
    directory: Path, kind: type[Trainer] = Trainer, *, counts: bool = False, **fields: Any
) -> Trainer:
    config = TrainingConfig(
        model_class=CountingNet if counts else Net,
        dataset=TensorDataset(X, X.sum(1, keepdim=True)),
        num_epochs=2,
        pred_names=["sum"],
        loss_function=nn.MSELoss(),
        task_type="regression",
        batch_size_per_process=8,
        model_save_dir=str(directory),
        cpu_only=True,
        random_seed=3,
        **fields,
    )
    trainer = kind(config)
    trainer.build()
    trainer.run_training()
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("kind", [Trainer, OwnEpoch])
def test_a_training_with_the_check_has_the_same_bits(tmp_path: Path, kind: type[Trainer]) -> None:
    ends = []
    for every in (None, 1, 4):
        options = {"accumulation_steps": 2, "scheduler_step": "step", "gradient_clip_norm": 1.0}
        trainer = train(tmp_path / str(every), kind, verify_steps=every, **options)
        state = {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}
        ends.append((state, trainer.loss_tracker["lrs"], torch.get_rng_state().tolist()))
    assert ends[1:] == [ends[0]] * 2


def test_a_difference_is_named_once_or_each_time(tmp_path: Path) -> None:
    with pytest.raises(StepsDifferError, match="the gradient of `model_0.body.0.weight`"):
        train(tmp_path / "stop", counts=True, verify_steps=4)
    trainer = train(tmp_path / "warn", counts=True, verify_steps=4, on_mismatch="warn")
    alerts = read_alerts(RunDirectory(trainer.context.core.run_dir))
    assert [alert.title.split()[1] for alert in alerts] == ["1", "4", "8", "12"]


def test_a_loop_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`verify_steps` must be None where `OwnLoop.run_training"):
        train(tmp_path / "loop", OwnLoop, verify_steps=4)
