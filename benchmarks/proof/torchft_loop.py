"""torchft as its example shows it: two groups of one worker, each of which can go on alone.

Each group restarts under a torchrun of its own. A survivor continues with half of the samples. A
worker that comes back gets its weights. No step is done again, and none is as if undisturbed.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

sys.path.insert(0, str(Path(__file__).parent))
import work


def drive() -> None:
    """Run both groups to their end."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, "-m", *torchrun, "--max-restarts", "1000", __file__]
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": server.address()}
    groups = [
        subprocess.Popen(command, env=environment | {"REPLICA_GROUP_ID": str(number)})
        for number in range(2)
    ]
    codes = [group.wait() for group in groups]
    server.shutdown()
    sys.exit(max(codes))


def main() -> None:
    """Train this replica's part of each step."""
    rank = int(os.environ["REPLICA_GROUP_ID"])
    log = work.StepLog(rank)
    torch.manual_seed(1)
    model = work.Transformer()
    optimizer = work.optimizer_of(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"proof_{rank}",
    )
    replicated = DistributedDataParallel(manager, model)
    wrapped = Optimizer(manager, optimizer)
    text = work.Text()
    while (step := manager.current_step()) < work.NUM_STEPS:
        wrapped.zero_grad()
        loss = work.loss_of(replicated, work.batch_of(text, step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        wrapped.step()
        if manager.current_step() > step:
            log(step, loss.detach())
    manager.shutdown()


if __name__ == "__main__":
    main() if "REPLICA_GROUP_ID" in os.environ else drive()
