"""What a trial or its data must not be: each refused with a message that says what to do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    """A linear model whose parts a test can replace."""

    num_samples = 6

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(self.num_samples, 1)), batch_size=2)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)


class ByBatch(Trial):
    """The same with a validation."""

    def evaluate_batch(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).mean()}


class NoOptimizer(ByBatch):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.wrap_model(nn.Linear(1, 1))


class Both(ByBatch):
    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return {}


class NoSamples(ByBatch):
    num_samples = 0

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(0, 1)), batch_size=2)


class EmptyStream(ByBatch):
    def build_training_data_loader(self) -> Any:
        class Nothing(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(())

        return DataLoader(Nothing(), batch_size=2)


class NoValidationSamples(ByBatch):
    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(0, 1)), batch_size=2)


class NoLoader(ByBatch):
    def build_training_data_loader(self) -> Any:
        return [torch.ones(2, 1)]


class Unbatched(ByBatch):
    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=None)


class ChangingKeys(ByBatch):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"]
        return {"loss": loss} if batch_idx < 2 else {"other": loss}


class ChangingValidationKeys(ByBatch):
    def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> Any:
        return {f"loss_{batch_idx}": 0.0}


class ReturnsNothing(ByBatch):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return None


class LostScheduler(ByBatch):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        other = torch.optim.SGD(self.model.parameters(), lr=0.1)
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(other, 1),
            pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fit(trial_class: type[Trial], hparams: Any = None, **options: Any) -> pytorch.Result:
    hparams = {"global_batch_size": 2} if hparams is None else hparams
    with pytorch.init(hparams=hparams, seed=1) as context:
        trainer = pytorch.Trainer(trial_class(context), context)
        return trainer.fit(**{"max_length": pytorch.Epoch(1), **options})


@pytest.mark.parametrize(
    ("trial_class", "error", "message"),
    [
        (NoOptimizer, ValueError, "must wrap at least one optimizer. Hint: self.optimizer ="),
        (Both, ValueError, "exactly one of .* but Both overrides both"),
        (Trial, ValueError, "exactly one of .* but Trial overrides neither"),
        (NoSamples, ValueError, "must have samples, but its data set is empty"),
        (NoValidationSamples, ValueError, "must have samples, but its data set is empty"),
        (NoLoader, TypeError, "must be a torch.utils.data.DataLoader, but got list"),
        (Unbatched, ValueError, "`batch_size` is None. Hint: give `batch_size`"),
        (
            ChangingKeys,
            pytorch.KeySetError,
            r"one returned \['other'\] and those before \['loss'\]",
        ),
        (
            ChangingValidationKeys,
            pytorch.KeySetError,
            r"one returned \['loss_1'\] and those before \['loss_0'\]",
        ),
        (ReturnsNothing, TypeError, "`train_batch` must return a dictionary .* NoneType"),
        (LostScheduler, ValueError, "optimizer must be wrapped first"),
    ],
)
def test_broken_trials_are_refused(
    trial_class: type[Trial], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(trial_class)


def test_stream_without_samples_ends_training_and_says_so() -> None:
    result = fit(EmptyStream)
    assert (result.stop_reason, result.steps_completed) == ("no more data", 0)


@pytest.mark.parametrize("size", ["32", 32.0, True, 0, None])
def test_global_batch_size_must_be_an_integer(size: Any) -> None:
    with (
        pytest.raises(ValueError, match=r"`hparams.global_batch_size` must be an integer"),
        pytorch.init(hparams={"global_batch_size": size}, seed=1) as context,
    ):
        context.get_per_slot_batch_size()


def test_facts_that_need_training_are_refused_before_it() -> None:
    with pytorch.init(hparams={"global_batch_size": 2}, seed=1) as context:
        for ask in (context.current_train_batch, context.current_train_epoch, context.is_epoch_end):
            with pytest.raises(RuntimeError, match="before training"):
                ask()
        with pytest.raises(KeyError, match="no hyperparameter 'lr'"):
            context.get_hparam("lr")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_shards": 0}, ValueError, "`num_shards` must be an integer of at least 1"),
        (
            {"data_parallel": "gossip"},
            ValueError,
            "'flat', 'overlapped', 'fsdp' or 'horovod', but got 'gossip'",
        ),
        ({"data_parallel": "horovod"}, ImportError, "needs Horovod, built for this torch"),
    ],
)
def test_wrong_arguments_of_init_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        pytest.raises(error, match=message),
        pytorch.init(hparams={"global_batch_size": 2}, seed=1, **options),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reporting_period": 100}, "`reporting_period` must be a train unit"),
        ({"validation_period": "epoch"}, "`validation_period` must be a train unit"),
    ],
)
def test_periods_must_be_units(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fit(ByBatch, **options)


# The batch size and an option that have no effect as they are, told as often as asked for.
ODD_SETTINGS = """
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from paceline import pytorch

with pytorch.init(hparams={"global_batch_size": 7}, seed=1) as context:
    assert [context.get_per_slot_batch_size() for _ in range(2)] == [2, 2]
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    context.wrap_model(nn.Linear(1, 1), shard_precision=precision)
"""


def test_a_setting_without_effect_is_told_once_for_all_ranks(
    torch_ranks: Any, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ODD_SETTINGS)
    environment = clean_environment | {"OMP_NUM_THREADS": "1"}
    result = torch_ranks.run(3, script, directory=tmp_path, environment=environment)
    assert result.returncode == 0, result.stdout
    told = "`global_batch_size` 7 is no multiple of 3 shards: 6 samples are used per step."
    assert result.stdout.count(told) == 1
    assert result.stdout.count("`shard_precision` has no effect") == 1
