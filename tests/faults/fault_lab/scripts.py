"""The searches whose outcome must not depend on what happens to the processes that make it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Each report and checkpoint is noted before and after the call, in a file beside the home. Notes
# are single small writes, which survive the end of the process.
_NOTES = """
import json, os, sys, time

def note(kind, *what):
    line = json.dumps([kind, *what]) + "\\n"
    descriptor = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)

def start_helper():
    # In a session of its own, with a parent that has left.
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", "600"])
        os._exit(0)
    os.waitpid(child, 0)
"""
ONE_PROCESS = (
    _NOTES
    + """
import paceline as det

info = det.get_cluster_info()
trial, lr = info.trial.trial_id, info.trial.hparams["lr"]
attempt = int(info.allocation_id.rpartition(".")[2])
with det.core.init() as context:
    rank = context.distributed.rank
    if context.distributed.local_rank == 0:
        start_helper()
    start = 0
    if info.latest_checkpoint:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            start, told = json.loads((path / "state").read_text())[:2]
            tensor = (path / "tensor").read_bytes()
        if told != trial or tensor != bytes([start]) * 5000:
            note("wrong checkpoint", trial, start, info.latest_checkpoint)
    for epoch in range(start + 1, 7):
        time.sleep(0.01)  # most of a trial is the start of its process
        loss = abs(lr - 0.3) + 1.0 / epoch
        if rank == 0:
            note("report", trial, epoch, loss, attempt)
            context.train.report_training_metrics(epoch, {"lr": lr})
            context.train.report_validation_metrics(epoch, {"loss": loss, "epochs": epoch})
            note("reported", trial, epoch, loss, attempt)
            if epoch % 2 == 0:
                with context.checkpoint.store_path({"steps_completed": epoch}) as (path, uuid):
                    (path / "tensor").write_bytes(bytes([epoch]) * 5000)
                    (path / "state").write_text(json.dumps([epoch, trial]))
                note("stored", trial, epoch, uuid, attempt)
        if context.preempt.should_preempt():
            break
"""
)
TRAINER = (
    _NOTES
    + """
import torch
from paceline import pytorch
import paceline as det

info = det.get_cluster_info()
trial = info.trial.trial_id

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        torch.manual_seed(0)
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.lr = context.get_hparam("lr")
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), self.lr))
        if context.distributed.rank == 0:
            start_helper()
    def train_batch(self, batch, epoch_idx, batch_idx):
        time.sleep(0.02)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"x": loss}
    def evaluate_batch(self, batch):
        return {"loss": self.model(batch).square().mean()}
    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        data = torch.linspace(0, 1, 96).reshape(24, 4)
        return pytorch.DataLoader(data, batch_size=size, shuffle=True, num_workers=1)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.linspace(0, 1, 24).reshape(6, 4), batch_size=2)

with pytorch.init() as context:
    pytorch.Trainer(Trial(context), context).fit(
        max_length=pytorch.Batch(24), validation_period=pytorch.Batch(4),
        checkpoint_period=pytorch.Batch(8))
"""
)
_LAUNCHED = "python3 -m paceline.launch.torch_distributed --nproc-per-node 3 train.py"


@dataclass(frozen=True)
class Search:
    """A search of a script, its entrypoint and its number of processes."""

    name: str
    script: str
    entrypoint: str
    num_ranks: int = 1
    num_trials: int = 6
    resources: dict[str, Any] = field(default_factory=dict)
    has_shared_storage: bool = False

    def write_context(self, directory: Path) -> Path:
        """Write the code."""
        directory.mkdir(parents=True)
        (directory / "train.py").write_text(self.script)
        return directory

    def config(self, notes: Path) -> dict[str, Any]:
        """Return the experiment config."""
        searcher: dict[str, Any]
        if self.script is TRAINER:
            searcher = {"name": "random", "metric": "loss", "max_trials": self.num_trials}
        else:
            searcher = {
                "name": "adaptive_asha", "metric": "loss", "time_metric": "epochs", "max_time": 6,
                "max_trials": self.num_trials, "divisor": 2, "bracket_rungs": [3],
            }  # fmt: skip
        # A trial whose runner was lost waits a while, and another one must not go first. Each
        # bracket has one trial at a time, so there is one bracket.
        searcher["max_concurrent_trials"] = 1
        storage: dict[str, Any] = {"save_trial_latest": 1, "save_trial_best": 0}
        if self.has_shared_storage:
            storage |= {"type": "shared_fs", "host_path": str(notes.parent)}
            storage |= {"storage_path": "shared"}
        return {
            "name": self.name,
            "entrypoint": self.entrypoint,
            "hyperparameters": {
                "lr": {"type": "double", "minval": 0.0, "maxval": 1.0},
                "global_batch_size": 3,
            },
            "searcher": searcher,
            # Every kill of a training process counts as a restart.
            "max_restarts": 1000,
            "reproducibility": {"experiment_seed": 11},
            "resources": {"slots_per_trial": self.num_ranks} | self.resources,
            "environment": {"variables": {"NOTES": str(notes)}},
            "checkpoint_storage": storage,
        }


# On two or three of the nodes, whose launchers soon notice that they do not hear of each other.
_ON_NODES = "python3 -m paceline.launch.torch_distributed --heartbeat-timeout-s 5 train.py"

SEARCHES = {
    "one": Search("one", ONE_PROCESS, "python3 train.py"),
    "three": Search("three", ONE_PROCESS, _LAUNCHED, num_ranks=3, num_trials=3),
    "trainer": Search("trainer", TRAINER, _LAUNCHED, num_ranks=3, num_trials=2),
    "single": Search("single", ONE_PROCESS, "python3 train.py", num_trials=4),
    "group": Search(
        "group",
        ONE_PROCESS,
        _ON_NODES,
        num_ranks=3,
        num_trials=2,
        resources={"start_timeout": 20.0},
        has_shared_storage=True,
    ),  # fmt: skip
}
