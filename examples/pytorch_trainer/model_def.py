"""A convolutional net and the trial that trains it: what is yours when Paceline takes the loop."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR

from data import load_images
from paceline import pytorch


class Net(nn.Sequential):
    """Two convolutions and a linear layer; takes [batch, 1, side, side], gives [batch, 10]."""

    def __init__(self, side: int, num_filters: int, dropout: float) -> None:
        super().__init__(
            *(nn.Conv2d(1, num_filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(num_filters, 2 * num_filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(dropout)),
            nn.Linear(2 * num_filters * (side // 4) ** 2, 10),
        )


class ImageTrial(pytorch.PyTorchTrial):
    """Sort images into ten classes."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.train_set, self.test_set = load_images()
        side = self.train_set[0][0].shape[-1]
        net = Net(side, context.get_hparam("num_filters"), context.get_hparam("dropout"))

        # What is wrapped is put on the device, shared by all ranks, stored and restored.
        self.model = context.wrap_model(net)
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("learning_rate"))
        )
        context.wrap_lr_scheduler(
            ExponentialLR(self.optimizer, gamma=0.999),
            pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        loss = functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        output = self.model(images)
        return {
            "validation_loss": functional.cross_entropy(output, labels),
            "accuracy": (output.argmax(1) == labels).float().mean(),
        }

    # The batch size is that of one process; Paceline deals the data out.
    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.train_set, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.test_set, batch_size=500)
