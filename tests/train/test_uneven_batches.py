"""Last batches that leave workers without samples, compared with a plain loop."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

GLOBAL_BATCH, NUM_SAMPLES = 24, 80
X = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0)).double()
DATA = TensorDataset(X, X.sum(1, keepdim=True))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


@pytest.fixture(scope="module", params=[1, 2, 3])
def workers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Trainer]:
    path = tmp_path_factory.mktemp("runs") / "run"
    with train.Trainer(num_workers=request.param, run_dir=path) as trainer:
        yield trainer


def make_model() -> nn.Module:
    model = nn.Linear(4, 1).double()
    nn.init.constant_(model.weight, 0.1)
    nn.init.constant_(model.bias, 0.2)
    return model


def plain_loop() -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(DATA, batch_size=GLOBAL_BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def optimizer_alone() -> dict[str, Any]:
    model = make_model()
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    size = GLOBAL_BATCH // train.world_size()
    loader = train.prepare_data_loader(DataLoader(DATA, batch_size=size))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            # A loop without gradients, in which each worker has its own samples only.
            assert sum(len(x) for x, _ in loader) <= NUM_SAMPLES
    return model.state_dict()


def samples_of_steps() -> list[list[float]]:
    size = GLOBAL_BATCH // train.world_size()
    loader = DataLoader(DATA, batch_size=size, drop_last=True)
    steps = [x[:, 0].tolist() for x, _ in train.prepare_data_loader(loader)]
    assert len(train.prepare_data_loader(loader)) == len(steps)
    return steps


def test_drop_last_drops_the_same_samples_with_any_number_of_workers(
    workers: train.Trainer,
) -> None:
    by_rank = workers.run(samples_of_steps)
    steps = [[x for part in parts for x in part] for parts in zip(*by_rank, strict=True)]
    plain = DataLoader(DATA, batch_size=GLOBAL_BATCH, drop_last=True)
    assert steps == [x[:, 0].tolist() for x, _ in plain]


def test_an_optimizer_prepared_alone_trains_as_a_plain_loop(workers: train.Trainer) -> None:
    for state in workers.run(optimizer_alone):
        torch.testing.assert_close(state, plain_loop())


def collected(config: dict[str, Any]) -> dict[str, Any]:
    model = train.prepare_model(make_model(), data_parallel=config["mode"])
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    size, data = GLOBAL_BATCH // train.world_size(), TensorDataset(*DATA[: config["samples"]])
    batches = list(train.prepare_data_loader(DataLoader(data, batch_size=size)))
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return train.full_state_dict(model)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["flat", "overlapped"])
@pytest.mark.parametrize("samples", [46, 56])
def test_training_on_collected_batches_of_unequal_weights_is_refused(
    workers: train.Trainer, samples: int, mode: str
) -> None:
    def run() -> Any:
        return workers.run(collected, {"samples": samples, "mode": mode})

    if workers.num_workers == 1:
        run()
        return
    with pytest.raises(RuntimeError, match="must come within the loop over the prepared loader"):
        run()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["flat", "overlapped"])
def test_collected_batches_of_equal_weights_are_trained_on(
    workers: train.Trainer, mode: str
) -> None:
    assert len(workers.run(collected, {"samples": 48, "mode": mode})) == workers.num_workers
