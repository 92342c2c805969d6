"""A plain loop under DDP with checkpoints of its own, for launchers that restart scripts."""

import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
import work

CHECKPOINT = work.DIRECTORY / "state.pt"


def main() -> None:
    """Train from the newest checkpoint, if there is one."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    log = work.StepLog(rank)
    torch.manual_seed(1)
    model = DistributedDataParallel(work.Transformer())
    optimizer = work.optimizer_of(model)
    first_step = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"] + 1
    text = work.Text()
    for step in range(first_step, work.NUM_STEPS):
        loss = work.loss_of(model, work.batch_of(text, step, rank))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log(step, loss.detach())
        if (step + 1) % work.CHECKPOINT_PERIOD == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, CHECKPOINT.with_suffix(".part"))
            os.replace(CHECKPOINT.with_suffix(".part"), CHECKPOINT)


if __name__ == "__main__":
    main()
