"""Scripts that srun and mpirun start, for real; where these are missing the tests are skipped."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._training.workers.joined_pool import JoinedPool
from paceline.core import RunState, list_runs

Start = Callable[..., "subprocess.CompletedProcess[str]"]

SAY = """
import sys


def say(*words):
    # As one piece: lines of several ranks share a stream.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
"""

TRAIN = """
import hashlib, os, signal


def before_batch(distributed, batch_idx):
    if batch_idx == 13 and os.environ.get("KILL") == str(distributed.rank):
        os.kill(os.getpid(), signal.SIGKILL)


with pytorch.init(hparams={"global_batch_size": 8}, seed=3, resume="auto") as context:
    at = context.distributed
    place = (at.rank, at.size, at.local_rank, at.local_size, at.cross_rank, at.cross_size)
    say("place", *place)
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(20), checkpoint_period=pytorch.Batch(5)
    )
    values = torch.cat([p.detach().flatten() for p in trial.model.parameters()])
    say("weights", hashlib.sha256(values.numpy().tobytes()).hexdigest())
"""

POOL_SCRIPT = """
from paceline._training.workers.joined_pool import JoinedPool


def whoami(base):
    return pool.distributed.rank + base


def fail():
    if pool.distributed.rank == 1:
        raise ZeroDivisionError("on purpose")


pool = JoinedPool(timeout_s=60)
with pool:
    large = pool.submit(bytes, (9_000_000,)).wait() == [bytes(9_000_000)] * 2
    one = pool.submit(whoami, (20,), ranks=[1]).wait()
    say("all", pool.submit(whoami, (10,)).wait(), large, one)
pool.start()
try:
    pool.submit(fail).wait()
    pool.submit(whoami, (0,)).wait()
except Exception as error:
    say("error", type(error).__name__, error, pool.is_alive)
"""

TRAIN_SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from paceline import train


class Told(train.TrainingCallback):
    def handle_result(self, report):
        sys.stdout.write(f"told {report.rank} {report['epoch']}\\n")


def train_func(config):
    train.enable_reproducibility(3)
    model = train.prepare_model(nn.Linear(4, 2))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    state = train.load_checkpoint() or {"epoch": -1}
    if "model" in state:
        model.load_state_dict(state["model"])
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    loader = train.prepare_data_loader(loader)
    for epoch in range(state["epoch"] + 1, 3):
        if epoch == 2 and os.environ.get("KILL") == str(train.world_rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        for (batch,) in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            train.backward(loss)
            optimizer.step()
        train.report(epoch=epoch, loss=loss.item())
        train.save_checkpoint(model=model, epoch=epoch)
    return train.world_rank(), model.weight.tolist()


def fail():
    if train.world_rank() == 1:
        raise ZeroDivisionError("on purpose")


with train.Trainer(num_workers=2) as trainer:
    results = trainer.run(train_func, {}, callbacks=[Told()])
    epochs = [report["epoch"] for report in results.metrics]
    sys.stdout.write(f"results {results} {epochs[-1]}\\n")
    sys.stdout.write(f"again {trainer.run(lambda: train.world_rank() + 1)}\\n")
    try:
        trainer.run(fail)
    except Exception as error:
        sys.stdout.write(f"error {type(error).__name__} {error}\\n")
    sys.stdout.flush()
"""

LAUNCHERS = pytest.mark.parametrize("start", ["srun", "open_mpi", "mpich"], indirect=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@LAUNCHERS
def test_a_plain_script_trains_and_goes_on_after_a_kill(
    start: Start, tmp_path: Path, request: pytest.FixtureRequest, dropout_trial: str
) -> None:
    (tmp_path / "script.py").write_text(dropout_trial + SAY + TRAIN)
    straight = start()
    assert straight.returncode == 0, straight.stderr
    places = re.findall(r"place .*", straight.stdout)
    is_on_two_nodes = "srun" in request.node.name
    assert sorted(places) == (
        ["place 0 2 0 1 0 2", "place 1 2 0 1 1 2"]
        if is_on_two_nodes
        else ["place 0 2 0 2 0 1", "place 1 2 1 2 0 1"]
    )
    killed = start(KILL="1")
    assert killed.returncode != 0
    assert "weights" not in killed.stdout
    resumed = start()
    assert resumed.returncode == 0, resumed.stderr
    weights = re.findall(r"weights \w+", straight.stdout)
    assert len(weights) == 2
    assert set(re.findall(r"weights \w+", resumed.stdout)) == set(weights)
    runs = list_runs(tmp_path / "paceline_runs")
    assert sorted((run.state, run.num_attempts) for run in runs) == [
        (RunState.COMPLETED, 1),
        (RunState.COMPLETED, 2),
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@LAUNCHERS
def test_joined_processes_carry_out_calls_together(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAY + POOL_SCRIPT)
    result = start()
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert lines[:2] == ["all [10, 11] True [21]"] * 2
    assert lines[2].startswith("error DistributedPeerError ")
    assert lines[2].endswith("rank 1 failed: ZeroDivisionError: on purpose False")
    assert lines[3:] == ["error ZeroDivisionError on purpose False"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "start",
    ["paceline", *(pytest.param(name, marks=pytest.mark.slow) for name in ("srun", "open_mpi"))],
    indirect=True,
)
def test_a_train_function_runs_as_the_rank_of_each_process(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN_SCRIPT)
    straight = start()
    assert straight.returncode == 0, straight.stderr
    lines = [
        line.removeprefix("[rank=0] ").removeprefix("[rank=1] ")
        for line in straight.stdout.splitlines()
    ]
    assert sorted(line for line in lines if line.startswith("told")) == [
        f"told {rank} {epoch}" for rank in range(2) for epoch in range(3)
    ]
    (results,) = {line for line in lines if line.startswith("results")}
    assert re.fullmatch(r"results \[\(0, (.*)\), \(1, \1\)\] 2", results)
    assert lines.count("again [1, 2]") == lines.count(results) == 2
    assert "error ZeroDivisionError on purpose" in lines
    assert any(line.startswith("error DistributedPeerError") for line in lines)
    if "paceline" in os.environ["PYTEST_CURRENT_TEST"]:
        return
    assert start(KILL="1").returncode != 0
    resumed = start(PACELINE_RESUME="auto")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count(results) == 2
    assert "told 0 0" not in resumed.stdout


@pytest.mark.slow
def test_the_shell_of_an_allocation_is_one_process(
    slurm: dict[str, str], run_command: Start, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "from paceline import core\nprint(core.DistributedContext.from_torch_distributed().size)"
    )
    shell = ["salloc", "-N2", "-n2"]
    for command, size in ((shell, 1), ([*shell, "srun", "-N1", "-n1"], 1), (["srun", "-n1"], 1)):
        result = run_command(command, **slurm)
        assert result.stdout.split() == [str(size)], result.stderr


def test_a_process_alone_has_nobody_to_join() -> None:
    with pytest.raises(RuntimeError, match=r"but this one works alone. Hint: srun"):
        JoinedPool()
