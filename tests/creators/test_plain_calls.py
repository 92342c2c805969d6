"""Train functions of plain PyTorch on 1, 2 and 3 workers."""

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.creators import PyTorchTrainer

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sgd(model: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def lbfgs(model: Any, config: Any) -> torch.optim.Optimizer:
    """Return what calls its closure as often as the loss asks for."""
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


def step(model: Any, loss_of: Callable[[], Any], optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def clipped_step(model: Any, loss_of: Callable[[], Any], optimizer: Any) -> None:
    loss_of().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()


def closure_step(model: Any, loss_of: Callable[[], Any], optimizer: Any) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def scaled_step(model: Any, loss_of: Callable[[], Any], optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def validate(model: Any, iterator: Any) -> dict[str, Any]:
    """Go backward as well, with unequally many batches on the workers."""
    for x, y in iterator:
        nn.functional.mse_loss(model(x), y).backward()
    model.zero_grad()
    return {"done": 1.0}


def train_with(take: Callable[..., None], optimizer_of: Any, num_workers: int) -> list[list[str]]:
    """Train 3 epochs, whose last batch has 2 samples; return the weights of each worker."""

    def train(model: Any, iterator: Any, criterion: Any, optimizer: Any) -> dict[str, Any]:
        for x, y in iterator:
            take(model, lambda x=x, y=y: criterion(model(x), y), optimizer)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return {"weights": [value.hex() for value in weights.tolist()]}

    data = TensorDataset(X, X.sum(1, keepdim=True))
    with PyTorchTrainer(
        model_creator=lambda config: nn.Linear(4, 1).double(),
        data_creator=lambda config: (data, TensorDataset(X[:5], X[:5, :1])),
        optimizer_creator=optimizer_of,
        loss_creator=nn.MSELoss,
        train_function=train,
        validation_function=validate,
        batch_size=12,
        num_workers=num_workers,
    ) as trainer:
        for _ in range(3):
            told = trainer.train(reduce_results=False)
            trainer.validate()
    return [of_worker["weights"] for of_worker in told]


@pytest.mark.long
@pytest.mark.parametrize(
    ("take", "optimizer_of"),
    [
        pytest.param(step, sgd, marks=pytest.mark.slow),
        (clipped_step, sgd),
        pytest.param(scaled_step, sgd, marks=pytest.mark.slow),
        (closure_step, lbfgs),
    ],
)
def test_a_plain_train_function_trains_all_workers_as_one(take: Any, optimizer_of: Any) -> None:
    expected = [float.fromhex(value) for value in train_with(take, optimizer_of, 1)[0]]
    for num_workers in (2, 3):
        weights = train_with(take, optimizer_of, num_workers)
        assert len(weights) == num_workers
        assert all(of_worker == weights[0] for of_worker in weights)
        values = [float.fromhex(value) for value in weights[0]]
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-9)
