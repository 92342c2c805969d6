"""Workers of creators that have drifted apart."""

import os
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from paceline.creators import PyTorchTrainer, RanksDifferError

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as those of workers end after them."""


def is_odd(config: dict[str, Any]) -> bool:
    return bool(os.environ["RANK"] == str(config["odd"]))


def make_model(config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))


def make_optimizer(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    rate = 0.02 if config["what"] == "rate" and is_odd(config) else 0.01
    return torch.optim.SGD(model.parameters(), lr=rate)


def validate(config: dict[str, Any], model: nn.Module, val_iterator: Any) -> dict[str, Any]:
    if config["what"] == "validation" and is_odd(config):
        with torch.no_grad():
            model[3].weight.mul_(2)  # type: ignore[index, union-attr, operator]
    return {}


def train(config: dict[str, Any], model: nn.Module, train_iterator: Any, optimizer: Any) -> Any:
    for x, y in train_iterator:
        loss = nn.functional.mse_loss(model(x), y)
        parameters = [*model.parameters()]
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()


def make(what: str, odd: int = 0, **options: Any) -> PyTorchTrainer:
    data = TensorDataset(X, X.sum(1, keepdim=True))
    return PyTorchTrainer(
        model_creator=make_model,
        data_creator=options.pop("data_creator", lambda config: (data, data)),
        optimizer_creator=make_optimizer,
        loss_creator=nn.MSELoss,
        train_function=train if what == "autograd" else None,
        validation_function=validate,
        config={"what": what, "odd": odd},
        dataloader_config={},
        batch_size=12,
        num_workers=3,
        **options,
    )


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("rate", "lr of group 0 of optimizer 0"),
        ("autograd", "model_0.0.weight"),
        ("validation", "model_0.3.weight"),
    ],
)
def test_what_differs_is_named_with_the_ranks(what: str, name: str, odd: int) -> None:
    with make(what, odd) as trainer:
        passes = (trainer.train, trainer.validate, trainer.train)
        with pytest.raises(RanksDifferError, match=f"`{name}` must be the same"):
            any(run() is None for run in passes)


def test_batch_norm_dropout_and_initial_weights_are_no_difference() -> None:
    with make("") as trainer:
        assert trainer.train()["batch_count"] == 4
        assert trainer.state_dict()["num_steps"] == 4


def test_nothing_is_compared_if_that_is_turned_off() -> None:
    with make("rate", 2, check_ranks=False) as trainer:
        assert trainer.train()["batch_count"] == 4


def data_of(config: dict[str, Any]) -> Any:
    """Return another training part or validation part on a rank."""
    data, odd = TensorDataset(X, X.sum(1, keepdim=True)), is_odd(config)
    parts: dict[str, Any] = {
        "split": (Subset(data, range(12, 48)), Subset(data, range(12))),
        "samples": (data, data),
        "length": (data, data),
    }
    if odd:
        other = TensorDataset(X + 1, X.sum(1, keepdim=True))
        parts = {
            "split": (Subset(data, range(36)), Subset(data, range(36, 48))),
            "samples": (data, DataLoader(other, batch_size=4)),
            "length": (Subset(data, range(36)), data),
        }
    return parts[config["what"]]


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", ["split", "samples", "length"])
def test_data_that_depend_on_the_rank_are_refused_with_ranks(what: str, odd: int) -> None:
    part = "validation" if what == "samples" else "training"
    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    said = (
        f"The {part} data must have .* those of rank {odd} are others than those of ranks {others}"
    )
    with pytest.raises(ValueError, match=said), make(what, odd, data_creator=data_of) as trainer:
        trainer.train()


def test_data_of_each_rank_are_taken_if_workers_share_none_or_nothing_is_compared() -> None:
    for options in ({"add_dist_sampler": False}, {"check_ranks": False}):
        with make("split", 2, data_creator=data_of, **options) as trainer:
            assert trainer.train()["batch_count"] > 0
