"""Lightning as its guide shows it: a module, its checkpoint callback, and torchrun's restarts."""

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from work import (
    BATCH_SIZE,
    CHECKPOINT_PERIOD,
    DIRECTORY,
    NUM_STEPS,
    StepLog,
    Text,
    Transformer,
    loss_of,
    optimizer_of,
)


class Module(lightning.LightningModule):  # type: ignore[misc]  # Its types are not read.
    """Predict the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def on_train_start(self) -> None:
        self.step_log = StepLog(self.global_rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.step_log(self.global_step, loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lightning.seed_everything(1)
    directory = DIRECTORY / "lightning"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=NUM_STEPS,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(
                directory, every_n_train_steps=CHECKPOINT_PERIOD, save_top_k=1, save_last=True
            )
        ],
    )
    loader = DataLoader(Text(), batch_size=BATCH_SIZE, shuffle=True)
    is_resumed = (directory / "last.ckpt").exists()
    trainer.fit(Module(), loader, ckpt_path="last" if is_resumed else None)
