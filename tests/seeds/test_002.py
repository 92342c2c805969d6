"""Every snippet of the third source document runs: a guide to a generic trainer.

Its snippets are typed anew, with its names and arguments. They needed these corrections and no
others:

1. Names come from `paceline.declarative`.
2. What is missing ("...") is filled in: models, data and numbers. The folder is a temporary one.
3. The sample loss `MyLoss` lacks `super().__init__()` and `self` in both of its methods.
4. `multi_node''` has one quote too many.
5. An example script of another repository is named; the one here is `examples/hpc`.

The guide's installation is that of any package, and is tested with the package.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.declarative import ModelParameters, ParallelizationConfig, Trainer, TrainingConfig


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)


# 1. A model that is a subclass of `torch.nn.Module`.
class Model(nn.Module):
    def __init__(self, dim_input: int, dim_hidden: int) -> None:
        super().__init__()
        self.body = nn.Linear(dim_input, dim_hidden)
        self.phase = nn.Linear(dim_hidden, 3)
        self.energy = nn.Linear(dim_hidden, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        return self.phase(hidden), self.energy(hidden)


# 2. A model configuration class, which contains the arguments of the constructor.
@dataclasses.dataclass
class Parameters(ModelParameters):
    dim_input: int = 4
    dim_hidden: int = 16


# 3. A data set with `__len__` and `__getitem__`; items carry an axis of size 1 for the sample.
class Data(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(60, 1, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.x[index]
        return x, nn.functional.one_hot(x[:, :3].argmax(1), 3), x[:, 1:]


class MyLoss(nn.Module):
    def __init__(self, weight: float = 0.01) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, preds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.mean((preds - labels) ** 2)


def configured(**changes: Any) -> TrainingConfig:
    # 4. A `TrainingConfig` object, with the class handles and objects from above.
    fields: dict[str, Any] = {
        "model_class": Model,
        "model_params": Parameters(),
        "dataset": Data(),
        "validation_ratio": 0.2,
        "pred_names": ("phase", "energy"),
        "loss_function": (nn.CrossEntropyLoss(), nn.MSELoss()),
        "learning_rate_per_process": 0.02,
        "batch_size_per_process": 8,
        "num_epochs": 4,
        "model_save_dir": "results",
        "random_seed": 1,
    }
    return TrainingConfig(**{**fields, **changes})


def run(configs: TrainingConfig) -> Trainer:
    trainer = Trainer(configs)
    # 5. Run the following:
    trainer.build()
    trainer.run_training()
    return trainer


def test_the_five_steps_train_a_model() -> None:
    trainer = run(configured())
    losses = trainer.loss_tracker["val_loss"]
    assert losses[-1] < losses[0]
    assert len(trainer.validation_dataset) == 12
    assert len(trainer.loss_tracker["val_acc_phase"]) == 4
    assert (Path("results") / "final_model.pth").exists()


def test_an_optimizer_is_given_by_its_class_and_arguments() -> None:
    configs = configured(
        optimizer=torch.optim.AdamW,
        optimizer_params={"weight_decay": 0.01},
    )
    optimizer = run(configs).optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


def test_the_learning_rate_is_set_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"`optimizer_params`.*learning_rate_per_process=0.1"):
        configured(optimizer_params={"lr": 0.1})


def test_a_loss_class_takes_arguments_by_its_constructor() -> None:
    configs = configured(loss_function=[nn.CrossEntropyLoss(), MyLoss(weight=0.5)])
    tracker = run(configs).loss_tracker
    assert tracker["loss_energy"][-1] < tracker["loss_energy"][0]


def test_a_loss_is_an_object_and_not_a_class() -> None:
    with pytest.raises(TypeError, match=r"CrossEntropyLoss\(\), as a loss is called with"):
        configured(loss_function=nn.CrossEntropyLoss)


Regularizer = Callable[..., torch.Tensor]
CALLS: list[tuple[str, Regularizer]] = [
    ("names", lambda energy, phase: (told.append((energy, phase)), energy.mean())[1]),
    ("positions", lambda a, b: (told.append((b, a)), b.mean())[1]),
]
told: list[Any] = []


@pytest.mark.parametrize(
    "regularizer", [call for _, call in CALLS], ids=[name for name, _ in CALLS]
)
def test_further_losses_are_regularizers_by_names_or_positions(regularizer: Regularizer) -> None:
    class Wide(Trainer):
        def compute_losses(self, loss_records: Any, preds: Any, labels: Any) -> Any:
            result = super().compute_losses(loss_records, preds, labels)
            energy, phase = told.pop()
            assert phase is preds[0]
            assert energy is preds[1]
            return result

    configs = configured(
        loss_function=[nn.CrossEntropyLoss(), nn.MSELoss(), regularizer], num_epochs=1
    )
    trainer = Wide(configs)
    trainer.build()
    tracker = trainer.run_training()
    parts = [tracker[f"loss_{name}"][0] for name in ("phase", "energy", "regularizer_1")]
    assert tracker["loss"][0] == pytest.approx(sum(parts))


def test_multi_node_is_chosen_by_a_config_object(caplog: pytest.LogCaptureFixture) -> None:
    parallelization_params = ParallelizationConfig(parallelization_type="multi_node")
    with caplog.at_level(logging.INFO):
        trainer = run(configured(parallelization_params=parallelization_params, num_epochs=1))
    assert (trainer.rank, trainer.num_processes) == (0, 1)


def test_a_subclass_overrides_methods() -> None:
    class Doubled(Trainer):
        def compute_losses(self, loss_records: Any, preds: Any, labels: Any) -> Any:
            return super().compute_losses(loss_records, preds, [2 * label for label in labels])

    trainer = Doubled(configured())
    trainer.build()
    assert len(trainer.run_training()["loss"]) == 4
