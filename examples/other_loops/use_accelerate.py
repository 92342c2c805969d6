"""A loop of one's own with Accelerate on the workers of Paceline."""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from digits import accuracy, load_images, make_net, run_on_workers
from torch import nn
from torch.utils.data import DataLoader

from paceline import train
from paceline.integrations import PacelineTracker, load_accelerator, save_accelerator


def fit(config: dict) -> float | None:
    """Train on this worker's part of the data, from the last checkpoint on."""
    train.enable_reproducibility(1)
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, log_with=PacelineTracker(), kwargs_handlers=[ddp])
    accelerator.init_trackers("digits")
    loader = train.prepare_data_loader(DataLoader(load_images()[0], batch_size=16, shuffle=True))
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    model, optimizer = accelerator.prepare(model, optimizer)
    state = load_accelerator(accelerator) or {"epoch": 0}
    for epoch in range(state["epoch"], config["epochs"]):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if train.should_preempt():
                save_accelerator(accelerator, epoch=epoch)
                return None
        accelerator.log({"loss": loss.item()}, step=epoch)
        save_accelerator(accelerator, epoch=epoch + 1)
    return accuracy(accelerator.unwrap_model(model))


if __name__ == "__main__":
    run_on_workers(fit)
