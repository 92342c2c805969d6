"""Train a ResNet18 with functions of one's own: to train, to validate, and to begin with."""

import argparse
import os
from typing import Any

import torch
from images import load_images
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.creators import HookWorker, PyTorchTrainer


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.straight = nn.Sequential(
            *(nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out)),
            nn.ReLU(),
            *(nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.straight(x) + self.shortcut(x))


class ResNet18(nn.Sequential):
    """The net of He et al. (https://arxiv.org/abs/1512.03385), for small images of one channel.

    Args:
        width: The channels of the first stage, 64 in the paper.
    """

    def __init__(self, width: int) -> None:
        stages = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        num_in = width
        for factor in (1, 2, 4, 8):
            num_out = factor * width
            stages += [Block(num_in, num_out, 1 if factor == 1 else 2), Block(num_out, num_out, 1)]
            num_in = num_out
        super().__init__(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 10))


def model_creator(config: dict) -> nn.Module:
    """Return the net."""
    return ResNet18(config["width"])


def data_creator(config: dict) -> tuple[DataLoader, DataLoader]:
    """Return loaders; their batch size is that of one worker."""
    training, test = load_images()
    size = config["batch_size"] // config["num_workers"]
    return DataLoader(training, batch_size=size, shuffle=True), DataLoader(test, batch_size=500)


def optimizer_creator(model: nn.Module, config: dict) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4)


def scheduler_creator(optimizer: torch.optim.Optimizer, config: dict) -> Any:
    """Return a scheduler, which the train function steps."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["passes"])


def initialization_hook(worker: HookWorker) -> None:
    """Set what must be set before the workers meet."""
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    print(f"worker {worker.rank} of {worker.world_size} begins")


def train(
    model: nn.Module,
    train_iterator: Any,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> dict[str, float]:
    """Train for one pass; gradients are averaged over all workers in `backward`."""
    total, num_right, num_samples = 0.0, 0, 0
    for images, classes in train_iterator:
        output = model(images)
        loss = criterion(output, classes)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(images)
        num_right += (output.argmax(1) == classes).sum().item()
        num_samples += len(images)
    scheduler.step()
    return {"train_loss": total / num_samples, "train_accuracy": num_right / num_samples}


def validate(model: nn.Module, val_iterator: Any) -> dict[str, float]:
    """Return the accuracy on this worker's part of the test images."""
    num_right = num_samples = 0
    with torch.no_grad():
        for images, classes in val_iterator:
            num_right += (model(images).argmax(1) == classes).sum().item()
            num_samples += len(images)
    return {"accuracy": num_right / max(num_samples, 1)}


def main(given: argparse.Namespace) -> None:
    """Train for some passes; a pass whose worker was lost is run again."""
    config = {
        "lr": 0.05,
        "width": given.width,
        "passes": given.passes,
        "batch_size": 64,
        "num_workers": given.num_workers,
    }
    with PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        nn.CrossEntropyLoss,
        scheduler_creator,
        train_function=train,
        validation_function=validate,
        initialization_hook=initialization_hook,
        config=config,
        num_workers=given.num_workers,
        use_gpu=given.use_gpu,
    ) as trainer:
        for _ in range(given.passes):
            trained = trainer.train(max_retries=1, checkpoint="auto")
            validated = trainer.validate()
            print(
                f"pass {trained['epoch']}: loss {trained['train_loss']:.3f},"
                f" accuracy {validated['accuracy']:.1%}"
            )
        model = trainer.get_model()
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"A net of {num_weights:,} weights recognises {validated['accuracy']:.1%}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--width", type=int, default=16, help="64 in the paper")
    parser.add_argument("--use-gpu", action="store_true")
    main(parser.parse_args())
