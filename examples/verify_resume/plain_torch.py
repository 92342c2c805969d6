"""A plain loop of torch that saves all of its state: `--forget` leaves a part of it out."""

import argparse
import os
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--forget", choices=["optimizer", "random", "order"])
forget = parser.parse_args().forget

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
images = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
first = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt")
    net.load_state_dict(state["model"])
    first = state["step"]
    if forget != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if forget != "random":
        torch.set_rng_state(state["rng_state"])
for step in range(first, 120):
    place = (step - first if forget == "order" else step) % 30
    batch = images[place * 16 : place * 16 + 16]
    loss = (net(batch).squeeze(1) - batch.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
    print(f"step {step + 1} loss {loss.item():.9g}", flush=True)
    if step % 20 == 19:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state | {"rng_state": torch.get_rng_state()}, "state.tmp")
        os.replace("state.tmp", "state.pt")
