"""A training loss that is not finite: where it is found, what is said, and what is no reason."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import pytorch
from paceline._base.run_directory import JournalKey
from paceline.journal import EarlyExitReported, RunDirectory


class Root(nn.Module):
    """A layer without weights that returns NaN below -50."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 50).sqrt()


class Trial(pytorch.PyTorchTrial):
    """Batches of 4 of 40 samples, in order; `broken` changes the samples of batch 6."""

    def __init__(self, context: pytorch.PyTorchTrialContext, **changes: Any) -> None:
        self.context, self.changes = context, changes
        layers = [nn.Flatten(), Root(), nn.Linear(2, 1)]
        self.model = context.wrap_model(nn.Sequential(*layers))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        if self.changes.get("is_loss_broken") and batch_idx == 6:
            loss = loss * math.nan
        if self.changes.get("is_plain"):
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
        return {"train_loss": loss, "accuracy": self.changes.get("accuracy", 1.0)}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"error": self.changes.get("error", 1.0)}

    def build_training_data_loader(self) -> Any:
        x = torch.ones(40, 2)
        x[25] = self.changes.get("broken", 1.0)
        data = TensorDataset(x, torch.zeros(40, 1))
        if "is_stream" in self.changes:
            return DataLoader(Stream(data), batch_size=4)
        return DataLoader(data, batch_size=4)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(1, 2), torch.zeros(1, 1)))


class Stream(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def fit(directory: Path, changes: dict[str, Any], **options: Any) -> Any:
    init = {"precision": options.pop("precision", "fp32")}
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).chdir(directory)
        context = stack.enter_context(
            pytorch.init(hparams={"global_batch_size": 4}, seed=1, **init)
        )
        trainer = pytorch.Trainer(Trial(context, **changes), context)
        return trainer.fit(max_length=pytorch.Batch(20), **options)


LAYER = "the first layer to return such values is "
SAID = {
    "samples": ({"broken": math.inf}, "Samples of this batch are not finite themselves"),
    "layer": ({"broken": -60.0}, f"{LAYER}'model_0.1' \\(Root\\)"),
    "plain": ({"broken": -60.0, "is_plain": True}, f"{LAYER}'model_0.1' \\(Root\\)"),
    "loss": ({"is_loss_broken": True}, "all layers return finite values"),
    "stream": ({"broken": -60.0, "is_stream": True}, "The batch is not known any more"),
}


@pytest.mark.parametrize("case", SAID)
@pytest.mark.parametrize("period", [1, 5, 100])
def test_the_batch_and_the_layer_are_named(tmp_path: Path, case: str, period: int) -> None:
    changes, text = SAID[case]
    found = f"'train_loss' must be finite, but it is not on rank 0 at batch 6. .*{text}.*Hint: "
    with pytest.raises(pytorch.NonFiniteError, match=found):
        fit(tmp_path, changes, reporting_period=pytorch.Batch(period))


def test_a_run_that_has_diverged_is_recorded_as_such(tmp_path: Path) -> None:
    with pytest.raises(pytorch.NonFiniteError) as caught:
        fit(tmp_path, {"broken": math.nan})
    assert (caught.value.rank, caught.value.batch) == (0, 6)
    [run] = (tmp_path / "paceline_runs").iterdir()
    reader = RunDirectory(run).reader(JournalKey(0, 0, 0))
    records = [entry.decode() for entry in reader.read()]
    reasons = [each.reason for each in records if isinstance(each, EarlyExitReported)]
    assert reasons == ["diverged"]


def test_validations_and_metrics_that_are_no_loss_may_be_nan(tmp_path: Path) -> None:
    result = fit(
        tmp_path, {"error": math.nan, "accuracy": math.nan}, validation_period=pytorch.Batch(5)
    )
    assert result.steps_completed == 20
    assert all(math.isnan(row.metrics["error"]) for row in result.history("validation"))


def test_steps_that_a_gradient_scaler_leaves_out_count_from_ten_in_a_row(tmp_path: Path) -> None:
    assert fit(tmp_path, {"is_loss_broken": True}, precision="fp16").steps_completed == 20
