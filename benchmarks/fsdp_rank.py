"""The part of `fsdp_steps.py` that one rank runs."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

Times = tuple[float, float]

_BLOCK = 50
# Steps of some milliseconds, of which most goes to FSDP.
_WIDTH, _NUM_LAYERS, _BATCH = 64, 4, 8


class BlockTrial(pytorch.PyTorchTrial):
    """Blocks of steps, each followed by one of a bare loop."""

    def __init__(self, context: pytorch.PyTorchTrialContext, num_steps: int) -> None:
        self.context = context
        self.num_steps = num_steps
        self.model = context.wrap_model(_model())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(optimizer)
        self.bare = _bare_blocks(num_steps, context.device)
        self.blocks: list[list[float]] = []
        self.begin = _now()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train; before that, end a block."""
        if batch_idx % _BLOCK == 0:
            ours = _spent(self.begin)
            if batch_idx:
                dist.barrier()
                begin = _now()
                next(self.bare)
                pairs = zip(ours, _spent(begin), strict=True)
                self.blocks.append([spent / _BLOCK for pair in pairs for spent in pair])
            dist.barrier()
            self.begin = _now()
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> Any:
        """Return nothing of interest."""
        return {"loss": 0.0}

    def build_training_data_loader(self) -> Any:
        """Return the samples of all ranks."""
        return _loader(self.num_steps * self.context.distributed.size)

    def build_validation_data_loader(self) -> Any:
        """Return one batch."""
        return _loader(1)


def run_blocks(num_blocks: int, device: str) -> None:
    """Train, and have the chief store the times of the slower rank."""
    num_steps = num_blocks * _BLOCK + 1
    num_ranks = int(os.environ["WORLD_SIZE"])
    with pytorch.init(
        {"global_batch_size": _BATCH * num_ranks}, seed=1, data_parallel="fsdp", device=device
    ) as context:
        trial = BlockTrial(context, num_steps)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(num_steps), checkpoint_policy="none"
        )
        gathered = context.distributed.allgather(trial.blocks)
        if context.distributed.rank == 0:
            slower = [max(each, key=sum) for each in zip(*gathered, strict=True)]
            Path("blocks.json").write_text(json.dumps(slower))


def _bare_blocks(num_steps: int, device: torch.device) -> Iterator[None]:
    model = _model().to(device)
    units: list[Any] = [*model, model]
    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(world, device.type)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    for unit in units:
        # gloo cannot divide sums.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number, batch in enumerate(_loader(num_steps)):
        x, y = (values.to(device) for values in batch)
        loss = mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (number + 1) % _BLOCK == 0:
            yield


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)))


def _loader(num_batches: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_batches * _BATCH, _WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x), batch_size=_BATCH, shuffle=True)


def _now() -> Times:
    """Return microseconds of the clock, and of processor time of all threads."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter() * 1e6, time.process_time() * 1e6


def _spent(begin: Times) -> Times:
    wall, processor = _now()
    return wall - begin[0], processor - begin[1]
