"""A plain loop under torchft: two replicas of a worker each; one continues while one is gone.

Each replica has a launcher of its own, which starts a killed worker again. It gets the state of
the other one, and both have a lighthouse that says who takes part.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

sys.path.insert(0, str(Path(__file__).parent))
import work

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
            "--max-restarts", "1000"]  # fmt: skip


def launch() -> None:
    """Start the lighthouse and both replicas, and wait for their ends."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    command = [sys.executable, *LAUNCHER, __file__]
    replicas = [subprocess.Popen([*command, str(number)]) for number in range(2)]
    codes = [replica.wait() for replica in replicas]
    lighthouse.shutdown()
    sys.exit(max(codes))


def train(replica: int) -> None:
    """Train one replica until the last step is committed by all who take part."""
    log = work.StepLog(replica, file_of=0)
    torch.manual_seed(1)
    model = work.Transformer()
    wrapped: Any = None

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": wrapped.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        wrapped.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"replica-{replica}-",
        timeout=timedelta(seconds=30),
    )
    wrapped = Optimizer(manager, work.optimizer_of(model))
    text = work.Text()
    checkpoint = work.DIRECTORY / "state.pt"
    if checkpoint.exists():
        # For the case that both are lost. If one is there, its state replaces this one.
        state = torch.load(checkpoint)
        manager.load_state_dict(state["manager"])
        load_state_dict(state)
    while manager.current_step() < work.NUM_STEPS:
        step = manager.current_step()
        # From here on the replicas agree who takes part; one that has come back gets the state.
        wrapped.zero_grad()
        loss = work.loss_of(model, work.batch_of(text, step, replica))
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(manager, model)
        wrapped.step()
        # One of those who take part has the log and the checkpoints.
        if manager.participating_rank() != 0:
            continue
        log(step, loss.detach(), num_ranks=manager.num_participants())
        if manager.current_step() > step and (step + 1) % work.CHECKPOINT_PERIOD == 0:
            state = {"manager": manager.state_dict(), **state_dict()}
            torch.save(state, checkpoint.with_suffix(".part"))
            os.replace(checkpoint.with_suffix(".part"), checkpoint)
    manager.shutdown()


def average_gradients(manager: Manager, model: torch.nn.Module) -> None:
    """Replace the gradients by their mean over all who take part.

    In torchft 0.2.0, `DistributedDataParallel` fails in most survivors of a kill (`assert
    fut._fut`), so that both replicas are lost.
    """
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    manager.allreduce(flat).wait()
    means = torch.split(flat, [each.numel() for each in gradients])
    for each, mean in zip(gradients, means, strict=True):
        each.copy_(mean.view_as(each))


if __name__ == "__main__":
    train(int(sys.argv[1])) if sys.argv[1:] else launch()
