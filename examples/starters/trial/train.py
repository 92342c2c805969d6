"""Model, data and training step in a class; Paceline runs the loop."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import pytorch

HPARAMS = {"global_batch_size": 32, "lr": 0.1}


class Line(pytorch.PyTorchTrial):
    """Fit a line to noisy points."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(512, 1, generator=generator)
        y = 3 * x - 1 + 0.1 * torch.randn(512, 1, generator=generator)
        self.train_set = TensorDataset(x[128:], y[128:])
        self.test_set = TensorDataset(x[:128], y[:128])
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr"))
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.train_set, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.test_set, batch_size=128)


def main(batches: int) -> None:
    """Train, and print the last metrics."""
    with pytorch.init(HPARAMS, seed=1) as context:
        trainer = pytorch.Trainer(Line(context), context)
        result = trainer.fit(
            max_length=pytorch.Batch(batches),
            validation_period=pytorch.Batch(50),
            checkpoint_period=pytorch.Batch(50),
            metric="validation_loss",
        )
        if context.distributed.rank == 0 and result.best_metrics:
            print(f"The best validation loss is {result.best_metrics['validation_loss']:.4f}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    main(**vars(parser.parse_args()))
