"""A loop with Accelerate that saves its whole state, and skips the batches done on resume."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DROPOUT = 0.0 if "--no-dropout" in sys.argv else 0.1
SHUFFLE = "--no-shuffle" not in sys.argv

set_seed(0)
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration("out", automatic_checkpoint_naming=True),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler="--seedable" in sys.argv),
)
net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(DROPOUT), nn.ReLU(), nn.Linear(32, 1))
rows = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=SHUFFLE)
net, optimizer, loader = accelerator.prepare(
    net, torch.optim.Adam(net.parameters(), lr=0.01), loader
)
step = 0
if os.path.isdir("out/checkpoints"):
    saved = accelerator.project_configuration.iteration = len(os.listdir("out/checkpoints"))
    accelerator.load_state(f"out/checkpoints/checkpoint_{saved - 1}")
    step = 20 * saved
while step < 240:
    loader.set_epoch(step // 60)
    done = step % 60
    for (batch,) in accelerator.skip_first_batches(loader, done) if done else loader:
        loss = (net(batch).squeeze(1) - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        accelerator.print(f"step {step} loss {loss.item():.9g}", flush=True)
        if step % 20 == 0:
            accelerator.save_state()
