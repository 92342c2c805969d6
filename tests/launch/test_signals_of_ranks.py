"""A signal to one rank of several preempts all; with real signals."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core import RunState, list_runs

Start = Callable[..., "subprocess.Popen[str]"]
Script = Callable[..., str]

TELL_PID = """
import os, pathlib, time

def tell_pid(rank):
    path = pathlib.Path(f"up-{rank}")
    if not path.exists():
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
"""

TRAINER = """
import torch
from torch import nn
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        # Every rank watches for signals from its first step on.
        if batch_idx > 1:
            tell_pid(self.context.distributed.rank)
        time.sleep(0.02)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(300, 1), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def evaluate_batch(self, batch, batch_idx):
        return {"loss": self.model(batch).mean()}


with pytorch.init(hparams={"global_batch_size": 3}) as context:
    result = pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(100000))
    print(f"{result.stop_reason} {context.distributed.rank}")
"""

CORE = """
from paceline import core

distributed = core.DistributedContext.from_torch_distributed()
with core.init(distributed=distributed) as context:
    for step in range(100000):
        time.sleep(0.02)
        if context.preempt.should_preempt():
            if distributed.rank == 0:
                with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
                    (path / "x").write_text("x")
            print(f"preempted {distributed.rank}")
            break
        tell_pid(distributed.rank)
"""

FUNCTION = """
from paceline import train

def fit():
    for step in range(100000):
        time.sleep(0.02)
        if train.should_preempt():
            train.save_checkpoint(step=step)
            print(f"preempted {train.world_rank()}", flush=True)
            return
        tell_pid(train.world_rank())

trainer = train.Trainer(3)
trainer.start()
trainer.run(fit)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script_text", "signum", "rank"),
    [
        pytest.param(TRAINER, signal.SIGTERM, 2, id="trainer-SIGTERM-2"),
        pytest.param(CORE, signal.SIGUSR1, 0, id="core-SIGUSR1-0"),
        pytest.param(FUNCTION, signal.SIGUSR1, 2, id="function-SIGUSR1-2"),
        # One mechanism serves both signals; the others are each of these values with another.
        pytest.param(TRAINER, signal.SIGUSR1, 0, id="trainer-SIGUSR1-0", marks=pytest.mark.slow),
        pytest.param(CORE, signal.SIGTERM, 0, id="core-SIGTERM-0", marks=pytest.mark.slow),
        pytest.param(CORE, signal.SIGUSR1, 2, id="core-SIGUSR1-2", marks=pytest.mark.slow),
        pytest.param(TRAINER, signal.SIGTERM, 0, id="trainer-SIGTERM-0", marks=pytest.mark.slow),
        pytest.param(TRAINER, signal.SIGUSR1, 2, id="trainer-SIGUSR1-2", marks=pytest.mark.slow),
        pytest.param(CORE, signal.SIGTERM, 2, id="core-SIGTERM-2", marks=pytest.mark.slow),
        pytest.param(FUNCTION, signal.SIGTERM, 0, id="function-SIGTERM-0", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_rank_preempts_all(
    start_launcher: Start,
    script: Script,
    tmp_path: Path,
    script_text: str,
    signum: signal.Signals,
    rank: int,
) -> None:
    launcher = start_launcher("--nproc-per-node=3", script(TELL_PID + script_text))
    ups = [tmp_path / f"up-{number}" for number in range(3)]
    while not all(up.exists() for up in ups):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    os.kill(int(ups[rank].read_text()), signum)
    out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, err
    assert sorted(out.split("\n")[:-1]) == [f"[rank={n}] preempted {n}" for n in range(3)]
    (run,) = list_runs(tmp_path / "paceline_runs")
    assert run.state is RunState.PREEMPTED
    assert run.latest_checkpoint is not None
