"""Describe a training by config objects, and run it."""

import argparse
import dataclasses
import logging

import torch
from digits import Digits, Net
from torch import nn

from paceline.declarative import ModelParameters, Trainer, TrainingConfig


@dataclasses.dataclass
class NetParameters(ModelParameters):
    """The arguments of the net's constructor."""

    num_filters: int = 8
    dropout: float = 0.1


def main() -> None:
    """Train, and say what the best model recognises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--checkpoint-dir", help="go on with the run of this directory")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    configs = TrainingConfig(
        model_class=Net,
        model_params=NetParameters(),
        dataset=Digits("training"),
        test_dataset=Digits("test"),
        validation_ratio=0.15,
        pred_names_and_types=[("digit", "cls"), ("darkness", "regr")],
        loss_function=[nn.CrossEntropyLoss(), nn.MSELoss()],
        loss_weights=[1.0, 10.0],
        task_type="classification and regression",
        optimizer=torch.optim.AdamW,
        optimizer_params={"weight_decay": 0.01},
        learning_rate_per_process=0.005,
        batch_size_per_process=64,
        num_epochs=given.epochs,
        random_seed=1,
        model_save_dir="results",
        checkpoint_dir=given.checkpoint_dir,
    )
    trainer = Trainer(configs)
    trainer.build()
    history = trainer.run_training()
    trainer.plot_training_history()
    print(
        f"Of the test images {100 * history['test_acc_digit'][-1]:.1f}% are recognised, and"
        f" {100 * history['test_acc_darkness'][-1]:.1f}% of the variance of their darkness is"
        " explained."
    )


if __name__ == "__main__":
    main()
