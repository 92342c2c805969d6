"""A loop of torchrun's ranks with DDP and torch.distributed.checkpoint (DCP).

`--forget` leaves out the random state of the last rank.
"""

import os
import shutil
import sys

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank, world_size = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
rows = torch.randn(960, 16, generator=torch.Generator().manual_seed(1))[rank::world_size]


def get_state() -> dict:
    """Return all state: what is equal on all ranks, and each rank's random state."""
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return parts | {f"rng_rank_{rank}": torch.get_rng_state()}


first = 0
if saved := [int(name[5:]) for name in os.listdir(".") if name.startswith("step-")]:
    first = max(saved)
    state = get_state()
    checkpoint.load(state, checkpoint_id=f"step-{first}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if "--forget" not in sys.argv or rank < world_size - 1:
        torch.set_rng_state(state[f"rng_rank_{rank}"])
for step in range(first + 1, 121):
    batch = rows[step * 4 % 240 :][:4]
    loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.9g}", flush=True)
    if step % 20 == 0:
        checkpoint.save(get_state(), checkpoint_id="new")
        if rank == 0:
            shutil.move("new", f"step-{step}")
        distributed.barrier()
distributed.destroy_process_group()
