"""A function of forward and backward pass that is computed twice, in a loop of the user's own."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import train
from paceline.core._read_runs import read_alerts
from paceline.journal import RunDirectory

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Counter(nn.Module):
    """Layer with state that nobody knows of, on one rank."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.num_calls = counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.counts
        return x + 1e-3 * self.num_calls


def function(config: dict[str, Any]) -> Any:
    train.enable_reproducibility(3)
    counter = Counter(train.world_rank() == config.get("odd"))
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), counter)
    options = {
        name: config[name]
        for name in ("precision", "gradient_accumulation", "strategy")
        if name in config
    }
    model, optimizer = train.accelerate(net, torch.optim.Adam(net.parameters()), **options)
    loader = train.prepare_data_loader(DataLoader(DATA, batch_size=8, shuffle=True))

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).sum(1, keepdim=True), y)
        train.backward(loss)
        if config.get("extra") == "step":
            optimizer.step()
        if config.get("extra") == "backward":
            train.backward(model(x).sum())
        return loss

    step: Any = compute
    if config.get("every"):
        step = train.verify_steps(
            compute, every=config["every"], on_mismatch=config.get("on_mismatch", "stop")
        )
    for _ in range(2):
        for x, y in loader:
            loss = step(x, y)
            optimizer.step()
            train.report(loss=loss.item())
    state = {name: tensor.tolist() for name, tensor in train.full_state_dict(model).items()}
    return state, torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Trainer]:
    with train.Trainer(num_workers=3, run_dir=tmp_path_factory.mktemp("runs") / "run") as trainer:
        yield trainer


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"gradient_accumulation": 2},
        {"precision": "fp16"},
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
    ],
)
def test_a_training_with_the_check_has_the_same_bits(
    workers: train.Trainer, config: dict[str, Any]
) -> None:
    off, *others = [list(workers.run(function, {**config, "every": each})) for each in (None, 1, 3)]
    assert others == [off, off]


def test_hidden_state_on_one_worker_is_named(workers: train.Trainer) -> None:
    with pytest.raises(RuntimeError, match=r"on rank 2 \(cpu\) these differ: the gradient of `mod"):
        workers.run(function, {"every": 3, "odd": 2})
    alert = read_alerts(RunDirectory(workers.run_dir))[-1]
    assert (alert.level, alert.title) == ("error", "Step 1 gave two results")


def test_a_warning_is_recorded_and_training_goes_on(workers: train.Trainer) -> None:
    workers.run(function, {"every": 3, "odd": 2, "on_mismatch": "warn"})
    alerts = read_alerts(RunDirectory(workers.run_dir))[-3:]
    assert [alert.title for alert in alerts] == [f"Step {n} gave two results" for n in (1, 3, 6)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"extra": "step"}, "`compute` must not step an optimizer by itself"),
        ({"extra": "backward"}, "a step must have one backward pass"),
        (
            {"strategy": "fsdp", "gradient_accumulation": 2},
            "must not be combined with `gradient_ac",
        ),
    ],
)
def test_what_cannot_be_computed_twice_is_refused(
    workers: train.Trainer, config: dict[str, Any], match: str
) -> None:
    with pytest.raises((RuntimeError, ValueError), match=match):
        workers.run(function, {**config, "every": 3})


def test_a_loop_is_refused() -> None:
    with pytest.raises(TypeError, match="must be given a function of forward and backward pass"):
        train.verify_steps([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`verify_steps` must be an integer of at least 1"):
        train.verify_steps(print, every=0)
