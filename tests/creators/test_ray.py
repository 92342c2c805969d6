"""Trainers of creators on a Ray cluster of real nodes, which all run on this machine."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.creators import PyTorchTrainer, ResourcesError

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to Ray, which starts some at its first use."""


@pytest.fixture(autouse=True)
def no_leaked_signal_handlers() -> None:
    """Leave SIGTERM to Ray's nodes, which set it in this process."""


def raylet_of(pid: int) -> int:
    parents = psutil.Process(pid).parents()
    return next(process.pid for process in parents if process.name() == "raylet")


def model_creator(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(4, 1)


def data_creator(config: dict[str, Any]) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, shuffle=True)


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make(**given: Any) -> PyTorchTrainer:
    return PyTorchTrainer(model_creator, data_creator, optimizer_creator, nn.MSELoss, **given)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_uses_both_nodes_and_survives_a_lost_worker(
    ray_cluster: Any, are_same: Callable[[Any, Any], bool]
) -> None:
    with make(num_workers=2) as trainer:
        assert trainer.apply_all_workers(lambda: os.environ["NODE_RANK"]) == ["0", "1"]
        beginning = trainer.state_dict()
        for _ in range(2):
            trainer.train()
        undisturbed = trainer.state_dict()
        trainer.load_state_dict(beginning)
        trainer.train()
        pids = trainer.apply_all_workers(os.getpid)
        os.kill(pids[1], 9)
        trainer.train()
        assert are_same(trainer.state_dict(), undisturbed)
    with pytest.raises(ResourcesError, match=r"9 worker\(s\) .* need 9 CPU"):
        make(num_workers=9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_grows_once_when_a_lost_node_is_replaced_and_leaves_one_that_is_drained(
    ray_cluster: Any, drain_node: Callable[[str], None]
) -> None:
    def add() -> Any:
        # No other node has room for such a worker.
        return ray_cluster.add_node(num_cpus=3)

    def node_of(pid: int) -> Any:
        raylet = raylet_of(pid)
        (node,) = [n for n in added if n.all_processes["raylet"][0].process.pid == raylet]
        return node

    added = [add(), add()]
    try:
        with make(num_workers=2, num_cpus_per_worker=3) as trainer:
            trainer.train()
            pid = trainer.apply_all_workers(os.getpid)[1]
            lost = node_of(pid)
            added.remove(lost)
            ray_cluster.remove_node(lost, allow_graceful=False)
            # The worker lives a moment longer than its node.
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(60)
            trainer.train()
            (small,) = trainer.apply_all_workers(os.getpid)
            added.append(add())
            seen, deadline = [], time.monotonic() + 200
            while len(seen) < 10 and time.monotonic() < deadline:
                trainer.train()
                pids = trainer.apply_all_workers(os.getpid)
                if len(pids) == 1:
                    # No pass has ended the only worker in vain.
                    assert pids == [small]
                else:
                    seen.append(pids)
            assert len(seen) == 10
            assert len({tuple(pids) for pids in seen}) == 1
            staying, leaving = (node_of(pid) for pid in seen[0])
            drain_node(leaving.node_id)
            trainer.train()
            (small,) = trainer.apply_all_workers(os.getpid)
            assert node_of(small) is staying
            assert not psutil.pid_exists(seen[0][1])
    finally:
        for node in added:
            ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_trainer_goes_on_without_a_node_whose_raylet_alone_was_killed(
    ray_cluster: Any, rank: int
) -> None:
    # No other node has room for such a worker.
    added = [ray_cluster.add_node(num_cpus=3) for _ in range(4)]
    try:
        with make(num_workers=3, num_cpus_per_worker=3) as trainer:
            trainer.train()
            lost = trainer.apply_all_workers(os.getpid)[rank]
            os.kill(raylet_of(lost), 9)
            # Nobody waits for the end of the raylet, so that Ray takes it for alive.
            with suppress(psutil.NoSuchProcess):
                psutil.Process(lost).wait(60)
            trainer.train()
            assert lost not in trainer.apply_all_workers(os.getpid)
            assert trainer.state_dict()["epoch"] == 2
    finally:
        for node in added:
            ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saving_needs_nothing_that_nodes_share(
    nodes_with_own_disks: Callable[[int], Path], are_same: Callable[[Any, Any], bool]
) -> None:
    directory = nodes_with_own_disks(1)
    path = directory / "checkpoint"
    # One more than there are nodes which share their files.
    with make(num_workers=3) as trainer:
        trainer.train(num_steps=1)
        trainer.save(path)
        trainer.train()
        straight = trainer.state_dict()
        seen = trainer.apply_all_workers(lambda: os.listdir(directory))
        # A worker that had written there itself would have left the file.
        assert sorted(seen) == [[], ["checkpoint"], ["checkpoint"]]
    with make(num_workers=3) as other:
        other.load(path)
        other.train()
        assert are_same(other.state_dict(), straight)
