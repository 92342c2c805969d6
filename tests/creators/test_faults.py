"""Workers that are killed during passes: what comes of it, bit for bit."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from paceline.creators import (
    PyTorchTrainer,
    TrainingFailedError,
    WorkerFailedError,
    WorkersLostError,
)

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
Same = Callable[[Any, Any], bool]


class Deadly(Dataset[Any]):
    """Samples with noise of the process's own; while a file is there, one rank dies for it.

    The file says which rank, at which of its samples, and is taken away by that.
    """

    def __init__(self, order: Path) -> None:
        self._order = order
        self._num_given = 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        self._die_if_ordered()
        return X[index] + 0.01 * torch.randn(4), Y[index]

    def _die_if_ordered(self) -> None:
        try:
            rank, last = map(int, self._order.read_text().split())
        except FileNotFoundError:
            return
        self._num_given += os.environ["RANK"] == str(rank)
        if self._num_given > last:
            self._order.unlink()
            is_loader = torch.utils.data.get_worker_info() is not None
            os.kill(os.getppid() if is_loader else os.getpid(), signal.SIGKILL)


def model_creator(config: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))


def data_creator(config: dict[str, Any]) -> Any:
    data = Deadly(Path(config["order"]))
    options = {"num_workers": config["num_loader_workers"]}
    return DataLoader(data, batch_size=3, shuffle=True, **options), DataLoader(data, batch_size=5)


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def scheduler_creator(optimizer: Any, config: dict[str, Any]) -> Any:
    return StepLR(optimizer, step_size=1, gamma=0.9)


def by_hand(
    model: Any, train_iterator: Any, criterion: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Accumulate two batches in each step, and leave the rest to the next pass."""
    loss = None
    for index, (x, y) in enumerate(train_iterator):
        loss = criterion(model(x), y) / 2
        loss.backward()
        if index % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    return {"loss": loss}


def make(order: Path, **given: Any) -> PyTorchTrainer:
    config = {"order": str(order), "num_loader_workers": given.pop("num_loader_workers", 0)}
    return PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        nn.MSELoss,
        scheduler_creator,
        config=config,
        **{"num_workers": 3, **given},
    )


PASSES = (None, 3, 1, None)


def run_passes(trainer: PyTorchTrainer, order: Path, deaths: dict[int, str]) -> list[Any]:
    told = []
    for number, num_steps in enumerate(PASSES):
        if number in deaths:
            order.write_text(deaths[number])
        told.append(trainer.train(num_steps=num_steps, checkpoint="auto"))
        assert not order.exists()
    return told


# With three ranks, as at two the order of additions does not matter.
@pytest.mark.parametrize(
    ("given", "deaths"),
    [
        ({}, {1: "1 4", 3: "0 2"}),
        pytest.param({"train_function": by_hand}, {1: "2 4", 3: "1 2"}, marks=pytest.mark.slow),
        pytest.param({"num_loader_workers": 1}, {0: "0 1"}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 1}, {0: "0 9", 2: "0 1"}, marks=pytest.mark.slow),
    ],
)
def test_kills_during_passes_change_no_bit(
    given: dict[str, Any], deaths: dict[int, str], tmp_path: Path, are_same: Same
) -> None:
    order = tmp_path / "order"
    with make(order, **given) as trainer:
        beginning = trainer.state_dict()
        undisturbed = run_passes(trainer, order, {}), trainer.validate(), trainer.state_dict()
        trainer.load_state_dict(beginning)
        pids = trainer.apply_all_workers(os.getpid)
        disturbed = run_passes(trainer, order, deaths), trainer.validate(), trainer.state_dict()
        assert not set(pids) & set(trainer.apply_all_workers(os.getpid))
    assert are_same(disturbed, undisturbed)
    assert not are_same(beginning, undisturbed[2])


def test_too_many_losses_are_an_error_and_the_state_before_them_is_kept(
    tmp_path: Path, are_same: Same
) -> None:
    order = tmp_path / "order"
    with make(order, num_workers=2) as trainer:
        trainer.train()
        state = trainer.state_dict()
        order.write_text("1 0")
        match = r"Workers must not be lost .* `max_retries` \(0\) allows, but were 1 time"
        with pytest.raises(WorkersLostError, match=match) as failed:
            trainer.train(max_retries=0)
        assert isinstance(failed.value.__cause__, WorkerFailedError)
        # The last pass that was asked to keep a state was the first.
        assert are_same(trainer.state_dict(), state)
        trainer.train(max_retries=0)
        order.write_text("0 0")
        with pytest.raises(WorkersLostError, match="but were 1 time"):
            trainer.validate()
        with pytest.raises(TrainingFailedError, match="no state to go on from, as none was kept"):
            trainer.train()
        trainer.load_state_dict(state)
        assert are_same(trainer.state_dict(), state)
        order.write_text("1 0")
        assert trainer.validate()["num_samples"] == 48


@pytest.mark.slow
def test_a_pass_can_be_retried_from_a_file(tmp_path: Path, are_same: Same) -> None:
    order, path = tmp_path / "order", tmp_path / "checkpoint"
    with make(order, num_workers=2) as trainer:
        trainer.save(path)
        trainer.train()
        expected = trainer.state_dict()
        order.write_text("1 5")
        trainer.train(checkpoint=path)
        # The pass was the first one again.
        assert are_same(trainer.state_dict(), expected)


@pytest.fixture
def one_core() -> Iterator[Callable[[bool], None]]:
    """Return a function that leaves this process one core, or gives all back."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("NOT TESTED: two cores are needed to lose one")
    yield lambda is_lost: os.sched_setaffinity(0, {min(cores)} if is_lost else cores)
    os.sched_setaffinity(0, cores)


def test_a_group_shrinks_to_what_is_there_and_grows_back(
    tmp_path: Path, one_core: Callable[[bool], None]
) -> None:
    order = tmp_path / "order"
    with make(order, num_workers=2, num_cpus_per_worker=1) as trainer:
        undisturbed = trainer.train()
        order.write_text("1 6")
        one_core(True)
        shrunk = trainer.train()
        assert trainer.num_workers == 1
        # The same global batches, by one worker.
        counts = ("batch_count", "num_samples")
        assert [shrunk[name] for name in counts] == [undisturbed[name] for name in counts]
        one_core(False)
        trainer.train(num_steps=2)
        assert trainer.num_workers == 2
        assert trainer.state_dict()["place"]["next_batch"] == 2


@pytest.mark.slow
def test_workers_that_die_while_they_start_again_are_lost_once_more(tmp_path: Path) -> None:
    order, failing = tmp_path / "order", tmp_path / "failing"

    def hook() -> None:
        if failing.exists() and os.environ["RANK"] == "0":
            failing.unlink()
            os._exit(1)

    with make(order, num_workers=2, initialization_hook=hook) as trainer:
        order.write_text("1 5")
        failing.touch()
        assert trainer.train(max_retries=2)["num_samples"] == 48
        assert not failing.exists()
        order.write_text("1 5")
        failing.touch()
        with pytest.raises(WorkersLostError, match="were 2 time"):
            trainer.train(max_retries=1)


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_lost(tmp_path: Path, are_same: Same) -> None:
    with make(tmp_path / "order", num_workers=2, heartbeat_timeout_s=3.0) as trainer:
        beginning = trainer.state_dict()
        trainer.train()
        undisturbed = trainer.state_dict()
        trainer.load_state_dict(beginning)
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGSTOP)
        time.sleep(0.1)
        trainer.train()
        assert are_same(trainer.state_dict(), undisturbed)


def leave_early(train_iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Leave on one rank while the others wait for it."""
    for _ in train_iterator:
        if os.environ["RANK"] == str(info["rank"]):
            os._exit(0) if info["how"] == "process" else sys.exit(info["how"])
        torch.distributed.barrier()
    return {}


@pytest.mark.long
def test_a_worker_that_leaves_is_one_error(tmp_path: Path) -> None:
    with make(tmp_path / "order", num_workers=3, train_function=leave_early) as trainer:
        for rank in (0, 2):
            for how in (0, None, "process"):
                with pytest.raises(WorkerFailedError, match="with exit code 0") as info:
                    trainer.train(info={"rank": rank, "how": how})
                assert (info.value.rank, info.value.exit_code) == (rank, 0)
        for how, code in ((3, 3), ("no data", 1)):
            with pytest.raises(WorkersLostError, match="failed the same way twice") as lost:
                trainer.train(info={"rank": 2, "how": how})
            assert f"rank 2 left by `sys.exit({how!r})` with exit code {code}" in str(lost.value)
        # The state before is kept, and the trainer goes on.
        assert trainer.train(num_steps=1, info={"rank": None})["batch_count"] == 1


def leaving_model_creator(config: dict[str, Any]) -> nn.Module:
    if os.environ["RANK"] == "2":
        sys.exit(0)
    return model_creator(config)


def test_a_creator_that_leaves_is_one_error() -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 2 left by `sys.exit\(0\)`"):
        PyTorchTrainer(
            leaving_model_creator,
            data_creator,
            optimizer_creator,
            nn.MSELoss,
            config={"order": "order", "num_loader_workers": 0},
            num_workers=3,
        )
