"""Trackers at each front door: the same objects, and one thread beside training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import creators, declarative, pytorch, train
from paceline.core import MetricPoint, TrackedRun, Tracker, _arguments
from paceline.core._arguments import Outcome

X = torch.arange(16.0).reshape(16, 1) / 16


class Told(Tracker):
    """Keeps what it is told."""

    name = "told"

    def __init__(self, **options: Any) -> None:
        super().__init__(close_timeout_s=60.0, **options)
        self.points: list[MetricPoint] = []
        self.checkpoints: dict[str, str] = {}
        self.run: Any = None
        self.end: Any = None

    def start(self, run: TrackedRun) -> str:
        self.run = run
        return run.run_id

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        self.points += points

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        assert newest in checkpoints
        self.checkpoints = dict(checkpoints)

    def finish(self, outcome: Outcome, error: str | None) -> None:
        self.end = outcome, error

    def values(self, name: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in self.points if each.name == name]


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(config: dict[str, Any]) -> None:
    for epoch in range(3):
        train.report(epoch=epoch, loss=0.5**epoch)
        train.save_checkpoint(epoch=epoch)
    if config["fails"]:
        raise ZeroDivisionError("by zero")


def test_a_train_function_is_tracked_beside_other_callbacks() -> None:
    tracker, path = Told(), Path("lines.jsonl")
    trainer = train.Trainer(num_workers=0)
    strategy = train.CheckpointStrategy(num_to_keep=2)
    callbacks = [tracker, train.JsonLinesCallback(path)]
    results = trainer.run(fit, {"fails": False}, callbacks, checkpoint_strategy=strategy)
    assert tracker.values("loss") == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert tracker.checkpoints == {each.uuid: each.url for each in results.checkpoints}
    assert len(tracker.checkpoints) == 2
    assert tracker.run.config == {"fails": False}
    assert tracker.end == (Outcome.COMPLETED, None)
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(ZeroDivisionError):
        trainer.run(fit, {"fails": True}, [tracker])
    assert tracker.end == (Outcome.ERROR, "ZeroDivisionError: by zero")
    with pytest.raises(ValueError, match="A tracker must be mlflow"):
        trainer.run(fit, {"fails": False}, ["nothing"])
    with pytest.raises(TypeError, match="`callbacks` must be TrainingCallback objects, trackers"):
        trainer.run(fit, {"fails": False}, [3])  # type: ignore[list-item]


def kill_once(config: dict[str, Any]) -> None:
    import os
    import signal

    first = (train.load_checkpoint() or {"epoch": -1})["epoch"] + 1
    for epoch in range(first, 4):
        train.report(loss=float(epoch + 10 * train.world_rank()))
        train.save_checkpoint(epoch=epoch)
        marker = Path(config["marker"])
        if epoch == 2 and train.world_rank() == config["rank"] and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_are_tracked_also_after_one_was_killed(rank: int, tmp_path: Path) -> None:
    tracker = Told(ranks=None)
    with train.Trainer(num_workers=3) as trainer:
        config = {"marker": str(tmp_path / "killed"), "rank": rank}
        results = trainer.run(kill_once, config, [tracker])
    assert results.num_restarts == 1
    for other in range(3):
        name = f"rank_{other}/loss" if other else "loss"
        assert dict(tracker.values(name)) == {n: n - 1 + 10 * other for n in range(1, 5)}
    assert set(tracker.checkpoints) >= {each.uuid for each in results.checkpoints}
    assert tracker.end == (Outcome.COMPLETED, None)


class Line(pytorch.PyTorchTrial):
    """Fits a line."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(sgd)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"validation_loss": self.model(batch).square().mean()}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(X, batch_size=4)

    build_validation_data_loader = build_training_data_loader


def test_a_trial_class_is_tracked() -> None:
    tracker = Told()
    with pytorch.init({"global_batch_size": 4}, seed=1, trackers=[tracker]) as context:
        trainer = pytorch.Trainer(Line(context), context)
        result = trainer.fit(max_length=pytorch.Batch(4), reporting_period=pytorch.Batch(2))
    assert [step for step, _ in tracker.values("loss")] == [2, 4]
    ((step, value),) = tracker.values("validation/validation_loss")
    assert (step, value) == (4, result.metrics["validation_loss"])
    assert list(tracker.checkpoints) == result.checkpoints
    assert tracker.run.config == {"global_batch_size": 4}
    assert tracker.end == (Outcome.COMPLETED, None)


@pytest.mark.slow
def test_passes_of_creators_are_tracked() -> None:
    tracker = Told()
    with creators.PyTorchTrainer(
        lambda config: nn.Linear(1, 1),
        lambda config: TensorDataset(X, X),
        lambda model, config: torch.optim.SGD(model.parameters(), lr=config["lr"]),
        nn.MSELoss,
        config={"lr": 0.1},
        trackers=[tracker],
    ) as trainer:
        first, second = trainer.train(), trainer.train()
    losses = [first["train_loss"], second["train_loss"]]
    assert tracker.values("train_loss") == [(1, losses[0]), (2, losses[1])]
    assert tracker.run.config == {"lr": 0.1}
    assert tracker.end == (Outcome.COMPLETED, None)


class Net(nn.Linear):
    """A model that takes no arguments."""

    def __init__(self) -> None:
        super().__init__(1, 1)


class Pairs(torch.utils.data.Dataset[Any]):
    """Points of a line."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index], X[index]


@pytest.mark.slow
def test_config_objects_are_tracked() -> None:
    tracker = Told()
    trainer = declarative.Trainer(
        declarative.TrainingConfig(
            model_class=Net,
            training_dataset=Pairs(),
            validation_dataset=Pairs(),
            loss_function=nn.MSELoss(),
            batch_size_per_process=8,
            num_epochs=2,
            model_save_dir="saved",
            pred_names=["y"],
            cpu_only=True,
        )
    )
    trainer.trackers = [tracker]
    trainer.build()
    trainer.run_training()
    assert tracker.end == (Outcome.COMPLETED, None)
    assert tracker.run.config["num_epochs"] == 2
    assert tracker.points
    assert tracker.checkpoints
    assert _arguments.Outcome.COMPLETED.value == "completed"


DEAD = """
import socket, sys, threading
from paceline import core
from paceline.integrations import MLflowTracker, WandbTracker

# Takes connections and never answers.
server = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{server.getsockname()[1]}"
if sys.argv[1] == "mlflow":
    tracker = MLflowTracker(url, close_timeout_s=0.5)
else:
    import os
    os.environ |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40}
    tracker = WandbTracker("p", mode="online", close_timeout_s=0.5)
with core.init(trackers=[tracker]) as context:
    for step in range(1, 101):
        context.train.report_training_metrics(step, {"loss": step})
print("lost", tracker.num_lost, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["mlflow", "wandb"])
def test_a_server_that_hangs_lets_the_program_train_and_end(run_python: Any, library: str) -> None:
    result = run_python(DEAD, library, WANDB_SILENT="true")
    assert result.returncode == 0, result.stderr
    assert "lost 100" in result.stdout
    assert "is left behind" in result.stderr
