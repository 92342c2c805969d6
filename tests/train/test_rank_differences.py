"""Ranks of a train function that have drifted apart; no rank waits for another one."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.head = nn.Linear(4, 1)
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def function(config: dict[str, Any]) -> float:
    what, mode = config["what"], config.get("mode", "flat")
    is_odd = train.world_rank() == config.get("odd")
    model: Any = Net()
    if what != "initialisation":
        model = train.prepare_model(model, data_parallel=mode)
    plain = getattr(model, "module", model)
    if what == "weights" and is_odd:
        with torch.no_grad():
            plain.head.weight.add_(1)
    rate = 0.02 if what == "rate" and is_odd else 0.01
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=rate))
    loader = train.prepare_data_loader(DataLoader(DATA, batch_size=8, shuffle=True))
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            if what == "autograd":
                parameters = [*model.parameters()]
                gradients = torch.autograd.grad(loss, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            else:
                train.backward(loss)
            optimizer.step()
        if what == "validation" and is_odd and epoch == config["epoch"]:
            with torch.no_grad():
                plain.head.weight.mul_(2)
        if what == "queue":
            plain.queue.fill_(train.world_rank())
        train.report(epoch=epoch)
        if config.get("saves", True):
            train.save_checkpoint(epoch=epoch)
    return loss.item()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Trainer]:
    with train.Trainer(num_workers=3, run_dir=tmp_path_factory.mktemp("runs") / "run") as trainer:
        yield trainer


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


GROUPS = {0: "one on rank 0, one on ranks 1, 2", 2: "one on ranks 0, 1, one on rank 2"}
EACH = "3 values: one on rank 0, one on rank 1, one on rank 2"


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("weights", "model_0.head.weight"),
        ("rate", "lr of group 0 of optimizer 0"),
        ("initialisation", "parameter 0 of optimizer 0"),
        ("autograd", "model_0.body.0.weight"),
        ("validation", "model_0.head.weight"),
    ],
)
def test_the_first_tensor_that_differs_is_named_with_the_ranks(
    workers: train.Trainer, what: str, name: str, odd: int
) -> None:
    said = {"initialisation": EACH, "autograd": EACH, "rate": "is 0.0"}.get(what, GROUPS[odd])
    hint = "set it alike" if what == "rate" else "run backward passes"
    said = f"`{re.escape(name)}` must be .*{said}.* Hint: {hint}"
    with pytest.raises(train.RanksDifferError, match=said):
        workers.run(function, {"what": what, "odd": odd, "epoch": 1})


@pytest.mark.parametrize("odd", [0, 2])
def test_a_difference_at_the_last_checkpoint_is_found_and_the_checkpoint_is_not_kept(
    workers: train.Trainer, odd: int
) -> None:
    with pytest.raises(train.RanksDifferError, match=r"`model_0.head.weight` must be the same"):
        workers.run(function, {"what": "validation", "odd": odd, "epoch": 2})
    assert workers.get_last_checkpoint() == {"epoch": 1}


@pytest.mark.long
def test_a_function_without_checkpoints_is_compared_at_its_start(workers: train.Trainer) -> None:
    with pytest.raises(train.RanksDifferError, match=r"`model_0.head.weight` must be the same"):
        workers.run(function, {"what": "weights", "odd": 2, "mode": "overlapped", "saves": False})


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", ["autograd", "validation"])
def test_a_function_without_checkpoints_is_compared_at_its_end(
    workers: train.Trainer, what: str, odd: int
) -> None:
    with pytest.raises(train.RanksDifferError, match=r"`model_0.* must be the same"):
        workers.run(function, {"what": what, "odd": odd, "epoch": 2, "saves": False})


class LateStore:
    """Store in which a digest of the end arrives after a second; answers keep the calls' order."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._threads: list[Timer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: bytes) -> None:
        if "/end/" not in key:
            self._store.set(key, value)
            return
        self._threads.append(Timer(1, self._store.set, (key, value)))
        self._threads[-1].start()

    def check(self, keys: list[str]) -> Any:
        for thread in self._threads:
            thread.join()
        return self._store.check(keys)


def function_with_a_late_store(config: dict[str, Any]) -> None:
    c10d: Any = torch.distributed.distributed_c10d
    late = LateStore(c10d._get_default_store())
    if train.world_rank() == 1:
        c10d._get_default_store = lambda: late
    function(config)


def test_ranks_are_compared_at_the_end_if_the_digest_of_one_arrives_late(tmp_path: Path) -> None:
    config = {"what": "validation", "odd": 0, "epoch": 2, "saves": False}
    with (
        train.Trainer(num_workers=3, run_dir=tmp_path / "run") as workers,
        pytest.raises(train.RanksDifferError, match=r"`model_0.* must be the same"),
    ):
        workers.run(function_with_a_late_store, config)


def with_a_loader_alone(config: dict[str, Any]) -> None:
    """Prepare nothing but the loader, and sum gradients as `what` says."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 1)
    if config["what"] == "own wrapper":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in train.prepare_data_loader(DataLoader(DATA, batch_size=10)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if config["what"] == "own sum":
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
    if config["saves"]:
        train.save_checkpoint(model=model.state_dict())


@pytest.mark.parametrize("saves", [True, False])
def test_ranks_that_train_alone_on_the_batches_of_a_prepared_loader_are_refused(
    workers: train.Trainer, saves: bool
) -> None:
    said = r"`parameter 0 of SGD 0, not prepared` must be .* Hint: .* prepare \(or wrap\)"
    with pytest.raises(train.RanksDifferError, match=said):
        workers.run(with_a_loader_alone, {"what": "nothing", "saves": saves})
    with train.Trainer(num_workers=1) as trainer:
        assert trainer.run(with_a_loader_alone, {"what": "nothing", "saves": saves}) == [None]


@pytest.mark.long
@pytest.mark.parametrize("what", ["own wrapper", "own sum"])
def test_sums_of_ones_own_are_no_difference(workers: train.Trainer, what: str) -> None:
    assert workers.run(with_a_loader_alone, {"what": what, "saves": True}) == [None] * 3


def after_the_last_step(config: dict[str, Any]) -> None:
    """Do on rank 0 alone what other ranks need not do, and stop being trained."""
    model: Any = train.prepare_model(nn.Linear(4, 1))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in train.prepare_data_loader(DataLoader(DATA, batch_size=8)):
        optimizer.zero_grad()
        train.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    if config["what"] == "saved":
        train.save_checkpoint(model=model)
    if train.world_rank() == 0:
        if config["what"] == "saved":
            model.weight.data.zero_()
        if config["what"] == "moved":
            model.to("meta")
    if config["what"] == "raises" and train.world_rank() == 1:
        model.weight.data.zero_()
        raise ZeroDivisionError
    if config["what"] == "left":
        torch.distributed.destroy_process_group()


def test_what_one_rank_does_with_its_model_at_the_end_is_no_difference(
    workers: train.Trainer,
) -> None:
    for what in ("saved", "moved"):
        assert workers.run(after_the_last_step, {"what": what}) == [None] * 3
    with pytest.raises(ZeroDivisionError):
        workers.run(after_the_last_step, {"what": "raises"})
    with train.Trainer(num_workers=2) as trainer:
        assert trainer.run(after_the_last_step, {"what": "left"}) == [None] * 2


@pytest.mark.long
@pytest.mark.parametrize("mode", ["flat", "overlapped", "fsdp"])
def test_batch_norm_dropout_and_shards_are_no_difference(workers: train.Trainer, mode: str) -> None:
    assert len(workers.run(function, {"what": "", "mode": mode})) == 3


def test_a_buffer_of_each_rank_is_refused_unless_it_is_named_or_nothing_is_compared(
    workers: train.Trainer,
) -> None:
    said = "`model_0.queue` must be the same .* Hint: compute it from what all ranks have"
    with pytest.raises(train.RanksDifferError, match=said):
        workers.run(function, {"what": "queue"})
    for chosen in (["queue"], False):
        with train.Trainer(num_workers=2, check_ranks=chosen) as trainer:
            assert len(trainer.run(function, {"what": "queue"})) == 2
    with pytest.raises(TypeError, match="`check_ranks` must be True, False or names"):
        train.Trainer(num_workers=0, check_ranks=3)  # type: ignore[arg-type]


def in_copies(config: dict[str, Any]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = train.prepare_model(layers, data_parallel="fsdp", shard_size=2)
    if train.world_rank() == config["odd"]:
        with torch.no_grad():
            model[0].weight.to_local().add_(1)  # type: ignore[index]
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in train.prepare_data_loader(DataLoader(DATA, batch_size=8)):
        optimizer.zero_grad()
        train.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


@pytest.mark.long
def test_shards_are_compared_with_those_of_the_other_copies() -> None:
    with train.Trainer(num_workers=4) as trainer:
        trainer.run(in_copies, {"odd": None})
        for odd, ranks in ((0, "on rank 0, one on rank 2"), (3, "on rank 1, one on rank 3")):
            with pytest.raises(train.RanksDifferError, match=f"`model_0.0.weight .*{ranks}"):
                trainer.run(in_copies, {"odd": odd})
