"""The trainer in one process: closed-form models, boundaries, refusals."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import core, pytorch
from paceline.journal import RunDirectory
from paceline.storage import CheckpointWriteError, DirectoryStorage


class OneWeight(pytorch.PyTorchTrial):
    """One weight w, loss w * x, learning rate 0.1: each step subtracts 0.1 times the mean of x."""

    def __init__(self, context: pytorch.PyTorchTrialContext, **changes: Any) -> None:
        self.context = context
        self.changes = changes
        self.model = context.wrap_model(nn.Linear(1, 1, bias=False).double())
        nn.init.zeros_(self.model.weight)  # type: ignore[arg-type]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "mean_x": batch[0].mean()}

    def evaluate_batch(self, batch: Any) -> Any:
        return self.changes.get("evaluate", lambda x: {"mean_x": x.mean()})(batch[0])

    def build_training_data_loader(self) -> Any:
        x = torch.arange(10, dtype=torch.float64).reshape(10, 1)
        if "training" in self.changes:
            return self.changes["training"]
        return DataLoader(TensorDataset(x), batch_size=4)

    def build_validation_data_loader(self) -> Any:
        x = torch.arange(5, dtype=torch.float64).reshape(5, 1)
        return DataLoader(TensorDataset(x), batch_size=2)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        callbacks: dict[str, pytorch.PyTorchCallback] = self.changes.get("callbacks", {})
        return callbacks


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fit() -> Callable[..., tuple[OneWeight, pytorch.Result]]:
    def run(changes: dict[str, Any] | None = None, **options: Any) -> Any:
        with pytorch.init(hparams={"global_batch_size": 4}, seed=1) as context:
            trial = OneWeight(context, **(changes or {}))
            return trial, pytorch.Trainer(trial, context).fit(**options)

    return run


Fit = Callable[..., tuple[OneWeight, pytorch.Result]]


def rows(result: pytorch.Result, group: str) -> dict[int, dict[str, Any]]:
    return {row.steps_completed: row.metrics for row in result.history(group)}


def test_weight_after_an_epoch_is_the_sum_of_the_steps(fit: Fit) -> None:
    """Batches 0..3, 4..7, 8..9 have means 1.5, 5.5, 8.5."""
    trial, result = fit(max_length=pytorch.Epoch(1))
    assert trial.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5), rel=1e-15)
    assert (result.steps_completed, result.stop_reason) == (3, "reached max_length")


def test_accumulation_equals_the_large_batch_also_with_a_smaller_last_one(fit: Fit) -> None:
    """A window of three batches is the mean of all ten samples, 4.5."""
    trial, _ = fit(max_length=pytorch.Epoch(2), aggregation_frequency=3)
    assert trial.model.weight.item() == pytest.approx(-0.1 * 4.5 * 2, rel=1e-14)


def test_accumulation_without_averaging_sums_the_batches_means(fit: Fit) -> None:
    trial, _ = fit(
        max_length=pytorch.Epoch(1), aggregation_frequency=3, average_aggregated_gradients=False
    )
    assert trial.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5), rel=1e-14)


def test_metrics_are_weighted_by_samples(fit: Fit) -> None:
    """Unweighted means of the batches would be 5.17 and 2.33."""
    _, result = fit(max_length=pytorch.Epoch(1), reporting_period=pytorch.Epoch(1))
    assert rows(result, "training")[3]["mean_x"] == 4.5
    assert rows(result, "validation")[3]["mean_x"] == 2.0


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_the_result_has_the_last_validation_wherever_the_last_report_was(
    fit: Fit, period: int
) -> None:
    """Of the last epoch both are left to do at its end."""
    _, result = fit(
        max_length=pytorch.Epoch(2),
        reporting_period=pytorch.Batch(period),
        validation_period=pytorch.Epoch(1),
    )
    assert result.metrics == rows(result, "validation")[6]
    assert result.metrics["mean_x"] == 2.0


def test_boundaries_count_from_the_start_in_their_own_units(fit: Fit) -> None:
    _, result = fit(
        max_length=pytorch.Batch(7),
        validation_period=pytorch.Record(10),
        reporting_period=pytorch.Batch(2),
    )
    assert sorted(rows(result, "training")) == [2, 4, 6, 7]
    assert sorted(rows(result, "validation")) == [3, 6, 7]


def test_data_without_a_length_end_their_epochs_where_they_end(fit: Fit) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for value in range(10):
                yield (torch.tensor([float(value)], dtype=torch.float64),)

    trial, result = fit(
        {"training": DataLoader(Stream(), batch_size=4)}, max_length=pytorch.Epoch(2)
    )
    assert result.steps_completed == 6
    assert trial.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5) * 2, rel=1e-14)


def test_best_policy_stores_only_what_is_better(fit: Fit) -> None:
    values = iter([3.0, 2.0, 2.0, 5.0, 1.0, 4.0])

    def evaluate(x: torch.Tensor) -> dict[str, float]:
        return {"score": next(values) if len(x) == 1 else 0.0}

    class PerEpoch(OneWeight):
        def evaluation_reducer(self) -> pytorch.Reducer:
            return pytorch.Reducer.MAX

    with pytorch.init(hparams={"global_batch_size": 4}, seed=1) as context:
        trial = PerEpoch(context, evaluate=evaluate)
        result = pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Epoch(6), validation_period=pytorch.Epoch(1), metric="score"
        )
        steps = [
            context.core.checkpoint.get_metadata(uuid)["steps_completed"]
            for uuid in result.checkpoints
        ]
    assert steps == [3, 6, 15, 18]
    assert result.best_metrics is not None
    assert result.best_metrics["score"] == 1.0


def test_stop_request_stores_a_checkpoint_and_ends(fit: Fit) -> None:
    class Stop(pytorch.PyTorchCallback):
        trial: OneWeight

        def on_training_epoch_end(self, epoch_idx: int) -> None:
            self.trial.context.set_stop_requested(True)

    callback = Stop()
    with pytorch.init(hparams={"global_batch_size": 4}, seed=1) as context:
        callback.trial = OneWeight(context, callbacks={"stop": callback})
        result = pytorch.Trainer(callback.trial, context).fit(max_length=pytorch.Epoch(5))
    assert (result.stop_reason, result.steps_completed) == ("stop requested", 3)
    assert len(result.checkpoints) == 1


@pytest.mark.parametrize(
    ("lost", "stored", "error", "part_s"),
    [
        ({2}, [2, 6], None, 60.0),
        # The last one is stored once more.
        ({3}, [2, 4, 6], None, 60.0),
        ({3, 4}, [2, 4], "not the 4", 60.0),
        # Three in a row within a moment may pass.
        ({1, 2, 3}, [6], None, 60.0),
        # Three in a row over ten times what a store has are too many.
        ({1, 2, 3}, [], "not the 3", 1e-9),
    ],
)
def test_training_goes_on_after_a_checkpoint_that_was_lost(
    fit: Fit,
    lost: set[int],
    stored: list[int],
    error: str | None,
    part_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", str(part_s))
    numbers = itertools.count(1)
    store_shard = DirectoryStorage.store_shard

    def lossy(storage: DirectoryStorage, uuid: str, rank: int) -> Any:
        number = next(numbers)
        if number in lost:
            raise CheckpointWriteError(f"not the {number}")
        return store_shard(storage, uuid, rank)

    monkeypatch.setattr(DirectoryStorage, "store_shard", lossy)
    with nullcontext() if error is None else pytest.raises(CheckpointWriteError, match=error):
        trial, result = fit(
            max_length=pytorch.Epoch(2),
            checkpoint_period=pytorch.Batch(2),
            checkpoint_policy="all",
        )
        assert result.steps_completed == 6
        assert trial.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5) * 2, rel=1e-14)
    [run] = core.list_runs(Path("paceline_runs"))
    checkpoints = core.read_checkpoints(RunDirectory(run.path))
    assert [checkpoint.steps_completed for checkpoint in checkpoints] == stored
    assert f"not the {min(lost)}" in caplog.text


def test_test_mode_trains_one_batch_and_validates_one(fit: Fit) -> None:
    _, result = fit(max_length=pytorch.Epoch(9), test_mode=True)
    assert (result.steps_completed, result.stop_reason) == (1, "test mode")
    assert rows(result, "validation")[1]["mean_x"] == 0.5
    assert len(result.checkpoints) == 1


def test_weights_can_be_read_without_paceline(fit: Fit, tmp_path: Path) -> None:
    trial, result = fit(max_length=pytorch.Epoch(1))
    from safetensors.torch import load_file

    (path,) = (result.run_dir / "checkpoints").glob(f"{result.checkpoints[-1]}/model_0.safetensors")
    model = nn.Linear(1, 1, bias=False).double()
    model.load_state_dict(load_file(path))
    assert torch.equal(model.weight, trial.model.weight)  # type: ignore[arg-type]


def test_checkpoint_of_another_model_names_the_keys_that_differ(fit: Fit) -> None:
    _, result = fit(max_length=pytorch.Batch(1))
    with pytorch.init(hparams={"global_batch_size": 4}, seed=1, resume=result.run_dir) as context:
        trial = OneWeight(context)
        context.stepper.models[0] = nn.Sequential(nn.Linear(1, 1))
        with pytest.raises(
            pytorch.CheckpointMismatchError, match=r"lacks \['0.bias', '0.weight'\]"
        ):
            pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "`max_length` must be given"),
        ({"max_length": 5}, TypeError, "`max_length` must be a train unit"),
        ({"max_length": pytorch.Batch([1, 2])}, TypeError, "length must be an integer"),
        (
            {"max_length": pytorch.Batch(1), "checkpoint_policy": "bestest"},
            ValueError,
            "one of best, all, none, but got 'bestest'",
        ),
        (
            {"max_length": pytorch.Batch(1), "aggregation_frequency": 0},
            ValueError,
            "`aggregation_frequency`.*at least 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    fit: Fit, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(**options)


def test_tensor_returned_from_evaluate_batch_is_refused(fit: Fit) -> None:
    with pytest.raises(TypeError, match="`evaluate_batch` must return a dictionary"):
        fit({"evaluate": lambda x: x.mean()}, max_length=pytorch.Batch(1))


def test_trial_without_a_wrapped_model_is_refused() -> None:
    class Bare(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context

    with (
        pytorch.init(hparams={"global_batch_size": 4}, seed=1) as context,
        pytest.raises(ValueError, match="wrap at least one model"),
    ):
        pytorch.Trainer(Bare(context), context)


def test_state_files_hold_no_pickle(fit: Fit) -> None:
    _, result = fit(max_length=pytorch.Batch(1))
    directory = result.run_dir / "checkpoints" / result.checkpoints[0]
    kinds = {path.suffix for path in directory.iterdir()}
    assert kinds <= {".json", ".safetensors", ".done"}
    assert json.loads((directory / "training.json").read_text())
