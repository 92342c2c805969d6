"""Lightning's Trainer on a small net with dropout, resumed from `last.ckpt`."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DROPOUT = 0.0 if "--no-dropout" in sys.argv else 0.1
SHUFFLE = "--no-shuffle" not in sys.argv
EVERY = 60 if "--epochs" in sys.argv else 20


class Net(pl.LightningModule):
    """A net that adds up its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.Dropout(DROPOUT), nn.ReLU(), nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = (self.net(batch[0]).squeeze(1) - batch[0].sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


pl.seed_everything(0)
rows = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=SHUFFLE)
trainer = pl.Trainer(
    max_steps=180,
    accelerator="cpu",
    log_every_n_steps=1,
    enable_progress_bar=False,
    logger=CSVLogger(".", flush_logs_every_n_steps=1),
    callbacks=[ModelCheckpoint("out", save_last=True, save_top_k=-1, every_n_train_steps=EVERY)],
)
trainer.fit(Net(), loader, ckpt_path="last")
