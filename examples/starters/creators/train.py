"""Functions that make the model, the data and the optimizer; Paceline does the rest."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.creators import PyTorchTrainer


def model_creator(config: dict) -> nn.Module:
    """Return the model."""
    return nn.Linear(1, 1)


def data_creator(config: dict) -> tuple:
    """Return points to train and points to validate on."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(512, 1, generator=generator)
    y = 3 * x - 1 + 0.1 * torch.randn(512, 1, generator=generator)
    return TensorDataset(x[128:], y[128:]), TensorDataset(x[:128], y[:128])


def optimizer_creator(model: nn.Module, config: dict) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=config["lr"])


def main(num_workers: int, passes: int) -> None:
    """Train, validate after each pass, and store a checkpoint."""
    trainer = PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        loss_creator=nn.MSELoss,
        config={"lr": 0.1},
        dataloader_config={"num_workers": 0},
        batch_size=32,
        num_workers=num_workers,
    )
    with trainer:
        for _ in range(passes):
            trained, validated = trainer.train(), trainer.validate()
            print(
                f"pass {trained['epoch']}: loss {trained['train_loss']:.4f},"
                f" validation loss {validated['val_loss']:.4f}"
            )
        trainer.save("checkpoint")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--passes", type=int, default=5)
    main(**vars(parser.parse_args()))
