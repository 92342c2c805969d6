"""A small run of known data, in a directory of its own."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.declarative import ModelParameters, TrainingConfig


@dataclasses.dataclass
class NetParameters(ModelParameters):
    width: int = 6
    dropout: float = 0.0


class Net(nn.Module):
    """Two predictions: three classes, and two numbers."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> Any:
        both = self.head(self.encoder(x))
        return both[:, :3], both[:, 3:]


def samples(num: int = 40) -> TensorDataset:
    """Return inputs, indices of classes, and two numbers."""
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1), x[:, 2:].clone())


MakeConfig = Callable[..., TrainingConfig]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_config() -> MakeConfig:
    """Return a function that makes a config of a short training, with changes."""

    def make(**changes: Any) -> TrainingConfig:
        fields: dict[str, Any] = {
            "model_class": Net,
            "model_params": NetParameters(),
            "dataset": samples(),
            "pred_names_and_types": [("phase", "cls"), ("energy", "regr")],
            "loss_function": [nn.CrossEntropyLoss(), nn.MSELoss()],
            "task_type": None,
            "batch_size_per_process": 8,
            "num_epochs": 2,
            "learning_rate_per_process": 0.01,
            "validation_ratio": 0.2,
            "model_save_dir": "out",
        }
        return TrainingConfig(**{**fields, **changes})

    return make
