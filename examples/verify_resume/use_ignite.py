"""Ignite's engine on a small net with dropout, resumed from its last checkpoint."""

import glob
import os
import sys

import torch
from ignite.engine import DeterministicEngine, Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DROPOUT = 0.0 if "--no-dropout" in sys.argv else 0.1

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(DROPOUT), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
rows = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)


def update(engine: Engine, batch: list[torch.Tensor]) -> float:
    """Train on a batch and return its loss."""
    loss = (net(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {engine.state.iteration} loss {loss.item():.9g}", flush=True)
    return loss.item()


trainer = DeterministicEngine(update)
state = {"trainer": trainer, "model": net, "optimizer": optimizer}
trainer.add_event_handler(
    Events.ITERATION_COMPLETED(every=20),
    Checkpoint(state, DiskSaver("out", require_empty=False), n_saved=None),
)
files = sorted(glob.glob("out/*.pt"), key=os.path.getmtime)
if files:
    Checkpoint.load_objects(state, torch.load(files[-1], weights_only=False))
trainer.run(loader, max_epochs=4)
