"""The training of `step_loops.py`, as each peer's documentation writes it; defaults everywhere."""

from typing import Any

import torch
from step_loops import (
    LOOPS,
    ON_CPU,
    Model,
    Place,
    first_batch,
    loss_function,
    loss_of,
    optimizer_of,
    train_barely,
)
from torch.utils.data import DataLoader

_LIGHTNING_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def run_lightning(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train by Lightning's trainer, which logs the loss every 50 steps."""
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, place)

    lightning.Trainer(
        max_epochs=1,
        accelerator="gpu" if place.is_cuda else "cpu",
        devices=1,
        precision=_LIGHTNING_PRECISIONS[place.precision],
    ).fit(Module(), loader)


def run_accelerate(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train by a loop over what `Accelerator.prepare` returns; it reports nothing."""
    from accelerate import Accelerator

    mixed = "no" if place.precision == "fp32" else place.precision
    accelerator = Accelerator(mixed_precision=mixed, cpu=not place.is_cuda)
    optimizer = optimizer_of(model, place)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    for batch in batches:
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
        optimizer.zero_grad()


def run_ignite(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train by Ignite's supervised trainer; it reports nothing.

    That knows no bfloat16, so that with it the engine has a step of its own.
    """
    from ignite.engine import Engine, create_supervised_trainer

    model.to(place.device)
    optimizer = optimizer_of(model, place)
    if place.precision == "fp32":
        trainer = create_supervised_trainer(
            model, optimizer, loss_function, device=place.device, non_blocking=True
        )
    else:
        trainer = Engine(lambda _, batch: train_barely(model, batch, optimizer, place))
    trainer.run(loader, max_epochs=1)


def run_determined(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train by Determined's `Trainer.fit`, which reports every 100 steps."""
    from determined import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(model)
            self.optimizer = context.wrap_optimizer(optimizer_of(model, place))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = loss_of(self.model, batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            return {"validation_loss": loss_of(self.model, batch)}

        def build_training_data_loader(self) -> Any:
            size = loader.batch_size
            return pytorch.DataLoader(loader.dataset, batch_size=size, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(first_batch(loader), batch_size=loader.batch_size)

    with pytorch.init(hparams={"global_batch_size": loader.batch_size}) as context:
        trainer = pytorch.Trainer(Trial(context), context)
        trainer.fit(max_length=pytorch.Batch(num_steps))


PEER_LOOPS = {
    **LOOPS,
    "ignite": run_ignite,
    "determined": run_determined,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
}
