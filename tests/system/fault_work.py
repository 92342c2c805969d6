"""Three ranks that compute together by one way to start them; one of them has a fault.

Run as ``python fault_work.py DOOR``, or by a launcher with ``program``. FAULT and FAULT_RANK say
what happens on which rank, STRUCK names the file that tells when it did.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import InvalidHP, pytorch, train

HEARTBEAT_S = 10.0
# Longer than the 10 s for which a rank 0 that leaves waits for the others.
COLLECTIVE_S = 20.0
_STEPS = 100_000
_FAULT_STEP = 5


def maybe_fail(rank: int, step: int) -> None:
    """Have the fault, if it is this rank's turn."""
    time.sleep(0.01)
    if step != _FAULT_STEP or rank != int(os.environ["FAULT_RANK"]):
        return
    if os.path.exists(os.environ["STRUCK"]):
        # A trial that was preempted goes on.
        return
    part = os.environ["STRUCK"] + ".part"
    with open(part, "w") as file:
        file.write(str(time.time()))
    os.rename(part, os.environ["STRUCK"])
    fault = os.environ["FAULT"]
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    else:
        _FAULTS[fault]()


def _raise() -> None:
    raise ValueError("boom")


def _refuse() -> None:
    raise InvalidHP("boom")


def _exhaust_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), resource.RLIM_INFINITY))
    torch.ones(1 << 28)


_FAULTS: dict[str, Any] = {
    "raise": _raise,
    "InvalidHP": _refuse,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(7)": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    # The others are in an all-reduce.
    "other collective": lambda: dist.barrier(),
    "held GIL": lambda: ctypes.PyDLL(None).sleep(1000),
    "sleep": lambda: time.sleep(1000),
    "memory limit": _exhaust_memory,
}


class Trial(pytorch.PyTorchTrial):
    """A trial that trains one weight."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        maybe_fail(self.context.distributed.rank, batch_idx)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(torch.ones(3000, 1), batch_size=1)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(torch.ones(3, 1), batch_size=1)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.model(batch).mean()}


def program() -> None:
    """Train as one of several."""
    hparams = None if "PACELINE_RUN_DIR" in os.environ else {"global_batch_size": 3}
    with pytorch.init(hparams=hparams) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(_STEPS))


def launch() -> None:
    """Call a function in workers."""
    pytorch.launch(program, 3, heartbeat_timeout_s=HEARTBEAT_S, collective_timeout_s=COLLECTIVE_S)


def _fit(config: dict[str, Any]) -> None:
    for step in range(_STEPS):
        maybe_fail(train.world_rank(), step)
        dist.all_reduce(torch.ones(1))
        train.report(step=step)


def train_function(cluster: str = "local") -> None:
    """Run a train function."""
    trainer = train.Trainer(
        3,
        max_retries=0,
        heartbeat_timeout_s=HEARTBEAT_S,
        cluster=cluster,
        backend=train.TorchConfig(timeout_s=COLLECTIVE_S),
    )
    trainer.start()
    try:
        trainer.run(_fit)
    finally:
        trainer.shutdown()


def ray_pool() -> None:
    """Run a train function on a Ray cluster."""
    import ray

    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        train_function("ray")
    finally:
        ray.shutdown()


def _one_pass(config: dict[str, Any], model: Any, train_iterator: Any) -> dict[str, float]:
    for step in range(_STEPS):
        maybe_fail(dist.get_rank(), step)
        dist.all_reduce(torch.ones(1))
    return {"loss": 0.0}


def creators() -> None:
    """Have a creators' trainer make a pass."""
    from paceline.creators import PyTorchTrainer

    trainer = PyTorchTrainer(
        lambda config: nn.Linear(1, 1),
        lambda config: [(torch.ones(3, 1), torch.ones(3, 1))],
        lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss,
        train_function=_one_pass,
        validation_function=False,
        num_replicas=3,
        cluster="local",
        timeout_s=COLLECTIVE_S,
        heartbeat_timeout_s=HEARTBEAT_S,
        add_dist_sampler=False,
    )
    try:
        trainer.train(max_retries=0)
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
