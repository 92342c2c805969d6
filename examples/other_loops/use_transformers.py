"""The loop of Transformers on the workers of Paceline."""

from typing import Any

import torch
import transformers
from digits import accuracy, load_images, make_net, run_on_workers
from torch import nn

from paceline import train
from paceline.integrations import prepare_transformers


class Digits(nn.Module):
    """The net as Transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the outputs."""
        logits = self.net(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def fit(config: dict) -> float:
    """Train; the trainer gives each worker its part of the data, and goes on from checkpoints."""
    train.enable_reproducibility(1)
    rows: list[Any] = [{"images": x, "labels": y} for x, y in load_images()[0]]
    arguments = transformers.TrainingArguments(
        output_dir="out",
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=16,
        learning_rate=0.003,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        logging_strategy="epoch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = Digits()
    prepare_transformers(
        transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    ).train()
    return accuracy(model.net)


if __name__ == "__main__":
    run_on_workers(fit)
