"""Train functions that a master, `train.search` and Ray Tune search in the same way.

Each takes four steps in an epoch, for four epochs. `loss` of the validation is `lr`; where a
library tells training and evaluation apart, that of training has the reverse order.
"""

import os
import sys
import warnings
from typing import Any

from paceline import core, integrations, train

EPOCHS, STEPS = 4, 4


def fit_function(config: dict[str, Any]) -> None:
    """Train by a loop of one's own."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.ones(STEPS * 2, 1))
    loader = train.prepare_data_loader(DataLoader(data, batch_size=2 // train.world_size()))
    for epoch in range(EPOCHS):
        for _ in loader:
            pass
        train.save_checkpoint(epoch=epoch)
        train.report(loss=config["lr"], step=(epoch + 1) * STEPS)
        if train.should_preempt():
            return


def fit_accelerate(config: dict[str, Any]) -> None:
    """Train by a loop of one's own with Accelerate."""
    import torch
    from accelerate import Accelerator
    from torch import nn

    accelerator = Accelerator(cpu=True, log_with=integrations.PacelineTracker())
    accelerator.init_trackers("any")
    model = accelerator.prepare(nn.Linear(1, 1))
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            accelerator.backward(model(torch.ones(1, 1)).mean())
        accelerator.log({"train_loss": -config["lr"]}, step=(epoch + 1) * STEPS)
        accelerator.log({"loss": config["lr"]}, step=(epoch + 1) * STEPS)
        if train.should_preempt():
            return


def fit_lightning(config: dict[str, Any]) -> None:
    """Train with Lightning, which has one name for both metrics."""
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore")

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", -config["lr"])
            return self.net(batch[0]).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", config["lr"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = DataLoader(TensorDataset(torch.ones(STEPS, 1)))
    trainer = integrations.lightning_trainer(
        max_epochs=EPOCHS, log_every_n_steps=2, enable_model_summary=False
    )
    trainer.fit(Net(), loader, loader)


def fit_transformers(config: dict[str, Any]) -> None:
    """Train with the trainer of Transformers, which evaluates `eval_loss`."""
    import torch
    import transformers
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            out = self.net(x)
            lr = config["lr"] if not self.training else -config["lr"]
            return {"loss": 0 * out.mean() + lr, "logits": out}

    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * STEPS
    arguments = transformers.TrainingArguments(
        output_dir="out", num_train_epochs=EPOCHS, per_device_train_batch_size=1,
        per_device_eval_batch_size=1, eval_strategy="epoch", save_strategy="no", logging_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Net(), args=arguments, train_dataset=rows, eval_dataset=rows
    )
    integrations.prepare_transformers(trainer).train()


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cluster = core.get_cluster_info()
    assert cluster is not None
    with train.Trainer(num_workers=int(sys.argv[2])) as trainer:
        trainer.run(globals()[f"fit_{sys.argv[1]}"], dict(cluster.trial.hparams))
