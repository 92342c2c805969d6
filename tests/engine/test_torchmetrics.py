"""Metrics of torchmetrics as reducers: one rank and three, a resume, collections, few samples."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from optional_modules import Needed
from torch import nn
from torch.utils.data import TensorDataset

from paceline import pytorch

torchmetrics: Any = Needed("torchmetrics")

SIZE = 41
HPARAMS = {"global_batch_size": 12}


def data(size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator).double()
    return TensorDataset(x, (x.sum(1) > 0).long())


def metrics() -> dict[str, Any]:
    """A sum of counts, a collection whose parts share states, all values, and a maximum."""
    collection = torchmetrics.MetricCollection(
        [torchmetrics.classification.BinaryPrecision(), torchmetrics.classification.BinaryRecall()]
    )
    return {
        "accuracy": torchmetrics.classification.BinaryAccuracy(),
        "": collection,
        "auroc": torchmetrics.classification.BinaryAUROC(),
        "matrix": torchmetrics.classification.BinaryConfusionMatrix(),
    }


class Trial(pytorch.PyTorchTrial):
    """Its metrics have nothing to do with its tiny model, so that they are the same at any size."""

    def __init__(self, context: pytorch.PyTorchTrialContext, changes: dict[str, Any]) -> None:
        self.context, self.changes = context, changes
        torch.manual_seed(3)
        self.model = context.wrap_model(nn.Linear(4, 1).double())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.reducers: list[Any] = [
            context.wrap_reducer(metric, name=name or None) for name, metric in metrics().items()
        ]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        rank, marker = self.context.distributed.rank, Path(self.changes.get("marker", "/"))
        if batch_idx == 8 and rank == self.changes.get("rank") and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.collect(batch)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        self.collect(batch)
        return {"x": 0.0}

    def collect(self, batch: Any) -> None:
        x, y = batch
        for reducer in self.reducers:
            reducer.update(torch.sigmoid(x[:, 0]), y)

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(data(), batch_size=4, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(data(self.changes.get("size", SIZE)), batch_size=4)


def fit(**changes: Any) -> tuple[list[Any], list[Any]]:
    warnings.simplefilter("ignore")
    with pytorch.init(HPARAMS, seed=7, num_shards=3) as context:
        result = pytorch.Trainer(Trial(context, changes), context).fit(
            max_length=pytorch.Batch(12),
            reporting_period=pytorch.Batch(6),
            validation_period=pytorch.Batch(3),
            checkpoint_period=pytorch.Batch(1),
        )
        drop = {"loss", "x", "batches", "epochs"}
        found = [
            [{k: v for k, v in row.metrics.items() if k not in drop} for row in rows]
            for rows in (result.history("training"), result.history("validation"))
        ]
        return found[0], found[1]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plain(size: int = SIZE) -> dict[str, Any]:
    """Return what torchmetrics computes by itself."""
    x, y = data(size).tensors
    values: dict[str, Any] = {}
    for name, metric in metrics().items():
        metric.update(torch.sigmoid(x[:, 0]), y)
        found = metric.compute()
        found = {name: found} if name else found
        values |= {key: value.tolist() for key, value in found.items()}
    return values


def test_one_rank_reports_what_torchmetrics_computes_by_itself() -> None:
    training, validation = fit()
    assert len(training) == 2
    assert training[0] != training[1]
    assert validation == 4 * [plain()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [SIZE, 5])
def test_three_ranks_report_the_same_as_one(size: int) -> None:
    """With 5 samples the last rank evaluates none."""
    alone = fit(size=size)
    assert alone[1] == 4 * [plain(size)]
    assert pytorch.launch(fit, 3, kwargs={"size": size}) == 3 * [alone]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_values_collected_before_a_loss_are_in_the_report_after_it(
    rank: int, tmp_path: Path
) -> None:
    changes = {"rank": rank, "marker": str(tmp_path / "killed")}
    found = pytorch.launch(fit, 3, kwargs=changes, max_restarts=1)
    assert (tmp_path / "killed").exists()
    assert found == 3 * [fit()]


def test_a_metric_is_wrapped_once_only() -> None:
    metric = torchmetrics.MeanMetric()
    with pytorch.init(HPARAMS, seed=7) as context:
        wrapped: Any = context.wrap_reducer(metric, name="mean")
        wrapped.update(torch.tensor([1.0, 3.0]))
        assert metric.compute() == 2.0
        with pytest.raises(ValueError, match="must be wrapped once only"):
            context.wrap_reducer(metric, name="again")
