"""The training of `step_loops.py`, as each peer's documentation writes it; defaults everywhere."""

from typing import Any

import torch
from step_loops import BATCH_SIZE, LOOPS, Model, data, loss_of, optimizer_of
from torch.utils.data import DataLoader


def run_lightning(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by `lightning.Trainer`, which logs the loss every 50 steps."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    lightning.Trainer(max_epochs=1).fit(Module(), loader)


def run_accelerate(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by a loop over what `Accelerator.prepare` returns; it reports nothing."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    prepared, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader)
    for batch in batches:
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
        optimizer.zero_grad()


def run_ignite(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by Ignite's supervised trainer; it reports nothing."""
    from ignite.engine import create_supervised_trainer

    loss_function = torch.nn.functional.mse_loss
    create_supervised_trainer(model, optimizer_of(model), loss_function).run(loader, max_epochs=1)


def run_determined(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by Determined's `Trainer.fit`, which reports every 100 steps."""
    from determined import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(model)
            self.optimizer = context.wrap_optimizer(optimizer_of(model))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = loss_of(self.model, batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            return {"validation_loss": loss_of(self.model, batch)}

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(loader.dataset, batch_size=BATCH_SIZE, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(data(1).dataset, batch_size=BATCH_SIZE)

    with pytorch.init(hparams={"global_batch_size": BATCH_SIZE}) as context:
        trainer = pytorch.Trainer(Trial(context), context)
        trainer.fit(max_length=pytorch.Batch(num_steps))


PEER_LOOPS = {
    **LOOPS,
    "ignite": run_ignite,
    "determined": run_determined,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
}
