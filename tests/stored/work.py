"""Trainings whose numbers are exact in any order and on any processor: python work.py DOOR.

Losses are linear and all factors are powers of two, so nothing is rounded, and the end tells which
samples came in which order. With STOP=1 a training is killed after its checkpoint at step 5 of 8
(train function: 2 of 4). Each step adds a line to the file "steps".
"""

from __future__ import annotations  # workers get functions, and evaluate nothing more

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.arange(16.0).reshape(16, 1)
STOPS = "STOP" in os.environ


def make_model(*_: Any) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def make_optimizer(model: nn.Module, *_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def tell_end(model: nn.Module) -> None:
    (weight,) = model.parameters()
    Path("end").write_text(weight.item().hex())


def note_step() -> None:
    with Path("steps").open("a") as file:
        file.write("step\n")


def die(pid: int | None = None) -> None:
    """End the training as soon as its checkpoint is whole, which is written in the background."""
    [run] = (path for path in Path("paceline_runs").iterdir() if path.is_dir())
    while not list(run.glob("checkpoints/*/manifest.json")) or any(
        path.is_file() for path in run.glob("begun_checkpoints/*")
    ):
        time.sleep(0.01)
    # The driver first: it would start a killed worker again.
    for each in filter(None, (pid, os.getpid())):
        os.kill(each, signal.SIGKILL)


def core() -> None:
    from paceline import core

    with core.init(name="core", resume="auto") as context:
        total, first = 0, 0
        if (uuid := context.latest_checkpoint) is not None:
            with context.checkpoint.restore_path(uuid) as path:
                first, total = map(int, (path / "state").read_text().split())
        for step in range(first + 1, 9):
            total = total * 3 + step
            note_step()
            context.train.report_training_metrics(step, {"total": total})
            if step % 5 == 0:
                context.train.report_validation_metrics(step, {"total": total})
                with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "state").write_text(f"{step} {total}")
            if STOPS and step == 6:
                die()
    Path("end").write_text(str(total))


def trial(*_: Any) -> None:
    from paceline import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(make_model())
            self.optimizer = context.wrap_optimizer(make_optimizer(self.model))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if self.context.distributed.rank == 0:
                note_step()
                if STOPS and batch_idx == 6:
                    die()
            loss = self.model(batch[0]).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": self.model(batch[0]).mean()}

        def build_training_data_loader(self) -> Any:
            size = self.context.get_per_slot_batch_size()
            return pytorch.DataLoader(TensorDataset(X), batch_size=size, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(TensorDataset(X), batch_size=8)

    hparams = {"global_batch_size": 4}
    with pytorch.init(hparams, name="trial", seed=7, resume="auto") as context:
        made = Trial(context)
        five = pytorch.Batch(5)
        pytorch.Trainer(made, context).fit(
            max_length=pytorch.Batch(8), validation_period=five, checkpoint_period=five
        )
        if context.distributed.rank == 0:
            tell_end(made.model)


def trial_of_two() -> None:
    from paceline import pytorch

    pytorch.launch(trial, num_workers=2)


def train_function(config: Any) -> None:
    from paceline import train

    train.enable_reproducibility(7)
    model = train.prepare_model(make_model())
    optimizer = train.prepare_optimizer(make_optimizer(model))
    loader = train.prepare_data_loader(DataLoader(TensorDataset(X), batch_size=4, shuffle=True))
    first = 0
    if state := train.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, 2):
        for (x,) in loader:
            optimizer.zero_grad()
            train.backward(model(x).mean())
            optimizer.step()
            if train.world_rank() == 0:
                note_step()
        train.report(epoch=epoch)
        train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch)
        if STOPS and train.world_rank() == 0:
            die(config["driver"])
    if train.world_rank() == 0:
        tell_end(model)


def function() -> None:
    from paceline import train

    trainer = train.Trainer(num_workers=2)
    trainer.run(train_function, {"driver": os.getpid()})


def creators() -> None:
    from paceline.creators import PyTorchTrainer

    with PyTorchTrainer(
        make_model,
        lambda config: TensorDataset(X, X),
        make_optimizer,
        lambda config: lambda predicted, _: predicted.mean(),
        dataloader_config={"num_workers": 0, "shuffle": True},
        batch_size=4,
        num_workers=2,
        seed=7,
    ) as trainer:
        if Path("state").exists():
            trainer.load("state")
        else:
            trainer.train(num_steps=5)
            trainer.save("state")
            if STOPS:
                return
        trainer.train(num_steps=3)
        tell_end(trainer.get_model())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
