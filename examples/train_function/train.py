"""Train a small net on images of digits with a loop of one's own, on as many workers as you like.

`python train.py` uses two worker processes of this machine, `python train.py 4` uses four, and
`python train.py 0` none: everything runs in one process then, where a debugger can follow it.
"""

import sys

import torch
from digits import accuracy, load_images
from torch import nn
from torch.utils.data import DataLoader

from paceline import train


def train_digits(config: dict) -> nn.Module:
    """Train as one would in a single process; the calls to `train` are all that is added."""
    train.enable_reproducibility(config["seed"])
    training, test = load_images()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model, optimizer = train.accelerate(model, optimizer)
    loader = DataLoader(training, batch_size=config["batch_size"], shuffle=True)
    loader = train.prepare_data_loader(loader)

    first_epoch = 0
    state = train.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, config["epochs"]):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            train.backward(loss)
            optimizer.step()
        train.report(epoch=epoch, loss=loss.item(), accuracy=accuracy(model, test))
        train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch)
    return model


def main() -> None:
    """Train on workers, and evaluate the model that they return."""
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    config = {"seed": 1, "lr": 0.1, "epochs": 10, "batch_size": 64 // max(1, num_workers)}
    with train.Trainer(num_workers=num_workers) as trainer:
        results = trainer.run(train_digits, config, callbacks=[train.PrintCallback()])
    _, test = load_images()
    print(f"The model recognises {accuracy(results[0], test):.1%} of the test images.")
    print(f"{len(results.checkpoints)} checkpoints are in {results.run_dir}.")


if __name__ == "__main__":
    main()
