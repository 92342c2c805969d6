"""Train a net on all processes that a launcher has started; leave before the time is over.

The images are the 1,797 digits of 8x8 pixels that come with scikit-learn.
"""

import argparse
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.declarative import ModelParameters, ParallelizationConfig, Trainer, TrainingConfig


@dataclasses.dataclass
class NetParameters(ModelParameters):
    """The arguments of the net's constructor."""

    width: int = 64
    pause_s: float = 0.0


class Net(nn.Sequential):
    """A net of two layers; a pause makes up for the work of a larger one."""

    def __init__(self, width: int, pause_s: float) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.pause_s = pause_s

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of the classes [n, 10]."""
        time.sleep(self.pause_s)
        return super().forward(images)


@contextmanager
def leaving_after(minutes: float) -> Iterator[None]:
    """Have this process told to leave, for schedulers that send no signal ahead."""
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> None:
    """Train; the state is stored when the run is told to leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minutes", type=float, help="leave after so long")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each batch")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    trainer = Trainer(
        TrainingConfig(
            model_class=Net,
            model_params=NetParameters(pause_s=given.pause),
            dataset=TensorDataset(images, torch.tensor(found.target)),
            pred_names=["digit"],
            loss_function=nn.CrossEntropyLoss(),
            optimizer=torch.optim.AdamW,
            learning_rate_per_process=0.002,
            batch_size_per_process=32,
            num_epochs=given.epochs,
            random_seed=1,
            model_save_dir="results",
            parallelization_params=ParallelizationConfig(parallelization_type="multi_node"),
        )
    )
    trainer.build()
    # One process is told, and all leave. A second signal would end a process that is done.
    is_told = given.minutes is not None and trainer.rank == 0
    with leaving_after(given.minutes) if is_told else nullcontext():
        history = trainer.run_training()
    if trainer.is_finished and trainer.rank == 0:
        accuracy = 100 * history["val_acc_digit"][-1]
        logging.info("Of the validation images %.1f%% are recognised.", accuracy)


if __name__ == "__main__":
    main()
