"""A float64 training in four shards that writes down which samples each rank saw in each step.

Variables: SAMPLES, the directory to write to, WINDOW (batches per optimizer step), DATA_PARALLEL,
and SHARDING, words for what is special in a sharded model. "hybrid" counts for an even number of
ranks.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

WINDOW = int(os.environ.get("WINDOW", "1"))
SHARDING = os.environ.get("SHARDING", "").split()
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
# 18 shards an epoch, so that the last batch has two of four, the last one smaller.
NUM_SAMPLES, SHARD, NUM_SHARDS = 52, 3, 4


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        options: dict[str, Any] = {}
        if "bf16" in SHARDING:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            options["shard_precision"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
            )
        self.model = context.wrap_model(
            model, gradient_checkpointing="recomputed" in SHARDING, **options
        )
        adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(adam)
        name = f"{context.distributed.rank}-of-{context.distributed.size}.txt"
        self.file = (Path(os.environ["SAMPLES"]) / name).open("a")

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        ids, x, y = batch
        self.file.write(f"{batch_idx} {' '.join(map(str, ids.tolist()))}\n")
        self.file.flush()
        loss = nn.functional.mse_loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        _, x, y = batch
        return {"validation_loss": nn.functional.mse_loss(self.model(x), y)}

    def build_training_data_loader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        data = TensorDataset(torch.arange(NUM_SAMPLES), x, x.sum(1, keepdim=True).sin())
        return DataLoader(data, batch_size=SHARD, shuffle=True)

    build_validation_data_loader = build_training_data_loader


with pytorch.init(
    hparams={"global_batch_size": SHARD * NUM_SHARDS},
    seed=5,
    num_shards=NUM_SHARDS,
    data_parallel=os.environ.get("DATA_PARALLEL", "flat"),
    shard_size=2 if "hybrid" in SHARDING and NUM_RANKS % 2 == 0 else None,
) as context:
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(50 * WINDOW),
        reporting_period=pytorch.Batch(10 * WINDOW),
        checkpoint_period=pytorch.Batch(10 * WINDOW),
        aggregation_frequency=WINDOW,
    )
