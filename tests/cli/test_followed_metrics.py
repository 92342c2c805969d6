"""What `paceline e create -f` shows of the metrics of a run, whichever front door it uses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Paceline = Callable[..., Any]

TRIAL = """
import torch
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.model(batch).square().mean()}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(32, 1), self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader


with pytorch.init() as context:
    pytorch.Trainer(Trial(context), context).fit(
        max_length=pytorch.Batch(12), validation_period=pytorch.Epoch(1),
        reporting_period=pytorch.Batch(4),
    )
"""

CORE = """
from paceline import core

with core.init() as context:
    for step in range(1, 4):
        context.train.report_training_metrics(step, {"train_loss": 2 / step})
        context.train.report_validation_metrics(step, {"loss": 1 / step})
        context.train.report_metrics("test", step, {"test_loss": 3 / step})
"""

FUNCTION = """
from paceline import train


def train_func():
    for epoch in range(3):
        train.report(epoch=epoch, rank=train.world_rank(), loss=1 / (epoch + 1))


if __name__ == "__main__":
    with train.Trainer(num_workers=2) as trainer:
        trainer.run(train_func)
"""

CREATORS = """
import torch
from paceline import core
from paceline.creators import PyTorchTrainer


def data(config):
    x = torch.ones(32, 1)
    both = torch.utils.data.TensorDataset(x, x)
    return both, both


if __name__ == "__main__":
    with core.init() as context:
        trainer = PyTorchTrainer(
            lambda config: torch.nn.Linear(1, 1), data,
            lambda model, config: torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss,
        )
        for epoch in range(1, 4):
            context.train.report_training_metrics(epoch, trainer.train())
            context.train.report_validation_metrics(epoch, trainer.validate())
        trainer.shutdown()
"""

DECLARATIVE = """
import torch
from torch.utils.data import TensorDataset
from paceline.declarative import ModelParameters, Trainer, TrainingConfig

x = torch.ones(40, 2)
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = Trainer(TrainingConfig(
    model_class=torch.nn.Linear,
    model_params=ModelParameters.of({"in_features": 2, "out_features": 1}),
    dataset=data, test_dataset=data, pred_names=["sum"], loss_function=torch.nn.MSELoss(),
    num_epochs=3, model_save_dir="results",
))
trainer.build()
trainer.run_training()
"""

SLOW_DOORS = ("creators", "declarative")
DOORS = {
    "pytorch": (TRIAL, "validation_loss"),
    "core": (CORE, "loss"),
    "train": (FUNCTION, None),
    "creators": (CREATORS, "val_loss"),
    "declarative": (DECLARATIVE, "val_loss"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "door",
    # The others stand on the same parts as these.
    [pytest.param(door, marks=pytest.mark.slow if door in SLOW_DOORS else ()) for door in DOORS],
)
def test_training_and_validation_metrics_of_each_front_door_are_shown(
    mastered: Paceline, tmp_path: Path, door: str
) -> None:
    script, searched = DOORS[door]
    (tmp_path / "script.py").write_text(script)
    config = {
        "name": door,
        "entrypoint": "python3 script.py",
        "hyperparameters": {"global_batch_size": 8} if door == "pytorch" else {},
        "searcher": {"name": "single", "metric": searched or "loss"},
        "max_restarts": 0,
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    shown = mastered("e", "create", tmp_path / "config.yaml", tmp_path, "-f").stdout
    # The follower shows the metrics, so the trial prints no progress.
    assert "completed in" not in shown
    told = re.findall(r"^ *\d+:\d\d (\w+) after batch (\d+): (.*)$", shown, re.MULTILINE)
    # A train function's report counts as both, and is told once.
    groups = {"training", "validation"} if searched else {"validation"}
    assert {group for group, _, _ in told} - {"test"} == groups, shown
    # What is shown is what was reported, by the chief.
    trial = re.search(r"trial (\d+) +created", shown)
    assert trial is not None
    reported = {
        (row["group"], str(row["steps_completed"])): row["metrics"]
        for row in map(json.loads, mastered("t", "metrics", trial[1], "--json").stdout.splitlines())
    }
    for group, step, values in told:
        metrics = reported[group, step]
        assert all(f"{name}=" in values for name in metrics)
        numbers = {name: f"{metrics[name]:.4g}" for name in metrics if name.endswith("loss")}
        assert numbers
        assert numbers.items() <= dict(part.split("=") for part in values.split()).items()
    # A validation comes after the training that it judges, of which the metrics are shown too.
    last = max(int(step) for group, step, _ in told if group in ("training", *groups))
    assert last == max(int(step) for group, step in reported if group == "training")
    for number, (group, step, _) in enumerate(told):
        if group == "validation" and searched:
            assert ("training", step) in [(g, s) for g, s, _ in told[:number]]
