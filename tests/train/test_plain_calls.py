"""Train functions of plain PyTorch on 1, 2 and 3 workers."""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def fit(config: dict[str, Any]) -> list[str]:
    """Train 3 epochs, whose last batch has 2 samples; return the weights."""
    torch.manual_seed(0)
    model = train.prepare_model(nn.Linear(4, 1).double())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if config["kind"] == "closure":
        # It calls the closure as often as the loss asks for.
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe"
        )
        optimizer = train.prepare_optimizer(optimizer)
    data = TensorDataset(X, X.sum(1, keepdim=True))
    size = 12 // train.world_size()
    loader = train.prepare_data_loader(DataLoader(data, batch_size=size))
    for _ in range(3):
        for x, y in loader:

            def closure(x: Any = x, y: Any = y) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            if config["kind"] == "closure":
                optimizer.step(closure)
                continue
            closure()
            if config["kind"] == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [value.hex() for value in weights.tolist()]


@pytest.mark.parametrize("kind", ["plain", "clipped", "closure"])
def test_a_plain_train_function_trains_all_workers_as_one(kind: str) -> None:
    results = {}
    for num_workers in (1, 2, 3):
        with train.Trainer(num_workers=num_workers) as trainer:
            results[num_workers] = trainer.run(fit, config={"kind": kind})
    expected = [float.fromhex(value) for value in results[1][0]]
    for num_workers in (2, 3):
        weights = results[num_workers]
        assert all(of_worker == weights[0] for of_worker in weights)
        values = [float.fromhex(value) for value in weights[0]]
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-9)
