"""Parameters that are trained later than the first step, compared with a plain loop."""

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

GLOBAL_BATCH = 24
X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0)).double()
DATA = TensorDataset(X, X.sum(1, keepdim=True))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


@pytest.fixture(scope="module", params=[1, 3])
def workers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Trainer]:
    path = tmp_path_factory.mktemp("runs") / "run"
    with train.Trainer(num_workers=request.param, run_dir=path) as trainer:
        yield trainer


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (1 + number))
    return model


def make_scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(1).double())


def function(config: dict[str, Any]) -> Any:
    """Train a layer, then another one; or a parameter that is added to the optimizer late."""
    is_plain, what = config.get("is_plain"), config["what"]
    model: Any = make_model()
    model[0].requires_grad_(what != "thawed")
    scale = make_scale()
    size = GLOBAL_BATCH if is_plain else GLOBAL_BATCH // train.world_size()
    loader: Any = DataLoader(DATA, batch_size=size)
    if not is_plain:
        model = train.prepare_model(model, data_parallel=config.get("mode", "flat"))
        loader = train.prepare_data_loader(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if not is_plain:
        optimizer = train.prepare_optimizer(optimizer)
    own = torch.optim.SGD([scale], lr=0.05)
    for epoch in range(2):
        if epoch == 1 and what == "thawed":
            getattr(model, "module", model)[0].requires_grad_(True)
        if epoch == 1 and what == "added":
            optimizer.add_param_group({"params": [scale], "lr": 0.01})
        for x, y in loader:
            optimizer.zero_grad()
            own.zero_grad()
            nn.functional.mse_loss(model(x) * scale, y).backward()
            optimizer.step()
            if what == "not prepared":
                own.step()
        if config.get("saves"):
            train.save_checkpoint(epoch=epoch)
    return [p.detach() for p in model.parameters()], scale.detach()


@pytest.mark.parametrize("mode", ["flat", "overlapped"])
@pytest.mark.parametrize("what", ["thawed", "added"])
def test_parameters_that_come_later_are_trained_as_in_a_plain_loop(
    workers: train.Trainer, what: str, mode: str
) -> None:
    expected = function({"what": what, "is_plain": True})
    for found in workers.run(function, {"what": what, "mode": mode, "saves": True}):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("saves", [True, False])
def test_an_optimizer_of_ones_own_whose_gradients_nobody_sums_is_named(
    workers: train.Trainer, saves: bool
) -> None:
    config = {"what": "not prepared", "saves": saves}
    if workers.num_workers == 1:
        torch.testing.assert_close(
            workers.run(function, config)[0], function({**config, "is_plain": True, "saves": False})
        )
        return
    said = (
        r"`parameter 0 of SGD 0, not prepared` must be the same .* prepare \(or wrap\) each model"
    )
    with pytest.raises(train.RanksDifferError, match=said):
        workers.run(function, config)
