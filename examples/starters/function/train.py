"""A train function of your own, on worker processes that Paceline starts and watches."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import train


def fit_line(config: dict) -> None:
    """Fit a line to noisy points; each worker takes its part of each batch."""
    train.enable_reproducibility(1)
    # The points are the same on every worker, whose own random numbers differ.
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(256, 1, generator=generator)
    data = TensorDataset(x, 3 * x - 1 + 0.1 * torch.randn(256, 1, generator=generator))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model, optimizer = train.accelerate(model, optimizer)
    loader = train.prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))

    first = 0
    state = train.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            train.backward(loss)
            optimizer.step()
        train.report(epoch=epoch, loss=loss.item())
        train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch)


def main(num_workers: int, epochs: int) -> None:
    """Train on workers, and say where the run is."""
    with train.Trainer(num_workers=num_workers) as trainer:
        results = trainer.run(
            fit_line, {"lr": 0.1, "epochs": epochs}, callbacks=[train.PrintCallback()]
        )
    print(f"{len(results.checkpoints)} checkpoints are in {results.run_dir}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
