"""Custom reducers: across validations, restarts, and states that a checkpoint cannot hold."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch
from paceline._training.engine.metric_reducers import ReducerSet
from paceline.core import read_metrics
from paceline.journal import RunDirectory


class Largest(pytorch.MetricReducer):
    """The largest value, and a histogram in an array."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.largest = -1.0
        self.counts = numpy.zeros(10)

    def update(self, x: torch.Tensor) -> None:
        self.largest = max(self.largest, float(x.max()))
        self.counts[int(x.max())] += 1

    def per_slot_reduce(self) -> Any:
        return self.largest, int(self.counts.sum())

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return {
            "largest": max(share[0] for share in per_slot_metrics),
            "count": sum(share[1] for share in per_slot_metrics),
        }


class Trial(pytorch.PyTorchTrial):
    """x = 9..0 in batches of 2: the largest comes first."""

    def __init__(self, context: pytorch.PyTorchTrialContext, reducer: Any = None) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.reducer: Any = context.wrap_reducer(reducer or Largest())
        self.listed: Any = context.wrap_reducer(len, name="listed", for_validation=False)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.reducer.update(batch[0])
        self.listed.update(batch_idx)
        return loss

    def evaluate_batch(self, batch: Any) -> Any:
        self.reducer.update(batch[0])
        return {"x": 0.0}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(9.0, -1.0, -1.0)[:, None]), batch_size=2)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(result: pytorch.Result, group: str) -> dict[int, tuple[Any, ...]]:
    found = {}
    for row in read_metrics(RunDirectory(result.run_dir), group):
        found[row.steps_completed] = row.metrics["largest"], row.metrics["count"]
    return found


def test_validation_between_reports_leaves_what_was_collected_for_training() -> None:
    with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
        result = pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Batch(4), validation_period=pytorch.Batch(1),
            reporting_period=pytorch.Batch(4),
        )  # fmt: skip
    assert rows(result, "training") == {4: (9.0, 4)}
    assert rows(result, "validation") == dict.fromkeys((1, 2, 3, 4), (1.0, 3))


def test_what_was_collected_survives_a_restart() -> None:
    with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
        trainer = pytorch.Trainer(Trial(context), context)
        trial_context = context
        with pytest.raises(ZeroDivisionError):
            trainer.fit(
                max_length=pytorch.Batch(5), checkpoint_period=pytorch.Batch(2),
                reporting_period=FailsAt(3),
            )  # fmt: skip
    with pytorch.init(
        hparams={"global_batch_size": 2}, seed=1, resume=trial_context.core.run_dir
    ) as context:
        result = pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(5))
    assert rows(result, "training") == {5: (9.0, 5)}
    assert result.metrics["x"] == 0.0


class FailsAt(pytorch.Batch):
    """A period that fails when it is looked at after so many batches."""

    def is_due(self, before: Any, after: Any) -> bool:
        return bool(1 / (self.length - after.batches)) and False


class Unstorable(Largest):
    """A reducer that holds what no safe format knows."""

    def reset(self) -> None:
        super().reset()
        self.kind = complex(1, 2)


def test_reducer_that_cannot_be_stored_is_named_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
        trial = Trial(context, Unstorable())
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2))
    assert len(result.checkpoints) == 1
    assert "What Unstorable collects between reports is not part of checkpoints" in caplog.text


class Tally(nn.Module):
    """A metric with a state of its own, such as those of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))


class Referring(Largest):
    """Refers to the model and its optimizer; collects in place what may carry a graph."""

    def __init__(self, trial: "ReferringTrial") -> None:
        self.trial, self.model, self.optimizer = trial, trial.model, trial.optimizer
        self.parameters, self.predict = list(trial.model.parameters()), trial.model.forward
        self.outputs: list[torch.Tensor] = []
        self.tally = Tally()
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.outputs.clear()
        self.tally.total.zero_()

    def update(self, x: torch.Tensor) -> None:
        super().update(x)
        self.outputs.append(self.model(x))
        self.tally.total += 1

    def per_slot_reduce(self) -> Any:
        return *super().per_slot_reduce(), len(self.outputs), int(self.tally.total)

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        _, _, num_outputs, total = per_slot_metrics[0]
        seen = {"outputs": num_outputs, "total": total, "weight": self.model.weight.item()}
        return super().cross_slot_reduce(per_slot_metrics) | seen


class ReferringTrial(Trial):
    """A trial whose reducer refers to its parts."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.reducer = context.wrap_reducer(Referring(self), name=None)


def test_reducer_refers_to_the_trained_model_after_validations() -> None:
    with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
        trial = ReferringTrial(context)
        result = pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(4), validation_period=pytorch.Batch(1),
            reporting_period=pytorch.Batch(4),
        )  # fmt: skip
    reducer = trial.reducer
    assert reducer.trial is trial
    assert reducer.model is trial.model
    assert reducer.optimizer is trial.optimizer
    assert reducer.predict.__self__ is trial.model
    assert all(map(lambda a, b: a is b, reducer.parameters, trial.model.parameters()))
    assert result.metrics["weight"] == trial.model.weight.item()
    (training,) = result.history("training")
    assert (training.metrics["outputs"], training.metrics["total"]) == (4, 4)


class Weighing(Largest):
    """Refers to the model and to one of its weights."""

    def __init__(self, model: nn.Linear) -> None:
        super().__init__()
        self.model, self.weight = model, model.weight


def test_what_is_collected_is_stored_without_the_model_that_is_referred_to() -> None:
    model = nn.Linear(1, 1)
    stepper: Any = SimpleNamespace(models=[model], optimizers=[])
    reducers = ReducerSet(stepper)
    reducer: Any = reducers.wrap(Weighing(model), None, for_training=True, for_validation=True)
    reducer.update(torch.tensor([3.0]))
    (state,) = reducers.storable_state()
    assert state is not None
    assert sorted(state) == ["counts", "largest"]
    reducer.reset()
    reducers.load_state([state])
    assert (reducer.largest, reducer.model, reducer.weight) == (3.0, model, model.weight)


def test_values_that_carry_a_graph_survive_a_validation() -> None:
    class Graphs(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.listed.update({"y": self.model(batch[0])})
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
        result = pytorch.Trainer(Graphs(context), context).fit(
            max_length=pytorch.Batch(2), validation_period=pytorch.Batch(1),
            reporting_period=pytorch.Batch(2),
        )  # fmt: skip
    (training,) = result.history("training")
    assert training.metrics["listed"] == 4


def test_function_gets_the_values_in_the_order_of_the_samples() -> None:
    """Each of two ranks runs two shards of a global batch; each of the 7 shards has 2 values."""
    shares = []
    for own in ((0, 1), (2, 3)):
        reducers = ReducerSet()
        reducer: Any = reducers.wrap(list, "all", for_training=True, for_validation=True)
        for shard in (own[0], own[1], 4 + own[0], 4 + own[1]):
            reducers.batch = shard // 4
            for value in (2 * shard, 2 * shard + 1) if shard < 7 else ():
                reducer.update(value)
        shares.append(reducer.per_slot_reduce())
    assert reducer.cross_slot_reduce(shares) == list(range(14))
