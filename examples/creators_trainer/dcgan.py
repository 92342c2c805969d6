"""Train two models against each other: a generator of images, and a discriminator (DCGAN).

The inception score tells how the generator does: a classifier of the real images looks at those
that it makes. It is from 1 to 10, and higher if each is clearly of one class and all occur.
"""

import argparse
import math
from typing import Any

import torch
from images import load_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from paceline.creators import PyTorchTrainer

NUM_LATENT = 32
SIDE = 16


class Discriminator(nn.Sequential):
    """Tells real images from others; takes [batch, 1, 16, 16], gives [batch, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__(
            *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(2 * width, 1, 4), nn.Flatten(), nn.Sigmoid()),
        )


class Generator(nn.Sequential):
    """Makes images of noise; takes [batch, 32, 1, 1], gives [batch, 1, 16, 16] from -1 to 1."""

    def __init__(self, width: int) -> None:
        super().__init__(
            *(nn.ConvTranspose2d(NUM_LATENT, 2 * width, 4), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh()),
        )


class Classifier(nn.Sequential):
    """Sorts images into ten classes."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
        )


def train_classifier(num_batches: int) -> dict[str, Tensor]:
    """Return the weights of a classifier of the real images; this happens in the driver."""
    torch.manual_seed(0)
    model, (training, _) = Classifier(), load_images(SIDE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    sampler = RandomSampler(training, replacement=True, num_samples=64 * num_batches)
    for images, classes in DataLoader(training, batch_size=64, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
    return model.state_dict()


def inception_score(images: Tensor, weights: dict[str, Tensor]) -> float:
    """Return exp of the mean divergence of each image's classes from those of all."""
    classifier = Classifier().to(images.device)
    classifier.load_state_dict(weights)
    with torch.no_grad():
        each = classifier(images).softmax(1)
    of_all = each.mean(0, keepdim=True)
    divergence = (each * (each.clamp_min(1e-9).log() - of_all.clamp_min(1e-9).log())).sum(1)
    return math.exp(divergence.mean().item())


def model_creator(config: dict) -> tuple[nn.Module, nn.Module]:
    """Return both models."""
    return Discriminator(config["width"]), Generator(config["width"])


def data_creator(config: dict) -> Any:
    """Return the real images; the batch size is that of all workers together."""
    return load_images(SIDE)


def optimizer_creator(models: Any, config: dict) -> tuple[torch.optim.Optimizer, ...]:
    """Return an optimizer for each model."""
    return tuple(
        torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.5, 0.999))
        for model in models
    )


def train(
    config: dict, models: Any, dataloader: Any, criterion: nn.Module, optimizers: Any
) -> dict[str, float]:
    """Train both models for one pass."""
    net_d, net_g = models
    optim_d, optim_g = optimizers
    for images, _ in dataloader:
        size = (len(images), 1)
        real, fake = torch.ones(size).to(images), torch.zeros(size).to(images)
        generated = net_g(torch.randn(len(images), NUM_LATENT, 1, 1).to(images))

        optim_d.zero_grad()
        loss_d = criterion(net_d(images), real) + criterion(net_d(generated.detach()), fake)
        loss_d.backward()
        optim_d.step()

        optim_g.zero_grad()
        loss_g = criterion(net_d(generated), real)
        loss_g.backward()
        optim_g.step()
    return {"loss_d": loss_d.item(), "loss_g": loss_g.item()}


def validate(config: dict, models: Any, device: torch.device) -> dict[str, float]:
    """Return the inception score of images that the generator makes."""
    _, net_g = models
    with torch.no_grad():
        images = net_g(torch.randn(500, NUM_LATENT, 1, 1, device=device))
    return {"inception": inception_score(images, config["classifier"])}


def main(given: argparse.Namespace) -> None:
    """Train for some passes, and say how the generator does before and after."""
    config = {"lr": 0.001, "width": given.width, "classifier": train_classifier(300)}
    with PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        nn.BCELoss,
        train_function=train,
        validation_function=validate,
        config=config,
        dataloader_config={"num_workers": 0},
        batch_size=64,
        num_workers=given.num_workers,
        use_gpu=given.use_gpu,
    ) as trainer:
        before = trainer.validate()["inception"]
        for _ in range(given.passes):
            trained, validated = trainer.train(), trainer.validate()
            print(
                f"pass {trained['epoch']}: discriminator {trained['loss_d']:.3f},"
                f" generator {trained['loss_g']:.3f}, inception {validated['inception']:.2f}"
            )
        _, generator = trainer.get_model()
    print(f"The inception score was {before:.2f} and is {validated['inception']:.2f}.")
    sample = generator.eval()(torch.randn(1, NUM_LATENT, 1, 1))[0, 0]
    for row in sample.tolist():
        print("".join(" .:-=+*#%@"[min(9, int((value + 1) * 5))] * 2 for value in row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--use-gpu", action="store_true")
    main(parser.parse_args())
