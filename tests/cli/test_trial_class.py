"""Older configs: a trial class as the entrypoint, trained as the config says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(self.model.weight)
        sgd = torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("learning_rate"))
        self.optimizer = context.wrap_optimizer(sgd)
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"validation_loss": self.model(batch).mean()}
    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(torch.ones(80, 1), batch_size=size)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(8, 1), batch_size=4)
"""
SCRIPT = """
from model_def import Trial
from paceline import pytorch

with pytorch.init() as context:
    trial = Trial(context)
    result = pytorch.Trainer(trial, context).fit(validation_period=pytorch.Batch(12))
    print(result.stop_reason, result.steps_completed)
"""
CONFIG = {
    "entrypoint": "model_def:Trial",
    "hyperparameters": {"global_batch_size": 8, "learning_rate": 1.0},
    "records_per_epoch": 50000,
    "searcher": {
        "name": "single", "metric": "validation_loss", "max_length": {"batches": 24},
    },
    "min_validation_period": {"records": 64},
    "min_checkpoint_period": {"batches": 10},
    "scheduling_unit": 5,
    "perform_initial_validation": True,
    "checkpoint_policy": "none",
    "checkpoint_storage": {"save_trial_latest": 9},
    "optimizations": {
        "aggregation_frequency": 2,
        "average_aggregated_gradients": False,
        "average_training_metrics": True,
        "tensor_fusion_threshold": 64,
    },
    "profiling": {
        "enabled": True, "begin_on_batch": 2, "end_after_batch": 4, "sync_timings": False,
    },
    "environment": {"environment_variables": ["USE_TORCH_DISTRIBUTED=false"]},
    "max_restarts": 0,
}  # fmt: skip
# Each step of two batches lowers the weight, and with it both losses, by the sum of two gradients
# of 1. Records of 64 are batches of 8.
TRAINING = {5: -1.6, 10: -6.4, 15: -11.6, 20: -16.4, 24: -21.0}
VALIDATION = {0: 0.0, 8: -8.0, 16: -16.0, 24: -24.0}

Paceline = Callable[..., Any]


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a directory with a trial class, a script that trains it and an older config."""
    path = tmp_path / "older"
    path.mkdir()
    (path / "model_def.py").write_text(MODEL)
    (path / "train.py").write_text(SCRIPT)
    (path / "config.yaml").write_text(json.dumps(CONFIG))
    return path


def series(rows: list[dict[str, Any]], group: str, key: str) -> dict[int, float]:
    return {
        row["steps_completed"]: pytest.approx(row["metrics"][key], abs=1e-6)
        for row in rows
        if row["group"] == group and key in row["metrics"]
    }


def local_run(paceline: Paceline, directory: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the metrics of the only run, and the steps of its checkpoints."""
    shown = json.loads(paceline("runs", "show", "last", "--json", cwd=directory).stdout)
    assert shown["state"] == "completed"
    manifests = (directory / shown["path"]).glob("checkpoints/*/manifest.json")
    steps = [json.loads(path.read_text())["metadata"]["steps_completed"] for path in manifests]
    return shown["metrics"], sorted(steps)


@pytest.mark.long
def test_an_older_config_trains_its_trial_class_locally_as_it_says(
    paceline: Paceline, older: Path
) -> None:
    result = paceline("e", "create", "config.yaml", "--local", cwd=older)
    warned = {line.split("`")[1] for line in result.stderr.splitlines() if "Warning" in line}
    assert warned == {
        "records_per_epoch",
        "optimizations.average_training_metrics",
        "optimizations.tensor_fusion_threshold",
    }
    metrics, checkpoints = local_run(paceline, older)
    assert series(metrics, "training", "loss") == TRAINING
    assert series(metrics, "validation", "validation_loss") == VALIDATION
    assert list(series(metrics, "profiling", "train_batch_s")) == [3, 4, 5]
    assert checkpoints == [10, 20, 24]
    shown = paceline("runs", "time", "last", cwd=older).stdout
    assert all(name in shown for name in ("Training", "Validation", "Starts", "Goodput"))


@pytest.mark.slow
def test_what_a_script_gives_to_fit_goes_before_the_config(paceline: Paceline, older: Path) -> None:
    options = ["--config", "entrypoint=python3 train.py"]
    result = paceline("e", "create", "config.yaml", "--local", *options, cwd=older)
    assert result.stdout == "reached max_length 24\n"
    metrics, checkpoints = local_run(paceline, older)
    assert series(metrics, "training", "loss") == TRAINING
    assert list(series(metrics, "validation", "validation_loss")) == [0, 12, 24]
    assert checkpoints == [10, 20, 24]


@pytest.mark.long
@pytest.mark.parametrize(
    ("entrypoint", "num_slots"),
    [
        ("python3 train.py", 1),
        pytest.param("model_def:Trial", 1, marks=pytest.mark.slow),
        pytest.param("model_def:Trial", 2, marks=pytest.mark.slow),
        pytest.param(
            "python3 -m paceline.launch.torch_distributed train.py", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_a_test_trains_and_validates_one_batch_and_stores_a_checkpoint(
    paceline: Paceline, older: Path, entrypoint: str, num_slots: int
) -> None:
    options = ["--config", f"entrypoint={entrypoint}"]
    options += ["--config", f"resources.slots_per_trial={num_slots}"]
    options += ["--config", "perform_initial_validation=false"]
    paceline("e", "create", "config.yaml", "--local", "--test", *options, cwd=older)
    metrics, checkpoints = local_run(paceline, older)
    assert list(series(metrics, "training", "loss")) == [1]
    assert list(series(metrics, "validation", "validation_loss")) == [1]
    assert checkpoints == [1]


@pytest.mark.long
def test_a_trial_class_that_is_not_there_is_told_in_one_line(
    paceline: Paceline, older: Path
) -> None:
    options = ["--config", "entrypoint=model_def:Trail"]
    result = paceline("e", "create", "config.yaml", "--local", *options, cwd=older, code=1)
    assert "`model_def` must have the class `Trail`" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_older_config_trains_its_trial_class_through_the_master_as_it_says(
    mastered: Paceline, older: Path, num_slots: int
) -> None:
    options = ["--config", f"resources.slots_per_trial={num_slots}", "--json"]
    created = json.loads(mastered("e", "create", "config.yaml", *options, cwd=older).stdout)
    mastered("e", "wait", created["id"])
    described = json.loads(mastered("e", "describe", created["id"], "--json").stdout)
    assert described["config"]["entrypoint"] == "model_def:Trial"
    [trial] = json.loads(mastered("e", "list-trials", created["id"], "--json").stdout)
    lines = mastered("t", "metrics", trial["id"], "--json").stdout.splitlines()
    metrics = [json.loads(line) for line in lines]
    assert series(metrics, "training", "loss") == TRAINING
    assert series(metrics, "validation", "validation_loss") == VALIDATION
    spent = json.loads(mastered("t", "time", trial["id"], "--json").stdout)
    assert min(spent[f"{name}_s"] for name in ("training", "validation", "start")) > 0
    assert spent["undivided_s"] == 0
    assert "Goodput" in mastered("t", "time", trial["id"]).stdout
    listed = json.loads(mastered("e", "list-checkpoints", created["id"], "--json").stdout)
    assert sorted(checkpoint["steps_completed"] for checkpoint in listed) == [10, 20, 24]
