"""Trainings whose gradients Horovod sums: exact resume, preemption, launchers, train functions."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BACKEND = "horovod"
pytestmark = [
    pytest.mark.skipif(
        find_spec("horovod") is None,
        reason="NOT TESTED: Horovod is not installed; see `make test-backends`",
    ),
    # A test may wait for two trainings.
    pytest.mark.timeout(900),
]

Check = Callable[[Any, Any, int], None]


@pytest.mark.parametrize(("num_ranks", "fault_rank"), [(2, 0), (2, 1), (3, 2)])
def test_a_training_goes_on_in_the_same_bits_after_a_killed_rank(
    train: Any, check_same: Check, num_ranks: int, fault_rank: int
) -> None:
    killed = train(num_ranks, SHARDS=num_ranks, FAULT_RANK=fault_rank)
    assert f"Rank {fault_rank} was ended by SIGKILL" in killed.output
    straight = train(num_ranks, SHARDS=num_ranks)
    assert "DONE reached max_length 8 HorovodSum" in straight.output
    check_same(straight, killed, num_ranks)


@pytest.mark.parametrize("fault_rank", [0, 1])
def test_a_preempted_training_goes_on_in_the_same_bits(
    train: Any, check_same: Check, tmp_path: Path, fault_rank: int
) -> None:
    preempted = train(2, at=tmp_path, SHARDS=2, FAULT="SIGTERM", FAULT_RANK=fault_rank)
    assert preempted.code == 0, preempted.output
    assert "DONE preempted" in preempted.output
    resumed = train(2, at=tmp_path, SHARDS=2, RESUME=preempted.run_directory)
    check_same(train(2, SHARDS=2), resumed, 2)


@pytest.mark.parametrize("options", [{"BACKEND": "flat"}, {"PLAIN": 1}])
def test_two_ranks_train_as_with_the_flat_reduction(
    train: Any, check_same: Check, options: dict[str, object]
) -> None:
    check_same(train(2, SHARDS=2), train(2, SHARDS=2, **options), 2)


def test_horovodrun_starts_the_same_training(train: Any, check_same: Check) -> None:
    run = str(Path(sys.executable).with_name("horovodrun"))
    started = train(2, launcher=(run, "--gloo", "-np", "2", sys.executable), SHARDS=2)
    check_same(train(2, SHARDS=2), started, 2)


def test_ranks_that_horovod_does_not_know_are_refused(train: Any) -> None:
    start = (sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node", "2")
    outcome = train(2, launcher=start, SHARDS=2)
    assert outcome.code == 1
    # The first rank to notice it ends the other one.
    told = r"Horovod must know this process as rank [01] of 2, but knows it as rank 0 of 1"
    assert re.search(told, outcome.output)


def test_several_nodes_are_refused_by_the_launcher(train: Any) -> None:
    start = (sys.executable, "-m", "paceline.launch.horovod", "--nnodes", "2")
    outcome = train(2, launcher=(*start, "--master-addr", "127.0.0.1"))
    assert outcome.code == 2
    assert "`--nnodes` must be 1 with `paceline.launch.horovod`, but got 2" in outcome.output


# The weights must be those of one process that trains on both parts of each batch.
WORKERS = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import train

X = torch.arange(24, dtype=torch.float64).view(12, 2) / 10


def fit(is_own, batch_size=2):
    if train.in_worker():
        import horovod.torch as hvd

        assert (hvd.rank(), hvd.size()) == (train.world_rank(), train.world_size())
    if train.world_rank() == 1 and os.environ.get("KILL") and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if is_own:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        model = train.prepare_model(model)
    for (x,) in train.prepare_data_loader(DataLoader(TensorDataset(X), batch_size=batch_size)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    train.report(rank=train.world_rank())
    return [parameter.flatten().tolist() for parameter in model.parameters()]


class Fit:
    def fit(self, is_own):
        return fit(is_own)


if __name__ == "__main__":
    door, num_workers = sys.argv[1], int(sys.argv[2])
    alone = fit(False, 2 * num_workers)
    with train.Trainer(num_workers, backend="horovod") as trainer:
        for is_own in (False, True):
            if door == "run":
                values = trainer.run(lambda: fit(is_own))
            else:
                if not is_own:
                    trainer.start(Fit)
                values = trainer.execute(lambda it: it.fit(is_own))
            assert len(values) == num_workers
            for value in values:
                torch.testing.assert_close(value, alone)
    print("SAME", len(values))
"""


@pytest.mark.parametrize(
    ("door", "num_workers", "variables"),
    [("run", 2, {}), ("execute", 2, {}), ("run", 3, {}), ("run", 2, {"KILL": "1"})],
    ids=str,
)
def test_workers_of_a_trainer_meet_in_horovod(
    tmp_path: Path, door: str, num_workers: int, variables: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, "script.py", door, str(num_workers)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"SAME {num_workers}" in done.stdout
    assert (tmp_path / "killed").exists() == bool(variables)
