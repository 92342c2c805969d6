"""The smallest trial: a line through points. Guides use it, so that their blocks run."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import pytorch


def points(number):
    x = torch.linspace(-1, 1, number).unsqueeze(1)
    return TensorDataset(x, 3 * x + 1)


class LineTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr"))
        )

    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}

    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(points(640), batch_size=size, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(points(100), batch_size=50)
