"""Step 1 of the guide: define a trial."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

# The guide's 9216, made small: it stores a checkpoint after every tenth batch.
NUM_INPUTS = 16


class MyPyTorchTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Linear(NUM_INPUTS, 128)))
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adadelta(self.model.parameters(), lr=0.1)
        )

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        data, labels = batch
        output = self.model(data)
        loss = torch.nn.functional.nll_loss(output, labels)

        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)

        return {"loss": loss}

    def evaluate_batch(self, batch: pytorch.TorchData) -> dict[str, Any]:
        data, labels = batch
        output = self.model(data)
        validation_loss = torch.nn.functional.nll_loss(output, labels)
        accuracy = (output.argmax(1) == labels).float().mean()
        return {"validation_loss": validation_loss, "accuracy": accuracy}

    def build_training_data_loader(self) -> DataLoader:
        train_set = make_set(24)
        return DataLoader(train_set)

    def build_validation_data_loader(self) -> DataLoader:
        validation_set = make_set(4)
        return DataLoader(validation_set)


def make_set(size: int) -> TensorDataset:
    numbers = torch.linspace(-1, 1, size * NUM_INPUTS)
    return TensorDataset(numbers.reshape(size, NUM_INPUTS), torch.arange(size) % 10)
