"""Trainers of creators whose models are divided among the workers."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.core import NotOfferedError
from paceline.creators import BATCH_SIZE, PyTorchTrainer

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(X, X.sum(1, keepdim=True))
Same = Callable[[Any, Any], bool]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


class Net(nn.Module):
    """A model with a tied weight, a buffer that grows, and sizes that two does not divide."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Dropout(dropout)])
        self.again = nn.Linear(5, 5)
        self.last = nn.Linear(5, 1)
        self.again.weight = self.first.bias  # type: ignore[assignment]
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x * self.again.weight)


def model_creator(config: dict[str, Any]) -> nn.Module:
    return Net(config.get("dropout", 0.0)).double()


def data_creator(config: dict[str, Any]) -> Any:
    size = config.get(BATCH_SIZE, 4)
    return DataLoader(DATA, batch_size=size), DataLoader(DATA, batch_size=size)


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=config.get("lr", 0.01))


def make(**given: Any) -> PyTorchTrainer:
    creators = {
        "model_creator": model_creator,
        "data_creator": data_creator,
        "optimizer_creator": optimizer_creator,
        "loss_creator": nn.MSELoss,
        "scheduler_creator": lambda optimizer, config: StepLR(optimizer, 5, gamma=0.9),
    }
    return PyTorchTrainer(**{**creators, **given})


@pytest.fixture(scope="module")
def trainer() -> Iterator[PyTorchTrainer]:
    """Return a trainer of two workers with a sharded model, which stay from test to test."""
    before = set(threading.enumerate())
    with make(num_workers=2, data_parallel="fsdp") as trainer:
        yield trainer
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


def assert_close(found: Any, expected: Any) -> None:
    for part in ("models", "optimizers", "schedulers"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-9, atol=1e-12)


def straight(beginning: dict[str, Any], num_steps: int) -> Any:
    """Return the model and the optimizer after some batches of 8 in a bare loop."""
    model = model_creator({})
    model.load_state_dict(beginning["models"][0])
    optimizer = optimizer_creator(model, {})
    scheduler = StepLR(optimizer, 5, gamma=0.9)
    for start in range(0, 8 * num_steps, 8):
        x, y = (part[start : start + 8] for part in DATA.tensors)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer


@pytest.mark.long
def test_sharded_model_learns_what_a_whole_one_does(
    trainer: PyTorchTrainer, are_same: Same, tmp_path: Path
) -> None:
    beginning = trainer.state_dict()
    trainer.train(num_steps=3)
    trainer.save(tmp_path / "middle")
    # The last batch has two samples, all of them of the first worker.
    assert trainer.train()["num_samples"] == 26
    end = trainer.state_dict()
    model, optimizer = straight(beginning, 7)
    found: Any = trainer.get_model()
    assert type(found) is Net
    assert found.again.weight is found.first.bias
    torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-12)
    expected = optimizer.state_dict()
    torch.testing.assert_close(end["optimizers"], [expected], rtol=1e-9, atol=1e-12)
    assert are_same(end["models"][0], dict(found.state_dict()))
    # One worker has a batch more to validate on than the other.
    loss = nn.functional.mse_loss(model.eval()(X), DATA.tensors[1]).item()
    assert trainer.validate()["val_loss"] == pytest.approx(loss, rel=1e-9)
    # The same steps once more, in the same bits.
    trainer.load(tmp_path / "middle")
    trainer.train()
    assert are_same(trainer.state_dict(), end)
    own = trainer.apply_all_workers(num_own_values)
    assert sum(own) == sum(p.numel() for p in model.parameters())
    assert max(own) < 0.7 * sum(own)


POLICY = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64)


def num_own_values() -> int:
    from paceline.creators._replica import _replica

    return sum(p._local_tensor.numel() for p in _replica[0].models[0].parameters())  # type: ignore


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_parallel": "overlapped"}, "`data_parallel` must be 'flat' or 'fsdp', but got"),
        ({"data_parallel": "fsdp", "use_fp16": True}, '`use_fp16` must be False or "bf16" with'),
        ({"shard_units": nn.Linear}, '`shard_units` must be None without `data_parallel="fsdp"`'),
        ({"shard_precision": POLICY}, "`shard_precision` must be None without `data_parallel="),
        (
            {"data_parallel": "fsdp", "shard_precision": POLICY, "use_fp16": "bf16"},
            '`precision` must be "fp32" with `shard_precision`',
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(num_workers=2, **options)


@pytest.mark.parametrize("name", ["tensor_plan", "shard_size", "compile", "trainable_only"])
def test_options_of_other_front_doors_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotOfferedError, match=f"`{name}` is not offered for creators. Hint: "):
        make(num_workers=2, **{name: 2})


def train_and_die(
    config: dict[str, Any], model: Any, train_iterator: Any, criterion: Any, optimizer: Any
) -> dict[str, Any]:
    """Leave the gradients of each second batch to the next step, and die once where told."""
    for number, (x, y) in enumerate(train_iterator):
        if number == 2 and os.environ["RANK"] == str(config.get("strike")):
            marker = Path(config["marker"])
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        criterion(model(x), y).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {}


def is_last(module: nn.Module) -> bool:
    return getattr(module, "out_features", 0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_pass_begins_again_after_a_killed_worker(
    rank: int, are_same: Same, tmp_path: Path
) -> None:
    config = {"dropout": 0.2, "strike": rank, "marker": str(tmp_path / "struck")}
    sharded = {"num_workers": 3, "data_parallel": "fsdp", "shard_units": is_last}
    ends: list[Any] = []
    for _ in range(2):
        with make(config=config, train_function=train_and_die, **sharded) as trainer:
            trainer.train(num_steps=2)
            left = trainer.state_dict()["ranks"][0]["gradients"]
            assert any(each is not None for each in left)
            trainer.train()
            ends.append(trainer.state_dict())
        assert Path(config["marker"]).exists()
    assert are_same(ends[0], ends[1])


@pytest.mark.slow
def test_a_state_goes_on_with_other_workers_and_with_whole_models() -> None:
    forms: list[Any] = [(2, "fsdp"), (2, "flat"), (3, "fsdp"), (1, "fsdp")]
    states: list[Any] = []
    beginning = None
    for num_workers, mode in forms:
        # Batches of 12 whatever the number of workers, in their order.
        with make(
            num_workers=num_workers,
            data_parallel=mode,
            train_function=train_and_die,
            data_creator=lambda config: TensorDataset(*(t[:48] for t in DATA.tensors)),
            dataloader_config={"num_workers": 0, "shuffle": False},
            batch_size=12,
        ) as trainer:
            if beginning is None:
                trainer.train(num_steps=2)
                beginning = trainer.state_dict()
                assert any(each is not None for each in beginning["ranks"][0]["gradients"])
            trainer.load_state_dict(beginning)
            # Another number of workers begins the epoch anew.
            trainer.train(num_steps=2 if num_workers == 2 else None)
            states.append(trainer.state_dict())
    assert_close(states[1], states[0])
    assert_close(states[3], states[2])


def validate_backward(model: Any, val_iterator: Any, criterion: Any) -> dict[str, Any]:
    for x, y in val_iterator:
        criterion(model(x), y).backward()
    return {}


@pytest.mark.slow
def test_a_backward_pass_in_a_validation_is_refused() -> None:
    options: dict[str, Any] = {"data_parallel": "fsdp", "validation_function": validate_backward}
    refusal = pytest.raises(RuntimeError, match="A validation must not run backward passes")
    with make(num_workers=2, **options) as trainer, refusal:
        trainer.validate()
