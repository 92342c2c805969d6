"""Batches that the default train function computes twice."""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core._read_runs import read_alerts
from paceline.creators import PyTorchTrainer, StepsDifferError
from paceline.journal import RunDirectory

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as those of workers end after them."""


class Counter(nn.Module):
    """Layer with state that nobody knows of, on one rank."""

    def __init__(self, odd: int | None) -> None:
        super().__init__()
        self.odd, self.num_calls = odd, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.num_calls += rank == self.odd
        return x + 1e-3 * self.num_calls


def make_model(config: dict[str, Any]) -> nn.Module:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), Counter(config["odd"])]
    return nn.Sequential(*layers, nn.Linear(4, 1))


def make(odd: int | None = None, num_workers: int = 3, **options: Any) -> PyTorchTrainer:
    data = TensorDataset(X, X.sum(1, keepdim=True))
    return PyTorchTrainer(
        model_creator=make_model,
        data_creator=lambda config: data,
        optimizer_creator=lambda model, config: torch.optim.Adam(model.parameters()),
        loss_creator=nn.MSELoss,
        validation_function=False,
        config={"odd": odd},
        dataloader_config={},
        batch_size=12,
        num_workers=num_workers,
        **options,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_workers", "options"),
    [(1, {}), (3, {}), (3, {"data_parallel": "fsdp"}), (1, {"use_fp16": True})],
)
def test_a_training_with_the_check_has_the_same_bits(
    num_workers: int, options: dict[str, Any]
) -> None:
    ends = []
    for verify_steps in (None, 1, 3):
        with make(num_workers=num_workers, verify_steps=verify_steps, **options) as trainer:
            statistics = [trainer.train(), trainer.train(num_steps=3)]
            model = trainer.get_model()
        state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        ends.append((state, [each["train_loss"] for each in statistics]))
    assert ends[1:] == [ends[0]] * 2


def test_hidden_state_on_one_worker_is_named_and_ends_the_training() -> None:
    trainer = make(odd=2, verify_steps=3)
    with trainer, pytest.raises(StepsDifferError, match=r"on rank 2 \(cpu\) these differ: the gra"):
        trainer.train(max_retries=0)
    (alert,) = read_alerts(RunDirectory(trainer.run_dir))
    assert alert.level == "error"
    assert "Step 1 must give the same bits" in alert.description
    assert "the gradient of `model_0.0.weight`" in alert.description


def test_warnings_are_recorded_and_training_goes_on() -> None:
    with make(odd=0, verify_steps=3, on_mismatch="warn") as trainer:
        assert trainer.train()["batch_count"] == 4
    alerts = read_alerts(RunDirectory(trainer.run_dir))
    assert [alert.title for alert in alerts] == [
        "Step 1 gave two results",
        "Step 3 gave two results",
    ]
    assert {alert.level for alert in alerts} == {"warn"}


def test_a_loop_of_the_users_own_is_refused() -> None:
    with pytest.raises(ValueError, match="`verify_steps` must be None with a `train_function`"):
        make(verify_steps=3, train_function=lambda model, train_iterator: {})
    with pytest.raises(ValueError, match="`on_mismatch` must be one of 'stop', 'warn'"):
        make(on_mismatch="go")
