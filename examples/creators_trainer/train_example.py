"""Train a linear classifier of images: creators and nothing else."""

import argparse
import tempfile
from pathlib import Path

import torch
from images import load_images
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from paceline.creators import PyTorchTrainer


def model_creator(config: dict) -> nn.Module:
    """Return a linear layer over all pixels."""
    training, _ = load_images()
    return nn.Sequential(nn.Flatten(), nn.Linear(training[0][0].numel(), 10))


def data_creator(config: dict) -> tuple:
    """Return what to train and to validate on; the trainer makes loaders of data sets."""
    return load_images()


def optimizer_creator(model: nn.Module, config: dict) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


def scheduler_creator(optimizer: torch.optim.Optimizer, config: dict) -> ExponentialLR:
    """Return the scheduler."""
    return ExponentialLR(optimizer, gamma=0.9)


def main(num_workers: int, passes: int, use_gpu: bool) -> None:
    """Train, store a checkpoint, and go on from it in another trainer."""

    def make() -> PyTorchTrainer:
        return PyTorchTrainer(
            model_creator,
            data_creator,
            optimizer_creator,
            loss_creator=nn.CrossEntropyLoss,
            scheduler_creator=scheduler_creator,
            scheduler_step_freq="epoch",
            config={"lr": 0.01},
            dataloader_config={"num_workers": 0},
            batch_size=64,
            num_workers=num_workers,
            use_gpu=use_gpu,
        )

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory, "checkpoint")
        with make() as trainer:
            for _ in range(passes):
                trained, validated = trainer.train(), trainer.validate()
                print(
                    f"pass {trained['epoch']}: loss {trained['train_loss']:.3f},"
                    f" accuracy {validated['val_accuracy']:.1%}"
                )
            trainer.save(checkpoint)
        with make() as other:
            other.load(checkpoint)
            assert other.validate() == validated
    print(f"The other trainer recognises {validated['val_accuracy']:.1%} as well.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--use-gpu", action="store_true")
    given = parser.parse_args()
    main(given.num_workers, given.passes, given.use_gpu)
