"""A training whose model is sharded; run by test_sharding.py in several processes.

Environment: MODE (data_parallel), CASE (what is special), SAMPLES (a directory for what each rank
has trained on), WINDOW (batches of an optimizer step), LENGTH (batches), SHARDS (of
a batch, 4 by default).
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import pytorch

CASE = os.environ.get("CASE", "")


class Numbered(torch.utils.data.Dataset[Any]):
    """38 samples with their numbers: the last batch of four has two."""

    def __init__(self, size: int = 38) -> None:
        generator = torch.Generator().manual_seed(3)
        self._x = torch.randn(size, 6, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        return self._x[index], index


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same without a length."""

    def __iter__(self) -> Any:
        return iter([Numbered()[index] for index in range(38)])


class Model(nn.Module):
    """Blocks in a list, with odd sizes that no number of ranks divides, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        dropout = 0.2 if CASE == "dropout" else 0.0
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 6, bias=False)
        if CASE.startswith("tied"):
            self.blocks[2].weight = self.blocks[0].weight
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.first(x)
        for block in self.blocks:
            x = self.dropout(torch.tanh(block(x)))
        return self.last(self.norm(x))


class Trial(pytorch.PyTorchTrial):
    """Reconstructs its input."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        model = Model().double()
        if CASE == "early optimizer":
            torch_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        units = {"class": nn.Linear, "count": 40, "function": lambda m: isinstance(m, nn.LayerNorm)}
        units["tied in one unit"] = lambda module: False
        frozen = CASE == "frozen base"
        self.model = context.wrap_model(model, trainable_only=frozen, shard_units=units.get(CASE))
        if CASE != "early optimizer":
            torch_optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(torch_optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.9)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        rank, size = context.distributed.rank, context.distributed.size
        self._samples = Path(os.environ["SAMPLES"], f"{rank}-of-{size}")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, ids = batch
        loss = (self.model(x) - x).square().mean()
        if CASE == "plain":
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return {"loss": loss}
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=lambda params: torch.nn.utils.clip_grad_norm_(params, 0.5),
        )
        if self.context.accumulation.weight:
            with self._samples.open("a") as file:
                print(batch_idx, *ids.tolist(), file=file)
        return {"loss": loss}

    if CASE == "whole set":

        def evaluate_full_dataset(self, loader: Any) -> Any:
            losses = [(self.model(x) - x).square().sum() for x, _ in loader]
            return {"loss": sum(losses) / len(loader.dataset)}

    else:

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": (self.model(batch[0]) - batch[0]).square().sum(1).mean()}

    def build_training_data_loader(self) -> Any:
        if CASE == "stream":
            return pytorch.DataLoader(Stream(), batch_size=1)
        return pytorch.DataLoader(Numbered(), batch_size=4, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(10), batch_size=4)


def main() -> None:
    with pytorch.init(
        {"global_batch_size": 4},
        seed=5,
        resume="auto",
        data_parallel=os.environ["MODE"],
        precision=os.environ.get("PRECISION", "fp32"),
        num_shards=int(os.environ.get("SHARDS", "4")),
    ) as context:
        trial = Trial(context)
        result = pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(int(os.environ["LENGTH"])),
            validation_period=pytorch.Batch(10),
            checkpoint_period=pytorch.Batch(5),
            aggregation_frequency=int(os.environ.get("WINDOW", "1")),
        )
        if context.distributed.rank == 0:
            facts = {
                "num_own": sum(p.to_local().numel() for p in trial.model.parameters())
                if os.environ["MODE"] == "fsdp" and context.distributed.size > 1
                else sum(p.numel() for p in trial.model.parameters()),
                "num_all": sum(p.numel() for p in trial.model.parameters()),
                "loss": float(result.metrics["loss"]),
            }
            Path("facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
