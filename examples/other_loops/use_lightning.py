"""Lightning's loop on the workers of Paceline."""

import lightning.pytorch as pl
import torch
from digits import accuracy, load_images, make_net, run_on_workers
from torch import nn
from torch.utils.data import DataLoader

from paceline import train
from paceline.integrations import lightning_trainer


class Digits(pl.LightningModule):
    """The net as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


def fit(config: dict) -> float:
    """Train on this worker's part of the data, from the last checkpoint on."""
    train.enable_reproducibility(1)
    loader = train.prepare_data_loader(DataLoader(load_images()[0], batch_size=16, shuffle=True))
    model = Digits()
    trainer = lightning_trainer(max_epochs=config["epochs"], enable_progress_bar=False)
    trainer.fit(model, loader)
    return accuracy(model.net)


if __name__ == "__main__":
    run_on_workers(fit)
