"""Paceline's trial class, for the launcher and for a master."""

from typing import Any

from torch import Tensor
from torch.utils.data import Subset
from work import (
    BATCH_SIZE,
    CHECKPOINT_PERIOD,
    NUM_STEPS,
    StepLog,
    Text,
    Transformer,
    loss_of,
    optimizer_of,
)

from paceline import pytorch


class TransformerTrial(pytorch.PyTorchTrial):
    """Predict the next byte."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(Transformer())
        self.optimizer = context.wrap_optimizer(optimizer_of(self.model))
        self.log = StepLog(context.distributed.rank)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.log(batch_idx, loss)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        return {"validation_loss": loss_of(self.model, batch)}

    def build_training_data_loader(self) -> pytorch.DataLoader[Tensor]:
        return pytorch.DataLoader(Text(), batch_size=BATCH_SIZE, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader[Tensor]:
        return pytorch.DataLoader(Subset(Text(), [0]), batch_size=1)


if __name__ == "__main__":
    with pytorch.init({"global_batch_size": 2 * BATCH_SIZE}, seed=1) as context:
        pytorch.Trainer(TransformerTrial(context), context).fit(
            max_length=pytorch.Batch(NUM_STEPS),
            checkpoint_period=pytorch.Batch(CHECKPOINT_PERIOD),
            reporting_period=pytorch.Batch(1),
            memory_checkpoints=True,
        )
