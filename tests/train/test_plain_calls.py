"""Train functions of plain PyTorch on 1, 2 and 3 workers."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
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


class Warnings(logging.Handler):
    """Keeps what is told of changed gradients."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.texts += [text] * ("must not change gradients" in text)


def fit_clipped(config: dict[str, Any]) -> dict[str, Any]:
    """Train with clipping, by a hook or by hand; return the weights and the warnings."""
    warnings = Warnings()
    logging.getLogger("paceline").addHandler(warnings)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = train.accelerate(
        model,
        optimizer=optimizer,
        data_parallel=config["data_parallel"],
        gradient_accumulation=config["window"],
    )

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    if config["way"] == "hook":
        optimizer.register_step_pre_hook(clip)
    size = 12 // train.world_size()
    loader = train.prepare_data_loader(
        DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=size)
    )
    for _ in range(3):
        for x, y in loader:
            train.backward(nn.functional.mse_loss(model(x), y))
            if config["way"] == "by hand":
                clip()
            optimizer.step()
            optimizer.zero_grad()
    logging.getLogger("paceline").removeHandler(warnings)
    state = train.full_state_dict(model)
    weights = torch.cat([value.flatten() for value in state.values()])
    return {"weights": weights.tolist(), "warnings": warnings.texts}


def clipped_by_torch(batch_size: int) -> list[float]:
    """Return the weights after the same training in batches that one process takes whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x in X.split(batch_size) * 3:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    weights: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights


@pytest.fixture(scope="module")
def trainers() -> Iterator[Mapping[int, train.Trainer]]:
    """Return trainers by their number of workers, which are ready."""
    with ExitStack() as stack:
        sizes = (1, 2, 3)
        by_size = {n: stack.enter_context(train.Trainer(num_workers=n)) for n in sizes}
        for trainer in by_size.values():
            trainer.start()
        yield by_size


@pytest.mark.parametrize("kind", ["plain", "clipped", "closure"])
def test_a_plain_train_function_trains_all_workers_as_one(trainers: Any, kind: str) -> None:
    results = {size: trainer.run(fit, config={"kind": kind}) for size, trainer in trainers.items()}
    expected = [float.fromhex(value) for value in results[1][0]]
    for num_workers in (2, 3):
        weights = results[num_workers]
        assert all(of_worker == weights[0] for of_worker in weights)
        values = [float.fromhex(value) for value in weights[0]]
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("data_parallel", "window", "way"),
    [
        *product(["flat", "overlapped", "fsdp"], [1], ["by hand"]),
        *product(["flat", "fsdp"], [2], ["hook", "by hand"]),
    ],
)
def test_clipping_of_whole_gradients_is_that_of_one_process_and_of_a_part_is_told(
    trainers: Any, data_parallel: str, window: int, way: str
) -> None:
    config = {"data_parallel": data_parallel, "window": window, "way": way}
    results = {size: [*trainer.run(fit_clipped, config)] for size, trainer in trainers.items()}
    is_right = (window, way) != (2, "by hand")
    for found in results.values():
        assert all(each["weights"] == found[0]["weights"] for each in found)
        # The first worker tells it for all, once.
        assert [len(each["warnings"]) for each in found] == [not is_right] + [0] * (len(found) - 1)
        for text in found[0]["warnings"]:
            assert text.startswith("`fit_clipped` must not change gradients before they are")
            assert "as a step has 2 batches" in text
            assert "optimizer.register_step_pre_hook(clip)" in text
    expected = pytest.approx(clipped_by_torch(12 * window), rel=1e-9)
    for found in results.values():
        assert (found[0]["weights"] == expected) == is_right
