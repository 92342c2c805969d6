"""A training of two models whose every part draws random numbers or keeps state, as a user runs it.

Variables: PRECISION, and COMPILED for models that torch compiles.
"""

import os
from typing import Any

import torch
from torch import nn

from paceline import pytorch

NUM_SAMPLES, SHARD = 96, 8


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that loader processes augment."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return x + 0.1 * torch.randn(16), (x.sum() > 0).long()


class Trial(pytorch.PyTorchTrial):
    """Two models with an optimizer each; the second one learns from what the first one makes."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        first = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16)
        )
        second = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
        if "COMPILED" in os.environ:
            backend = "inductor" if context.device.type == "cuda" else "eager"
            first.compile(backend=backend)
            second.compile(backend=backend)
        self.first, self.second = context.wrap_model(first), context.wrap_model(second)
        adam = torch.optim.AdamW(self.first.parameters(), lr=1e-2)
        sgd = torch.optim.SGD(self.second.parameters(), lr=1e-2, momentum=0.9)
        self.optimizers = [context.wrap_optimizer(one) for one in (adam, sgd)]
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(sgd, 5, gamma=0.7),
            pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
        )

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        made = self.first(batch[0])
        # Drawn on the device.
        noise = torch.randn_like(made) if self.first.training else 0.0
        return nn.functional.cross_entropy(self.second(made + 0.1 * noise), batch[1])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.context.backward(loss)
        for optimizer in self.optimizers:
            self.context.step_optimizer(optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.loss_of(batch)}

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(
            Noisy(),
            batch_size=SHARD,
            shuffle=True,
            num_workers=2,
            pin_memory=self.context.device.type == "cuda",
        )

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Noisy(), batch_size=SHARD)


def main() -> None:
    """Train two epochs, with checkpoints within them."""
    with pytorch.init(
        hparams={"global_batch_size": SHARD}, seed=7, precision=os.environ["PRECISION"]
    ) as context:
        pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Epoch(2),
            checkpoint_period=pytorch.Batch(5),
            reporting_period=pytorch.Batch(4),
            checkpoint_policy="none",
        )


if __name__ == "__main__":
    main()
