"""A kill ends everything that an attempt has started, asks nobody, and leaves nothing behind."""

import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.client import Client, Experiment
from paceline.journal import RunDirectory

NUM_REPORTS = 300
# Each process asks for what a kill must not give: a signal to react to, and time.
HELPERS = """
import os, signal, subprocess, sys, time
from pathlib import Path

def note_signal(number, frame):
    Path(f"signal-{number}").touch()

def start_others(rank):
    # One in the process group, one with a session of its own, and one whose parent has gone.
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 600 &"])
    Path(f"begun-{rank}").touch()
"""
CORE = (
    HELPERS
    + """
import paceline as det

signal.signal(signal.SIGTERM, note_signal)
with det.core.init() as context:
    rank = context.distributed.rank
    if rank == 0:
        for step in range(1, NUM_REPORTS + 1):
            context.train.report_training_metrics(step, {"x": step})
    start_others(rank)
    while rank and not context.preempt.should_preempt():
        time.sleep(0.01)
    with context.checkpoint.store_path({"steps_completed": NUM_REPORTS}) as (path, _):
        (path / "half").write_text("half")
        Path("storing").touch()
        time.sleep(600)
""".replace("NUM_REPORTS", str(NUM_REPORTS))
)
TRAINER = (
    HELPERS
    + """
import torch
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(sgd)
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 1:
            start_others(self.context.distributed.rank)
        time.sleep(0.01)
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"x": loss}
    def evaluate_batch(self, batch):
        return {"loss": self.model(batch).mean()}
    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(torch.ones(90, 1), batch_size=size)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(6, 1), batch_size=1)

with pytorch.init() as context:
    if context.distributed.rank == 2:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(100_000))
"""
)
TRAIN_FUNCTION = (
    HELPERS
    + """
import torch
from paceline import train

def function():
    start_others(train.world_rank())
    train.save_checkpoint(weights=torch.zeros(10))
    time.sleep(600)

if __name__ == "__main__":
    with train.Trainer(num_workers=3) as trainer:
        trainer.run(function)
"""
)
ALONE = "python3 train.py"
THREE_RANKS = "python3 -m paceline.launch.torch_distributed --nproc-per-node 3 train.py"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Iterator[Any]:
    """Return a master with three slots that all tests of this file share."""
    made = master_class(tmp_path_factory.mktemp("kill") / "home", 3).start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(master: Any) -> Client:
    """Return a client of the shared master."""
    return master.client()


@pytest.fixture
def begin(
    client: Client, master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> Callable[..., tuple[Experiment, Path]]:
    """Return a function that starts a script and waits until all its ranks have begun."""

    def begin(
        script: str, entrypoint: str, num_ranks: int, **variables: str
    ) -> tuple[Experiment, Path]:
        code = tmp_path / "code"
        code.mkdir()
        (code / "train.py").write_text(textwrap.dedent(script))
        config = {
            "name": "killed", "entrypoint": entrypoint, "max_restarts": 2, "debug": True,
            "hyperparameters": {"global_batch_size": 6},
            "searcher": {"name": "single", "metric": "loss"},
            "resources": {"slots_per_trial": num_ranks},
            "environment": {"variables": variables},
        }  # fmt: skip
        experiment = client.create_experiment(config, code)
        wait_until(lambda: experiment.trials()[0].reload().data.attempts)
        (attempt,) = experiment.trials()[0].reload().data.attempts
        directory = master.home / "attempts" / str(attempt.id) / "context"
        wait_until(lambda: len(list(directory.glob("begun-*"))) == num_ranks, 120)
        return experiment, directory

    return begin


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return the processes of an attempt, by the run directory in their environment."""
    run = str(directory.parent / "run")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PACELINE_RUN_DIR") == run:
                found.append(process)
        except psutil.Error:
            continue
    return found


def check_killed(experiment: Experiment, directory: Path) -> Any:
    """Check that an experiment that was killed has ended so, and return its trial."""
    assert experiment.wait().value == "CANCELED"
    # A process that was killed is there until it is given time to end.
    end = time.monotonic() + 30
    while processes_of(directory) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_of(directory) == []
    (trial,) = experiment.trials()
    (attempt,) = trial.reload().data.attempts
    assert attempt.exit is not None
    assert (attempt.exit.reason.value, attempt.exit.outcome) == ("killed", None)
    assert trial.state.value == "CANCELED"
    assert trial.data.stop_reason == "killed"
    assert experiment.checkpoints() == []
    # Nobody was asked to leave.
    assert list(directory.glob("signal-*")) == []
    return trial


# The first rank of three is killed as one that is alone.
@pytest.mark.long
@pytest.mark.parametrize(
    ("entrypoint", "num_ranks"),
    [pytest.param(ALONE, 1, marks=pytest.mark.slow), (THREE_RANKS, 3)],
    ids=["alone", "three"],
)
def test_a_kill_during_a_checkpoint_leaves_its_reports_and_nothing_else(
    master: Any,
    begin: Callable[..., tuple[Experiment, Path]],
    entrypoint: str,
    num_ranks: int,
    wait_until: Callable[..., None],
) -> None:
    experiment, directory = begin(CORE, entrypoint, num_ranks)
    wait_until((directory / "storing").exists)
    assert len(processes_of(directory)) >= 4 * num_ranks
    trial = check_killed(experiment.kill(), directory)
    assert len(list(trial.iter_metrics("training"))) == NUM_REPORTS
    assert list((master.home / "checkpoints").iterdir()) == []


# What is killed makes no difference to who kills: the test before has a quick one of three ranks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrypoint", "num_ranks"), [(ALONE, 1), (THREE_RANKS, 3)], ids=["alone", "three"]
)
def test_a_killed_trainer_stores_no_checkpoint(
    begin: Callable[..., tuple[Experiment, Path]], entrypoint: str, num_ranks: int
) -> None:
    """Of three ranks, the last one blocks SIGTERM."""
    experiment, directory = begin(TRAINER, entrypoint, num_ranks)
    check_killed(experiment.kill(), directory)


def test_a_kill_of_workers_that_store_their_parts_leaves_no_checkpoint(
    master: Any, begin: Callable[..., tuple[Experiment, Path]], wait_until: Callable[..., None]
) -> None:
    """The last of three workers has stopped before its part of the checkpoint is whole."""
    fault = "storage.before_done,signal=STOP,rank=2"
    experiment, directory = begin(TRAIN_FUNCTION, ALONE, 3, PACELINE_FAULT=fault)
    storage = master.home / "checkpoints"
    wait_until(lambda: len(list(storage.glob("*/rank-*.done"))) == 2)
    check_killed(experiment.kill(), directory)
    assert list(storage.iterdir()) == []


def test_a_kill_does_not_wait_for_a_cancellation_that_takes_long(
    begin: Callable[..., tuple[Experiment, Path]], wait_until: Callable[..., None]
) -> None:
    experiment, directory = begin(CORE, ALONE, 1)
    wait_until((directory / "storing").exists)
    experiment.cancel()
    run = RunDirectory(directory.parent / "run")
    wait_until(lambda: run.read_control().should_preempt)
    check_killed(experiment.kill(), directory)
