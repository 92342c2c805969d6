"""A loop with Accelerate that saves its whole state, and skips the batches done on resume."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = int(sys.argv[1]) if len(sys.argv) > 1 else 20
set_seed(0)
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration("out", automatic_checkpoint_naming=True),
)
net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
rows = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
net, optimizer, loader = accelerator.prepare(
    net, torch.optim.Adam(net.parameters(), lr=0.01), loader
)
step = 0
if os.path.isdir("out/checkpoints"):
    accelerator.load_state()
    # `load_state` has read the newest of checkpoint_0, checkpoint_1, ...
    step = EVERY * len(os.listdir("out/checkpoints"))
    accelerator.project_configuration.iteration = step // EVERY
while step < 240:
    loader.set_epoch(step // len(loader))
    for (batch,) in accelerator.skip_first_batches(loader, step % len(loader)):
        loss = (net(batch).squeeze(1) - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        accelerator.print(f"step {step} loss {loss.item():.9g}", flush=True)
        if step % EVERY == 0:
            accelerator.save_state()
