"""A training whose model is sharded; run by test_sharding.py in several processes.

Environment: MODE (data_parallel), CASE (what is special, in one or more words), SAMPLES (a
directory for what each rank has trained on), WINDOW (batches of an optimizer step), LENGTH
(batches), SHARDS (of a batch, 4 by default), SHARD_SIZE, TENSOR (ranks that divide the model by a
plan), BASE (another value is another base).
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import pytorch

CASE = os.environ.get("CASE", "")
WORDS = CASE.split()


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
        if "adapters" in WORDS and "no adapter" not in CASE:
            x = x + self.adapter(x)
        return self.last(self.norm(x))


def adapt(model: Model) -> None:
    """Freeze a base, which is the same in each start, and add to it what is trained."""
    generator = torch.Generator().manual_seed(int(os.environ.get("BASE", "7")))
    for parameter in (*model.first.parameters(), *model.blocks.parameters()):
        parameter.requires_grad_(False)
        if not parameter.is_meta:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    if "no adapter" not in CASE:
        model.adapter = nn.Linear(7, 7, device=model.norm.weight.device).double()


def set_buffers(module: nn.Module) -> None:
    """Set what a model on the meta device has besides the parameters of its layers."""
    if isinstance(module, Model):
        module.num_calls.zero_()


def divide(model: nn.Module, mesh: Any) -> None:
    """Divide a model by a plan of its own: 7 rows or columns on two ranks are 4 and 3."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        # Tensors that are not divided equally must stay DTensors.
        "blocks.0": ColwiseParallel(use_local_output=False),
        "blocks.1": RowwiseParallel(),
        "blocks.2": ColwiseParallel(output_layouts=Replicate()),
        "last": RowwiseParallel(input_layouts=Replicate()),
    }
    if CASE == "dropout":
        # Of what the ranks hold together, they would draw other numbers than one process does.
        plan |= {"blocks.0": plan["blocks.2"], "blocks.1": plan["last"]}
    parallelize_module(model, mesh, plan)


class Trial(pytorch.PyTorchTrial):
    """Reconstructs its input."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        with torch.device("meta" if "meta" in WORDS else "cpu"):
            model = Model().double()
        # In no model: an optimizer alone has it.
        ones = torch.ones(6, dtype=torch.float64)
        self.lone = torch.nn.Parameter(ones, requires_grad="lone" in WORDS)
        if CASE == "early optimizer":
            torch_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        units = {"class": nn.Linear, "count": 40, "function": lambda m: isinstance(m, nn.LayerNorm)}
        units["tied in one unit"] = lambda module: False
        options: dict[str, Any] = {"shard_units": units.get(CASE)}
        if "adapters" in WORDS:
            adapt(model)
            options["trainable_only"] = "the-base"
        if "bf16" in WORDS:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            options["shard_precision"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if "recomputed" in WORDS:
            options["gradient_checkpointing"] = True
        if "compiled" in WORDS:
            options["compile"] = {"backend": "eager", "dynamic": False}
        if CASE == "mesh":
            from torch.distributed.device_mesh import init_device_mesh

            divide(model, init_device_mesh("cpu", (context.distributed.size,)))
        if "by hand" in CASE and context.tensor_mesh is not None:
            divide(model, context.tensor_mesh)
        elif CASE != "mesh":
            options["tensor_plan"] = divide
        self.model = context.wrap_model(model, init_weights=set_buffers, **options)
        if CASE != "early optimizer":
            trained = [each for each in self.model.parameters() if each.requires_grad]
            torch_optimizer = torch.optim.Adam(trained, lr=0.01)
        if "lone" in WORDS:
            # Checkpoints do not hold its value, which stays as it is: Adam's state tells its sums.
            torch_optimizer.add_param_group({"params": [self.lone], "lr": 0.0})
        self.optimizer = context.wrap_optimizer(torch_optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.9)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        rank, size = context.distributed.rank, context.distributed.size
        self._samples = Path(os.environ["SAMPLES"], f"{rank}-of-{size}")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, ids = batch
        if "touched" in WORDS and batch_idx == 2 and self.context.distributed.rank == 2:
            # In a way that leaves no trace.
            self.model.first.bias.to_local().data.add_(0.1)
        loss = (self.model(x) * self.lone - x).square().mean()
        if CASE == "plain":
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return {"loss": loss}
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=self.clip,
        )
        if self.context.accumulation.weight:
            with self._samples.open("a") as file:
                print(batch_idx, *ids.tolist(), file=file)
        return {"loss": loss}

    def clip(self, parameters: Any) -> None:
        if "lone" in WORDS:
            # torch has no norm of sharded and other tensors together.
            parameters = self.model.parameters()
        clip = torch.nn.utils.clip_grad_norm_
        if self.context.tensor_mesh is not None:
            clip = pytorch.clip_grad_norm_
        clip(parameters, 0.5)

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
        check_ranks=["*.num_calls"],  # each rank counts its own
        resume="auto",
        data_parallel=os.environ["MODE"],
        precision=os.environ.get("PRECISION", "fp32"),
        num_shards=int(os.environ.get("SHARDS", "4")),
        tensor_parallel_size=int(os.environ.get("TENSOR", "1")),
        shard_size=int(os.environ["SHARD_SIZE"]) if "SHARD_SIZE" in os.environ else None,
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
                "num_own": sum(
                    (p.to_local() if hasattr(p, "to_local") else p).numel()
                    for p in trial.model.parameters()
                ),
                "num_all": sum(p.numel() for p in trial.model.parameters()),
                # Without one before the first validation.
                "loss": float(result.metrics.get("loss", 0.0)),
                "lone": [
                    float(each) for each in trial.optimizer.state[trial.lone].get("exp_avg", ())
                ],
            }
            Path("facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
