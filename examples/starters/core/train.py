"""A training loop of your own; Paceline reports, stores and resumes."""

import argparse

import torch
from torch import nn

import paceline


def main(epochs: int, lr: float) -> None:
    """Fit a line to noisy points, an epoch at a time."""
    torch.manual_seed(1)
    x = torch.rand(256, 1)
    y = 3 * x - 1 + 0.1 * torch.randn(256, 1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    with paceline.core.init(hparams={"epochs": epochs, "lr": lr}) as context:
        first = 1
        if context.latest_checkpoint is not None:
            with context.checkpoint.restore_path(context.latest_checkpoint) as path:
                state = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["epoch"] + 1

        for epoch in range(first, epochs + 1):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            context.train.report_training_metrics(epoch, {"loss": loss.item()})
            context.train.report_progress(epoch / epochs)

            if epoch % 10 == 0 or epoch == epochs:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with context.checkpoint.store_path({"steps_completed": epoch}) as (path, _):
                    torch.save({**state, "epoch": epoch}, path / "state.pt")
                if context.preempt.should_preempt():
                    return
    print(f"The line is y = {model.weight.item():.2f} x + {model.bias.item():.2f}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.5)
    main(**vars(parser.parse_args()))
